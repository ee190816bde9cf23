#!/usr/bin/env python3
"""What copies from the device cost a program beside them: the limit of any checkpoint that copies while a
program runs. Nothing of gpucr is in it.

A PyTorch inference program runs alone on a CPU. Another process, on the other CPUs, copies device memory of its own
for `--time` seconds, again and again; with `--limits` (GB/s) not faster than that. Prints the rate of the
copies and the program's speed during each, of that just before, for the program as it is and with its
launches captured in a CUDA graph.
"""

import argparse
import os
import pathlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time

from concurrent import TORCH, rate

COPIES = [sys.executable, str(pathlib.Path(__file__).resolve().parent / "programs" / "copies.py")]


def start(command, cpus, **streams):
    return subprocess.Popen(command, text=True, preexec_fn=lambda: os.sched_setaffinity(0, cpus), **streams)


class Program:
    """The inference program, with the times of its steps."""

    def __init__(self, args, cpus, more):
        self.folder = tempfile.TemporaryDirectory()
        self.file = pathlib.Path(self.folder.name) / "times"
        command = [*TORCH, "infer", "--gib", str(args.gib), "--steps", "1000000", "--times", str(self.file), *more]
        self.process = start(command, cpus, stdout=subprocess.DEVNULL)
        while len(self.times()) < 100:
            if self.process.poll() is not None:
                raise RuntimeError("the program has ended")
            time.sleep(0.1)

    def times(self):
        data = self.file.read_bytes() if self.file.exists() else b""
        return [t for (t,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]

    def end(self):
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--time", type=float, default=0.5)
    parser.add_argument("--limits", type=float, nargs="*", default=[0, 47, 45, 40, 30, 15],
                        help="GB/s; 0: as fast as it goes")
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))
    copier = start(COPIES, cpus[:-1], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    copier.stdout.readline()
    for name, more in [("launching each kernel", []), ("replaying a graph", ["--graph"])]:
        program = Program(args, cpus[-1:], more)
        copies = {limit: [] for limit in args.limits}
        for _ in range(args.rounds):
            for limit in args.limits:
                time.sleep(0.5)
                print(args.time, limit, file=copier.stdin, flush=True)
                copies[limit].append([float(word) for word in copier.stdout.readline().split()])
        time.sleep(0.5)
        times = program.times()
        program.end()
        for limit, done in copies.items():
            rates = [size / (ended - began) / 1e9 for began, ended, size in done]
            alone = [rate(times, (began - 0.45, began - 0.05)) for began, _, _ in done]
            speeds = [rate(times, (began, ended)) / before for (began, ended, _), before in zip(done, alone)]
            print(f"{name:<22} {statistics.median(alone):6.1f} steps/s alone, "
                  f"{f'at most {limit:g}' if limit else 'as fast as it goes':<18} {statistics.median(rates):5.1f} GB/s, "
                  f"program at {statistics.median(speeds) * 100:.1f} % "
                  f"({' '.join(f'{speed * 100:.0f}' for speed in speeds)})", flush=True)
    copier.stdin.close()
    copier.wait()


if __name__ == "__main__":
    main()
