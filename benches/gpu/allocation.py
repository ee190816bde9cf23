#!/usr/bin/env python3
"""What allocating and freeing device memory takes under the shim and by the driver alone, in microseconds: medians over processes of each
kind, by turns. It needs a GPU and gpucr; `--help` lists what can be set."""

import argparse
import pathlib
import statistics
import subprocess
import sys

PROGRAM = [sys.executable, str(pathlib.Path(__file__).parent / "programs" / "allocate.py")]
KINDS = ["allocate", "free", "first allocate", "first free"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--processes", type=int, default=5, help="of each kind")
    parser.add_argument("--soft", action="store_true", help="on the software driver: says nothing of a GPU")
    args = parser.parse_args()
    device = ["--device", "soft"] if args.soft else []
    ways = {"driver": [], "shim": [args.gpucr, "run", *device, "--"]}
    if args.soft:
        del ways["driver"]
    found = {way: {} for way in ways}
    for _ in range(args.processes):
        for way, before in ways.items():
            done = subprocess.run([*before, *PROGRAM], capture_output=True, text=True, timeout=300, check=True)
            for line in done.stdout.splitlines():
                _, size, *times = line.split("\t")
                for kind, time in zip(KINDS, times):
                    found[way].setdefault((size, kind), []).append(float(time))
    print(f"{'size':<8} {'call':<16} " + " ".join(f"{way:>12}" for way in ways) + f" {'more':>9}")
    for (size, kind), times in found["shim"].items():
        medians = [statistics.median(found[way][size, kind]) for way in ways]
        more = f"{100 * (medians[-1] / medians[0] - 1):>8.1f}%"
        print(f"{size:<8} {kind:<16} " + " ".join(f"{time:>9.2f} us" for time in medians) + f" {more}")


if __name__ == "__main__":
    sys.exit(main())
