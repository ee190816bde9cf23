#!/usr/bin/env python3
"""Restores of one image of a PyTorch program with all memory first, and on demand, by turns.

The program holds `--gib` of weights, of which a step uses `--used-gib`. It is dumped in the middle and ended,
into a raw image in /dev/shm. Then it is restored `--rounds` times in each way, each time killed after
its memory is there; the last one of each way runs to its end and must print what the uninterrupted program
prints, with a hash of all of its memory at the end. The table has the time from the start of `gpucr restore` to the first step, and the phases.
With `--peer` the driver's checkpoint and CRIU then do the same once, with `--peer-gib`: they need twice that of
host memory.
"""

import argparse
import statistics
import sys

import peer
import verify
from dumped import Dumped


def infer(args, gib):
    """The program's arguments."""
    return ["infer", "--gib", str(gib), "--used-gib", str(args.used_gib), "--steps", str(args.steps),
            "--delay", "0.01"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=80)
    parser.add_argument("--used-gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--peer-gib", type=int, help="default: the same as --gib")
    parser.add_argument("--out", default="demand-logs")
    peer.add_arguments(parser, optional=True)
    args = parser.parse_args()
    print(f"{args.gib} GiB, {args.used_gib:g} GiB used by a step", flush=True)
    program = Dumped(args.gpucr, args.out, infer(args, args.gib))
    failed = 0
    times = {"all first": [], "on demand": []}
    for number in range(args.rounds):
        last = number + 1 == args.rounds
        for way, extra in [("all first", []), ("on demand", ["--on-demand"])]:
            report, first = program.restore(["--no-warm", *extra])
            times[way].append(first)
            phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
            print(f"{way} {number}: to step {first:.0f} ms, running {report['running_ms']:.0f} ms, "
                  f"all there {report['total_ms']:.0f} ms, {report.get('on_demand')} {phases}", flush=True)
            same = program.end(report, kill=not last)
            if last:
                failed += not same
                print(f"{way}: median {statistics.median(times[way]):.0f} ms, "
                      f"{'identical' if same else 'DIFFERENT'}", flush=True)
    program.remove()
    size = args.peer_gib or args.gib
    peer.show(args, [*verify.TORCH, *infer(args, size)], f"{size} GiB, ")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
