#!/usr/bin/env python3
"""What copies from the device cost a program that runs meanwhile: the limit of any checkpoint that copies while a
program runs. Nothing of gpucr is in it.

A PyTorch inference program runs alone on a CPU. Another process, on the other CPUs, copies device memory of its own
for `--time` seconds, again and again; with `--limits` (GB/s) not faster than that. Prints the rate of the
copies and the program's speed during each, of that just before, for the program as it is and with its
launches captured in a CUDA graph.
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from steps import rate, read_times
from verify import TORCH

COPIES = [sys.executable, str(pathlib.Path(__file__).resolve().parent / "programs" / "copies.py")]


@contextlib.contextmanager
def process(command, cpus, **streams):
    """A process on these CPUs, which is killed in the end."""
    started = subprocess.Popen(command, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cpus), **streams)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def answer(copier):
    line = copier.stdout.readline()
    if not line:
        raise RuntimeError("the process that copies has ended")
    return line


def measure(args, copier, cpus, more):
    """For each limit what was copied: when that began and ended, and the bytes; and when the program's steps ended."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "times"
        command = [*TORCH, "infer", "--gib", str(args.gib), "--steps", "1000000", "--times", str(file), *more]
        with process(command, cpus, stdout=subprocess.DEVNULL) as program:
            while len(read_times(file)) < 100:
                if program.poll() is not None:
                    raise RuntimeError("the program has ended")
                time.sleep(0.1)
            copies = {limit: [] for limit in args.limits}
            for _ in range(args.rounds):
                for limit in args.limits:
                    time.sleep(0.5)
                    print(args.time, limit, file=copier.stdin, flush=True)
                    copies[limit].append([float(word) for word in answer(copier).split()])
            time.sleep(0.5)
            return copies, read_times(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time", type=float, default=0.5)
    parser.add_argument("--limits", type=float, nargs="*", default=[0, 47, 45, 40, 30, 15],
                        help="GB/s; 0: as fast as it goes")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        sys.exit("two CPUs are needed: one for the program, one for the copies")
    with process(COPIES, cpus[:-1], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as copier:
        answer(copier)
        for name, more in [("launching each kernel", []), ("replaying a graph", ["--graph"])]:
            copies, times = measure(args, copier, cpus[-1:], more)
            for limit, done in copies.items():
                rates = [size / (ended - began) / 1e9 for began, ended, size in done]
                alone = [rate(times, (began - 0.45, began - 0.05)) for began, _, _ in done]
                speeds = [rate(times, (began, ended)) / before for (began, ended, _), before in zip(done, alone)]
                print(f"{name:<22} {statistics.median(alone):6.1f} steps/s alone, "
                      f"{f'at most {limit:g}' if limit else 'as fast as it goes':<18} "
                      f"{statistics.median(rates):5.1f} GB/s, program at {statistics.median(speeds) * 100:.1f} % "
                      f"({' '.join(f'{speed * 100:.0f}' for speed in speeds)})", flush=True)


if __name__ == "__main__":
    main()
