#!/usr/bin/env python3
"""Signals at random moments of dump, restore, warm, export and gc: nothing may be lost.

Programs, on the software driver, go through all of it, one after the other. After each signal either the program runs
on, or an image of it is complete and is restored next; when it comes to its end, everything that it printed must be
what an undisturbed program prints. Run as root, after `cargo build --workspace`:

    tests/attacks/kills.py [--count 300] [--seed 1] [--target target/debug]
"""

import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL]
# A line every ten steps, half a minute altogether.
WORKLOAD = ["sgd", "--steps", "500", "--step-delay-ms"]
# How long anything may take to settle, on however busy a machine.
PATIENCE = 60


class Lost(Exception):
    """Something that must not be lost is."""


class Run:
    def __init__(self, args):
        self.random = random.Random(args.seed)
        self.target = pathlib.Path(args.target).resolve()
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-kills-"))
        self.log = self.dir / "log"
        self.outcomes = collections.Counter()
        self.programs = 0
        plain = [self.target / "workload", *WORKLOAD, "0"]
        plain = subprocess.run(self.gpucr("run", "--device", "soft", "--", *plain), capture_output=True, text=True, check=True)
        self.expected = [line for line in plain.stdout.splitlines() if line.startswith(("step ", "result "))]
        # How long each command takes if nobody disturbs it, seconds.
        self.lengths = {}
        self.images = 0
        self.pid = None
        self.image = None
        self.size = 0

    def gpucr(self, *args):
        return [str(self.target / "gpucr"), *map(str, args)]

    def start(self):
        self.programs += 1
        workload = [str(self.target / "workload"), *WORKLOAD, "40"]
        with open(self.log, "w") as log:
            child = subprocess.Popen(self.gpucr("run", "--device", "soft", "--", *workload), cwd=self.dir,
                                     stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self.pid = child.pid
        self.child = child
        self.wait("the program begins", lambda: len(self.steps()) > 1)

    def steps(self):
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        return [line.strip() for line in lines if line.startswith(("step ", "result ")) and line.endswith("\n")]

    def is_done(self):
        return any(line.startswith("result ") for line in self.steps())

    def wait(self, what, is_so):
        end = time.monotonic() + PATIENCE
        while not is_so():
            if time.monotonic() > end:
                raise Lost(f"not in {PATIENCE} s: {what}")
            time.sleep(0.01)

    def exists(self):
        self.child.poll()
        try:
            state = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rsplit(") ", 1)[1][0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"

    def disturbed(self, what, *args):
        """Runs a command and sends it a signal at some moment. Gives its exit code, if it was not killed."""
        limit = self.lengths.get(what)
        begin = time.monotonic()
        child = subprocess.Popen(self.gpucr(*args), cwd=self.dir, stdin=subprocess.DEVNULL,
                                 stdout=open(self.dir / "out", "w"), stderr=open(self.dir / "err", "w"))
        sent = None
        if limit is not None:
            sent = self.random.choice(SIGNALS)
            try:
                child.wait(self.random.uniform(0, limit * 1.1))
            except subprocess.TimeoutExpired:
                child.send_signal(sent)
        try:
            code = child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
            raise Lost(f"{what} does not end after {sent}") from None
        said = (self.dir / "err").read_text(errors="replace")
        # It may have had no time to say how it takes a signal; then the kernel has ended it, and it has said nothing.
        was_early = sent is not None and code == -sent and (sent == signal.SIGKILL or not said)
        if "panicked" in said or code == 101 or (code < 0 and not was_early):
            raise Lost(f"{what} ended with {code} after {sent}: {said}")
        if limit is None:
            if code != 0:
                raise Lost(f"{what}, undisturbed, ended with {code}: {said}")
            self.lengths[what] = time.monotonic() - begin
        self.outcomes[what, sent.name if sent else "none", "done" if code == 0 else "ended"] += 1
        return code

    def is_whole(self, image):
        done = subprocess.run(self.gpucr("verify", image), cwd=self.dir, capture_output=True, text=True)
        return done.returncode == 0

    def goes_on(self):
        count = len(self.steps())
        self.wait("the program goes on", lambda: len(self.steps()) > count or self.is_done())

    def dump(self, leave_running):
        self.images += 1
        image = f"image-{self.images}"
        args = ["dump", "--pid", self.pid, "-o", image] + (["--leave-running"] if leave_running else [])
        what = "dump --leave-running" if leave_running else "dump"
        code = self.disturbed(what, *args)
        if leave_running:
            self.goes_on()
            if code == 0 and not self.is_whole(image):
                raise Lost(f"{what}: the image is not whole")
            shutil.rmtree(self.dir / image, ignore_errors=True)
            return
        # It ends, or it runs on: CRIU may be at work for some time after the death of gpucr.
        count = len(self.steps())
        self.wait("the program ends or goes on", lambda: not self.exists() or len(self.steps()) > count + 2)
        if self.is_done():
            shutil.rmtree(self.dir / image, ignore_errors=True)
            return
        if self.exists():
            if code == 0:
                raise Lost(f"{what}: the program was to end")
            shutil.rmtree(self.dir / image, ignore_errors=True)
            return
        if not self.is_whole(image):
            raise Lost(f"{what}: the program is gone, and there is no image")
        self.image, self.size = image, self.log.stat().st_size

    def restore(self):
        with open(self.log, "r+") as log:
            log.truncate(self.size)
        code = self.disturbed("restore", "restore", self.image)
        if code == 0 and not self.exists() and not self.is_done():
            raise Lost("restore: the program is not there")
        # What was being made is ended, or it runs on.
        count = len(self.steps())
        self.wait("it goes on or is ended", lambda: not self.exists() or len(self.steps()) > count + 2)
        if not self.is_whole(self.image):
            raise Lost("restore: the image is not whole any more")
        if self.exists() or self.is_done():
            shutil.rmtree(self.dir / self.image, ignore_errors=True)
            self.image = None

    def with_image(self, what):
        if what == "warm":
            self.disturbed("warm", "warm", self.image)
            subprocess.run(self.gpucr("warm", "--drop", self.image), cwd=self.dir, capture_output=True)
        elif what == "export":
            tar = self.dir / "image.tar"
            code = self.disturbed("export", "export", self.image, tar)
            if code == 0 or tar.exists():
                copy = self.dir / "copy"
                done = subprocess.run(self.gpucr("import", tar, "-o", copy), capture_output=True, text=True)
                if done.returncode != 0:
                    raise Lost(f"export: a tar that is not whole: {done.stderr}")
                shutil.rmtree(copy)
            tar.unlink(missing_ok=True)
        else:
            store = self.dir / "store"
            for name in ["kept", "other"]:
                subprocess.run(self.gpucr("import", self.tar(), "--store", store, "--name", name), cwd=self.dir,
                               capture_output=True, check=True)
            subprocess.run(self.gpucr("rm", store / "images" / "other"), cwd=self.dir, capture_output=True, check=True)
            self.disturbed("gc", "gc", store)
            if not self.is_whole(store / "images" / "kept"):
                raise Lost("gc: an image of the store is not whole any more")
            shutil.rmtree(store)
        if not self.is_whole(self.image):
            raise Lost(f"{what}: the image is not whole any more")

    def tar(self):
        tar = self.dir / f"{self.image}.tar"
        if not tar.exists():
            done = subprocess.run(self.gpucr("export", self.image, tar), cwd=self.dir, capture_output=True, text=True)
            if done.returncode != 0:
                raise Lost(f"export: {done.stderr}")
        return tar

    def step(self):
        if self.image is None and self.is_done():
            self.finish()
            self.start()
        elif self.image is None:
            self.dump(self.random.random() < 0.4)
        elif self.random.random() < 0.25:
            self.restore()
        else:
            self.with_image(self.random.choice(["warm", "export", "gc"]))

    def finish(self):
        """Lets the program come to its end, and compares."""
        if self.image is not None:
            self.lengths.pop("restore", None)
            self.restore()
        self.wait("the program comes to its end", self.is_done)
        printed = self.steps()
        if printed != self.expected:
            wrong = next((pair for pair in zip(printed, self.expected) if pair[0] != pair[1]), "another length")
            raise Lost(f"what it printed is not what an undisturbed one prints: {wrong}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", default="target/debug")
    args = parser.parse_args()
    run = Run(args)
    run.start()
    try:
        while sum(count for (_, sent, _), count in run.outcomes.items() if sent != "none") < args.count:
            run.step()
        run.finish()
    except Lost as lost:
        print(f"LOST ({run.dir}): {lost}")
        raise SystemExit(1) from None
    finally:
        if run.exists():
            os.kill(run.pid, signal.SIGKILL)
    table = collections.defaultdict(collections.Counter)
    for (what, sent, how), count in run.outcomes.items():
        if sent != "none":
            table[what][sent] += count
            table[what][how] += count
    print("| command | INT | TERM | HUP | KILL | had ended before | ended by it | lost |\n|---|---|---|---|---|---|---|---|")
    for what, row in sorted(table.items()):
        numbers = [row[sent.name] for sent in SIGNALS] + [row["done"], row["ended"], 0]
        print(f"| `{what}` | " + " | ".join(map(str, numbers)) + " |")
    print(json.dumps({"signals": args.count, "seed": args.seed, "programs": run.programs, "lost": 0}))
    shutil.rmtree(run.dir)


if __name__ == "__main__":
    main()
