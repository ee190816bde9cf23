#!/usr/bin/env python3
"""Restores of one image of a PyTorch program from disk and from a warm copy, pinned or not, by turns of rounds.

The program is dumped in the middle and ended, into a raw image in /dev/shm. Then it is restored `--rounds`
times from there (`--no-warm`), and `--rounds` times each from what `gpucr warm --unpinned` and `gpucr warm`
keep, each time killed after its first step; the last one of each way runs to its end and must print what
the uninterrupted program prints. The table has the time from the start of `gpucr restore` to the first step,
and the phases. With `--peer` the driver's checkpoint and CRIU then do the same once.
"""

import argparse
import statistics
import subprocess
import sys
import time

import peer
from dumped import Dumped


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="+", choices=["disk", "unpinned", "warm"], help="these ways alone")
    parser.add_argument("--out", default="warm-logs")
    peer.add_arguments(parser, optional=True)
    args = parser.parse_args()
    program = Dumped(args.gpucr, args.out, ["infer", "--gib", str(args.gib), "--steps", str(args.steps),
                                            "--delay", "0.01"])
    failed = 0
    ways = [("disk", ["--no-warm"], None), ("unpinned", [], ["--unpinned"]), ("warm", [], [])]
    for way, extra, keep in [way for way in ways if not args.only or way[0] in args.only]:
        if keep is not None:
            subprocess.run([program.gpucr, "warm", "--drop", "--all"], stdout=subprocess.DEVNULL)
            began = time.monotonic()
            subprocess.run([program.gpucr, "warm", *keep, str(program.image)], check=True)
            print(f"gpucr warm: {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
        times = []
        for number in range(args.rounds):
            report, first = program.restore(extra)
            times.append(first)
            phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
            print(f"{way} {number}: to step {first:.0f} ms, warm={report.get('warm')} "
                  f"by holder={report.get('by_holder')} {phases} total={report['total_ms']:.0f} "
                  f"next step {report['next_step_ms']:.0f}", flush=True)
            same = program.end(report, kill=number + 1 < args.rounds)
        failed += not same
        print(f"{way}: median {statistics.median(times):.0f} ms, "
              f"{'identical' if same else 'DIFFERENT'}", flush=True)
    subprocess.run([program.gpucr, "warm", "--drop", "--all"])
    program.remove()
    peer.show(args, program.command)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
