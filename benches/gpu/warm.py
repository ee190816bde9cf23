#!/usr/bin/env python3
"""Restores of one image of a PyTorch program from disk and from a warm copy, by turns of rounds.

The program is dumped in the middle and ended, into a raw image in /dev/shm. Then it is restored `--rounds`
times from there (`--no-warm`), and `--rounds` times from what `gpucr warm` keeps, each time killed after
its first step; the last one of each way runs to its end and must print what the uninterrupted program
prints. The table has the time from the start of `gpucr restore` to the first step, and the phases.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import verify


def restore(args, image, log, size, extra):
    """Restores in the background. Gives the report, the time to the first step, and the pid."""
    os.truncate(log, size)
    began = time.monotonic()
    with open(log.with_suffix(".json"), "w") as out:
        command = subprocess.Popen([args.gpucr, "restore", "--detach", "--json", *extra, str(image)],
                                   stdin=subprocess.DEVNULL, stdout=out)
        while log.stat().st_size == size:
            if command.poll() not in (None, 0) or time.monotonic() > began + 120:
                raise RuntimeError(f"restore: exit {command.returncode}")
            time.sleep(0.001)
        first = time.monotonic() - began
        command.wait()
    return json.loads(log.with_suffix(".json").read_text()), first


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="warm-logs")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-warm-", dir="/dev/shm"))
    command = verify.TORCH + ["infer", "--gib", str(args.gib), "--steps", str(args.steps),
                              "--delay", "0.01"]
    plain, log = out / "plain.log", out / "log"
    began = time.monotonic()
    process = verify.start(command, plain, {}, None)
    verify.wait_for_step(plain, 0, process)
    cold = time.monotonic() - began
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
    print(f"cold start to step 0: {cold * 1000:.0f} ms", flush=True)

    failed = 0
    for way, extra in [("disk", ["--no-warm"]), ("warm", [])]:
        if way == "warm":
            began = time.monotonic()
            subprocess.run([args.gpucr, "warm", str(image)], check=True)
            print(f"gpucr warm: {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
        times = []
        for number in range(args.rounds):
            report, first = restore(args, image, log, size, extra)
            times.append(first * 1000)
            phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
            print(f"{way} {number}: to step {first * 1000:.0f} ms, warm={report.get('warm')} {phases}",
                  flush=True)
            if number + 1 < args.rounds:
                os.kill(report["pid"], 9)
            while pathlib.Path(f"/proc/{report['pid']}").exists():
                time.sleep(0.01)
        same = verify.meaningful(log) == expected
        failed += not same
        print(f"{way}: median {statistics.median(times):.0f} ms, "
              f"{'identical' if same else 'DIFFERENT'}", flush=True)
    subprocess.run([args.gpucr, "warm", "--drop", "--all"])
    shutil.rmtree(images, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
