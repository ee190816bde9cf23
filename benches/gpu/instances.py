#!/usr/bin/env python3
"""One image of a PyTorch program, restored several times on one GPU, each in its own pid namespace.

The program is dumped in the middle and ended. Then `--count` instances are restored with `--new-pids`,
first one after the other while those before run on, then all at once. Each must print what the
uninterrupted program prints. The table has the time from the start of `gpucr restore` to the instance's
first step. Exit status 1 if any instance differs or fails.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import verify


class Instance:
    """A command, and the lines that it prints."""

    def __init__(self, command, err):
        self.began = time.monotonic()
        self.first = None
        self.lines = []
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                        stderr=err, text=True, start_new_session=True)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            if line.startswith(("step ", "result ")):
                self.first = self.first or time.monotonic()
                self.lines.append(line.rstrip())

    def wait_for(self, count, limit=300):
        deadline = time.monotonic() + limit
        while len(self.lines) < count:
            if self.process.poll() is not None and not self.reader.is_alive():
                raise RuntimeError(f"ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"only {len(self.lines)} lines in {limit} s")
            time.sleep(0.005)

    def end(self):
        code = self.process.wait(timeout=300)
        self.reader.join()
        return code


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=4, help="device memory of an instance")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--out", default="instances-logs")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-instances-", dir="/dev/shm"))
    command = verify.TORCH + ["infer", "--gib", str(args.gib), "--steps", str(args.steps),
                              "--delay", "0.01"]
    err = open(out / "err", "w")
    plain = Instance(command, err)
    if plain.end() != 0:
        raise RuntimeError(f"the plain run failed, see {out / 'err'}")
    expected = plain.lines

    program = Instance([args.gpucr, "run", "--", *command], err)
    program.wait_for(40)
    image = str(images / "image")
    dump = subprocess.run([args.gpucr, "dump", "--pid", str(program.process.pid), "-o", image, "--json",
                           "--compress", "none"], capture_output=True, text=True)
    program.end()
    if dump.returncode != 0:
        raise RuntimeError(f"dump: {dump.stderr}")
    report = json.loads(dump.stdout)
    print(f"dumped: stopped {report['stopped_ms']:.0f} ms, {report['bulk_bytes'] / 2**30:.1f} GiB",
          flush=True)

    failed = 0
    restore = [args.gpucr, "restore", "--new-pids", image]
    for way in ["one by one", "all at once"]:
        instances = []
        for _ in range(args.count):
            instances.append(Instance(restore, err))
            if way == "one by one":
                instances[-1].wait_for(1)
        for number, instance in enumerate(instances):
            code = instance.end()
            same = program.lines + instance.lines == expected
            failed += not (same and code == 0)
            first = (instance.first or instance.began) - instance.began
            print(f"{way:<12} {number}  to step {first * 1000:>6.0f} ms  exit {code}  "
                  f"{'identical' if same else 'DIFFERENT'}", flush=True)
    shutil.rmtree(images, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
