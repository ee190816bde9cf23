#!/usr/bin/env python3
"""Restores of one image of a PyTorch program with all memory first, and on demand, by turns.

The program holds `--gib` of weights, of which a step uses `--used-gib`. It is dumped in the middle and ended,
into a raw image in /dev/shm. Then it is restored `--rounds` times in each way, each time killed after
its memory is there; the last one of each way runs to its end and must print what the uninterrupted program
prints. The table has the time from the start of `gpucr restore` to the first step, and the phases.
"""

import argparse
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import verify
import warm


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=80)
    parser.add_argument("--used-gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", default="demand-logs")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-demand-", dir="/dev/shm"))
    command = verify.TORCH + ["infer", "--gib", str(args.gib), "--used-gib", str(args.used_gib),
                              "--steps", str(args.steps), "--delay", "0.01"]
    plain, log = out / "plain.log", out / "log"
    began = time.monotonic()
    process = verify.start(command, plain, {}, None)
    verify.wait_for_step(plain, 0, process)
    print(f"{args.gib} GiB, {args.used_gib:g} GiB used by a step", flush=True)
    print(f"cold start to step 0: {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
    if process.wait(timeout=300) != 0:
        raise RuntimeError(f"the plain run failed, see {plain}")
    expected = verify.meaningful(plain)

    process = verify.start(command, log, {}, args.gpucr)
    verify.wait_for_step(log, 40, process)
    image = images / "image"
    subprocess.run([args.gpucr, "dump", "--pid", str(process.pid), "-o", str(image), "--compress", "none"],
                   check=True)
    process.wait()
    size = log.stat().st_size

    failed = 0
    times = {"all first": [], "on demand": []}
    for number in range(args.rounds):
        for way, extra in [("all first", []), ("on demand", ["--on-demand"])]:
            report, first = warm.restore(args, image, log, size, ["--no-warm", *extra])
            times[way].append(first * 1000)
            phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
            print(f"{way} {number}: to step {first * 1000:.0f} ms, running {report['running_ms']:.0f} ms, "
                  f"all there {report['total_ms']:.0f} ms, {report.get('on_demand')} {phases}", flush=True)
            if number + 1 < args.rounds:
                os.kill(report["pid"], 9)
            while pathlib.Path(f"/proc/{report['pid']}").exists():
                time.sleep(0.01)
            if number + 1 == args.rounds:
                same = verify.meaningful(log) == expected
                failed += not same
                print(f"{way}: median {statistics.median(times[way]):.0f} ms, "
                      f"{'identical' if same else 'DIFFERENT'}", flush=True)
    shutil.rmtree(images, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
