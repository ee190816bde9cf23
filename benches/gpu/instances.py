#!/usr/bin/env python3
"""One image of a PyTorch program, restored several times on one GPU, each in its own pid namespace.

The program is dumped in the middle and ended. Then `--count` instances are restored with `--new-pids`,
first one after the other while those before run on, then all at once. Each must print what the
uninterrupted program prints. The table has the time from the start of `gpucr restore` to the instance's
first step, and by how much the memory in use on the device has grown from before it to `--settle` seconds
later. With `--share` the instances share the memory that none of them writes, with `--warm` the image is kept
in memory; with `--peer` the driver's checkpoint and CRIU restore the program once, alone. Exit status 1 if any instance
differs, fails, or has to be restored again.
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

import peer
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


def in_use():
    """MiB of the device's memory."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def shared(events):
    """What `gpucr restore` tells of shared memory, and whether it had to start again."""
    if not events.exists():
        return "", False
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    again = any(line["event"] == "again" for line in lines)
    reports = [line for line in lines if line["event"] == "restored"]
    said = reports[0].get("shared") if reports else None
    phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in reports[0]["phases"]) if reports else ""
    text = f"shared {said['bytes'] / 2**30:.1f} GiB {'joined' if said['joined'] else 'first'}" if said else ""
    return f"{text}{' FELL BACK' if again else ''}  {phases}", again


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=int, default=4, help="device memory of an instance")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--share", action="store_true")
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--settle", type=float, default=1)
    parser.add_argument("--out", default="instances-logs")
    peer.add_arguments(parser, optional=True)
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
    print(f"cold start to step 0: {(plain.first - plain.began) * 1000:.0f} ms", flush=True)

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

    if args.warm:
        subprocess.run([args.gpucr, "warm", image], check=True)
    failed = 0
    restore = [args.gpucr, "restore", "--new-pids"] + ["--share"] * args.share
    for way in ["one by one", "all at once"]:
        instances, grown = [], []
        for number in range(args.count):
            events = out / f"events {way} {number}"
            before = in_use()
            instances.append(Instance([*restore, "--events", str(events), image], err))
            if way == "one by one":
                instances[-1].wait_for(1)
                time.sleep(args.settle)
                grown.append(f"{in_use() - before:>6} MiB")
        for number, instance in enumerate(instances):
            code = instance.end()
            same = program.lines + instance.lines == expected
            said, again = shared(out / f"events {way} {number}")
            failed += not same or code != 0 or again
            first = (instance.first or instance.began) - instance.began
            print(f"{way:<12} {number}  to step {first * 1000:>6.0f} ms  {''.join(grown[number:number + 1])}  "
                  f"exit {code}  {'identical' if same else 'DIFFERENT'}  {said}", flush=True)
    if args.warm:
        subprocess.run([args.gpucr, "warm", "--drop", image], check=True)
    shutil.rmtree(images, ignore_errors=True)
    peer.show(args, command)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
