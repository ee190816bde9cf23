#!/usr/bin/env python3
"""gpucr against NVIDIA's driver checkpoint with CRIU, on the same programs, in one run.

For each program the ways take turns, `--rounds` times. Measured for each: for how long the program
stood still, the whole dump, the restore from the command's start to the program's next step, and
the size of the image. Images are written to memory (/dev/shm). Prints medians, and whether all steps that each
program printed, before the dump and after the restore, are those of an undisturbed run. Exit status 1 if
one is not, or if anything failed.

With --overhead it measures the speed of a training program with and without `gpucr run` instead.
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

import peer
import steps
from peer import Program, environment, run, size_of

HERE = pathlib.Path(__file__).resolve().parent
TORCH = [sys.executable, str(HERE / "programs" / "torch_programs.py")]
STEPS = 100_000


def run_measured(command):
    """The output, and the peak of the process's resident memory in MiB."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0), err.seek(0)
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, command))}: {err.read()[-800:]}")
        return out.read(), usage.ru_maxrss / 1024


def gpucr(args, program_command, folder, flags, under=True):
    command = [args.gpucr, "run", "--"] + program_command if under else program_command
    program = Program(command, folder / "log")
    program.wait_for_step()
    image = folder / "image"
    start = time.monotonic()
    out, peak = run_measured([args.gpucr, "dump", "--pid", str(program.pid), "-o", str(image),
                              "--json", *flags])
    total = time.monotonic() - start
    report = json.loads(out)
    program.process.wait()
    size = program.log.stat().st_size
    start = time.monotonic()
    run([args.gpucr, "restore", "--detach", str(image)])
    program.wait_for_step_after(size)
    to_step = time.monotonic() - start
    subprocess.run(["kill", "-9", str(program.pid)])
    phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
    print(f"    {phases}; gpucr's peak memory {peak:.0f} MiB", flush=True)
    return {"stopped": report["stopped_ms"] / 1000, "dump": total, "to step": to_step,
            "image": size_of(image), "steps": steps.of_log(program.log)}


def compare(args):
    driver = peer.Driver()
    programs = {f"inference {gib} GiB": TORCH + ["infer", "--gib", str(gib)] for gib in args.gib}
    if not args.no_training:
        programs["training"] = TORCH + ["train", "--delay", "0.002"]
    ways = {
        "driver + CRIU": lambda c, f: peer.measure(args, driver, c, f),
        "gpucr": lambda c, f: gpucr(args, c, f, []),
        "gpucr, raw image": lambda c, f: gpucr(args, c, f, ["--compress", "none"]),
        "gpucr, stop": lambda c, f: gpucr(args, c, f, ["--protocol", "stop"]),
        "gpucr, stop, raw": lambda c, f: gpucr(args, c, f, ["--protocol", "stop",
                                                            "--compress", "none"]),
    }
    failed = 0
    print(f"{'program':<18} {'way':<18} {'stopped':>9} {'dump':>9} {'to step':>9} {'image':>10}")
    for name, command in programs.items():
        results = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, measure in ways.items():
                with peer.folder() as folder:
                    try:
                        results[way].append(measure([*command, "--steps", str(STEPS)], folder))
                    except Exception as error:
                        failed += 1
                        print(f"{name:<18} {way:<18} FAILED: {error}", flush=True)
        with peer.folder() as folder:
            expected = steps.Expected(command, folder / "plain")
            same = {way: expected.check([row.pop("steps") for row in rows]) for way, rows in results.items()}
        for way, rows in results.items():
            failed += same[way].count(False)
            if rows:
                median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                print(f"{name:<18} {way:<18} {median['stopped']:>7.2f} s {median['dump']:>7.2f} s "
                      f"{median['to step']:>7.2f} s {median['image'] / 2**20:>6.0f} MiB  n={len(rows)}, "
                      f"{'identical' if all(same[way]) else 'DIFFERENT'}", flush=True)
    return 1 if failed else 0


def overhead(args):
    programs = {
        "large steps": TORCH + ["train", "--steps", "200", "--width", "2048", "--batch", "8192"],
        "small steps": TORCH + ["train", "--steps", "2000"],
    }
    # On cores of their own: that a thread moves from core to core is most of the noise.
    pin = ["taskset", "-c", args.pin] if args.pin else []
    for name, command in programs.items():
        times = {"plain": [], "gpucr run": []}
        for turn in range(args.rounds):
            ways = [("plain", []), ("gpucr run", [args.gpucr, "run", "--"])]
            for way, prefix in ways if turn % 2 == 0 else reversed(ways):
                out = run(pin + prefix + command)
                line = next(line for line in out.splitlines() if line.startswith("median ms"))
                times[way].append(float(line.split()[2]))
        plain, under = (statistics.median(times[way]) for way in times)
        pairs = sorted((b / a - 1) * 100 for a, b in zip(*times.values()))
        quarter = len(pairs) // 4
        print(f"training, {name}: plain {plain:.4f} ms, under gpucr run {under:.4f} ms, "
              f"{(under / plain - 1) * 100:+.2f} % (medians of {args.rounds} runs, alternating); "
              f"of the pairs {statistics.median(pairs):+.2f} %, middle half {pairs[quarter]:+.2f} to "
              f"{pairs[-1 - quarter]:+.2f} %")
        for way, row in times.items():
            print(f"  {way}: {' '.join(f'{t:.4f}' for t in row)}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    peer.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 24])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--pin", help="with --overhead: cores for the program, as taskset has them")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    return overhead(args) if args.overhead else compare(args)


if __name__ == "__main__":
    sys.exit(main())
