#!/usr/bin/env python3
"""gpucr against NVIDIA's driver checkpoint with CRIU, on the same programs, in one run.

For each program the ways take turns, `--rounds` times. Measured for each: for how long the program
stood still, the whole dump, the restore from the command's start to the program's next step, and
the size of the image. Images are written to memory (/dev/shm). The peer is the plain sequence:
cuCheckpointProcessLock, cuCheckpointProcessCheckpoint, criu dump; and back: criu restore,
cuCheckpointProcessRestore, cuCheckpointProcessUnlock. Prints medians.

With --overhead it measures the speed of a training program with and without `gpucr run` instead.
"""

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TORCH = [sys.executable, str(HERE / "programs" / "torch_programs.py")]
STEPS = 100_000


def environment():
    return {**os.environ, "PYTHONUNBUFFERED": "1"}


class Program:
    """A program under test, with its log."""

    started = []

    def __init__(self, command, log):
        self.log = pathlib.Path(log)
        out = open(log, "w")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                        start_new_session=True, env=environment())
        self.pid = self.process.pid
        Program.started.append(self)

    @classmethod
    def end_all(cls):
        """Ends the programs, restored or not, which keep the pid and the session."""
        for program in cls.started:
            subprocess.run(["pkill", "-9", "-s", str(program.pid)])
            program.process.wait()
        cls.started = []

    def wait_for_step(self, step=5, limit=240):
        deadline = time.monotonic() + limit
        while f"step {step} " not in self.log.read_text():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step}: {self.log.read_text()[-500:]}")
            time.sleep(0.05)

    def wait_for_growth(self, size, limit=240):
        deadline = time.monotonic() + limit
        while self.log.stat().st_size == size:
            if time.monotonic() > deadline:
                raise RuntimeError("the restored program does not go on")
            time.sleep(0.001)


def size_of(path):
    return sum(f.stat().st_size for f in pathlib.Path(path).rglob("*") if f.is_file())


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout[-500:]}{done.stderr[-800:]}")
    return done.stdout


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


class Driver:
    """NVIDIA's checkpoint functions."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.check("cuInit", 0)

    def check(self, name, *args):
        code = getattr(self.cuda, name)(*args)
        if code != 0:
            raise RuntimeError(f"{name}: {code}")

    def call(self, name, pid):
        self.check(f"cuCheckpointProcess{name}", ctypes.c_int(pid), (ctypes.c_char * 64)())


def peer(args, driver, program_command, folder):
    """The driver's checkpoint and CRIU."""
    program = Program(program_command, folder / "log")
    program.wait_for_step()
    image = folder / "image"
    image.mkdir()
    criu = [args.criu, "--shell-job", "-D", str(image)]
    if args.criu_libs:
        criu = ["env", f"LD_LIBRARY_PATH={args.criu_libs}", "CRIU_LIBS_DIR=/proc/self/task"] + criu
    start = time.monotonic()
    driver.call("Lock", program.pid)
    driver.call("Checkpoint", program.pid)
    run(criu[:-3] + ["dump", "-t", str(program.pid)] + criu[-3:])
    stopped = time.monotonic() - start
    program.process.wait()
    size = program.log.stat().st_size
    start = time.monotonic()
    run(criu[:-3] + ["restore", "-d"] + criu[-3:])
    driver.call("Restore", program.pid)
    driver.call("Unlock", program.pid)
    program.wait_for_growth(size)
    to_step = time.monotonic() - start
    subprocess.run(["kill", "-9", str(program.pid)])
    return {"stopped": stopped, "dump": stopped, "to step": to_step, "image": size_of(image)}


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
    program.wait_for_growth(size)
    to_step = time.monotonic() - start
    subprocess.run(["kill", "-9", str(program.pid)])
    phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
    print(f"    {phases}; gpucr's peak memory {peak:.0f} MiB", flush=True)
    return {"stopped": report["stopped_ms"] / 1000, "dump": total, "to step": to_step,
            "image": size_of(image)}


def compare(args):
    driver = Driver()
    programs = {f"inference {gib} GiB": TORCH + ["infer", "--gib", str(gib), "--steps", str(STEPS)]
                for gib in args.gib}
    if not args.no_training:
        programs["training"] = TORCH + ["train", "--steps", str(STEPS), "--delay", "0.002"]
    ways = {
        "driver + CRIU": lambda c, f: peer(args, driver, c, f),
        "gpucr": lambda c, f: gpucr(args, c, f, []),
        "gpucr, raw image": lambda c, f: gpucr(args, c, f, ["--compress", "none"]),
        "gpucr, stop": lambda c, f: gpucr(args, c, f, ["--protocol", "stop"]),
        "gpucr, stop, raw": lambda c, f: gpucr(args, c, f, ["--protocol", "stop",
                                                            "--compress", "none"]),
    }
    print(f"{'program':<18} {'way':<18} {'stopped':>9} {'dump':>9} {'to step':>9} {'image':>10}")
    for name, command in programs.items():
        results = {way: [] for way in ways}
        for _ in range(args.rounds):
            for way, measure in ways.items():
                folder = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-compare-", dir="/dev/shm"))
                try:
                    results[way].append(measure(command, folder))
                except Exception as error:
                    print(f"{name:<18} {way:<18} FAILED: {error}", flush=True)
                finally:
                    Program.end_all()
                    shutil.rmtree(folder, ignore_errors=True)
        for way, rows in results.items():
            if rows:
                median = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                print(f"{name:<18} {way:<18} {median['stopped']:>7.2f} s {median['dump']:>7.2f} s "
                      f"{median['to step']:>7.2f} s {median['image'] / 2**20:>6.0f} MiB  n={len(rows)}",
                      flush=True)


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
    parser.add_argument("--criu", default=os.environ.get("GPUCR_CRIU", "criu"))
    parser.add_argument("--criu-libs", default=os.environ.get("GPUCR_CRIU_LIBRARY_PATH"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gib", type=float, nargs="*", default=[1, 24])
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--pin", help="with --overhead: cores for the program, as taskset has them")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    overhead(args) if args.overhead else compare(args)


if __name__ == "__main__":
    sys.exit(main())
