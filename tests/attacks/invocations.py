#!/usr/bin/env python3
"""Hostile invocations: what gpucr does with agents, images, names, numbers, signals and files that mean harm.

Each is one command, and has to end in time with success or with an error that says what happened; nothing of a
stranger's may be run, and nothing written outside of the directory that this works in and gpucr's own. Prints a table
of outcomes. Run as root, after `cargo build --workspace`:

    tests/attacks/invocations.py [--target target/debug]
"""

import argparse
import collections
import ctypes
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

# A command that takes longer hangs, on however busy a machine.
LIMIT = 30
NOBODY = 65534
# Where nothing may appear.
OUTSIDE = ["/etc", "/usr", "/opt", "/root", "/var/spool", "/home", "/srv"]
EVIL = "w\x1b]0;owned\x07\x9b2J\u202e"


def agent(mode, ready):
    """Listens as the agent of this process, as another user, and means harm. Never comes back."""
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    namespace = os.stat("/proc/self/ns/pid").st_ino
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0gpucr-agent-{namespace}-{os.getpid()}")
    listener.listen(0 if mode == "full" else 16)
    if mode == "full":
        waiting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        waiting.connect(listener.getsockname())
    os.write(ready, b"!")
    while mode in ("deaf", "full"):
        time.sleep(3600)

    def serve(client):
        try:
            if mode == "silent":
                time.sleep(3600)
            elif mode == "closes":
                client.close()
            elif mode == "drips":
                while True:
                    client.send(b"\0")
                    time.sleep(0.2)
            elif mode == "noise":
                while True:
                    client.send(random.randbytes(4096))
            elif mode == "long":
                client.send(struct.pack("<I", 0xFFFF_FFF0))
                time.sleep(3600)
            elif mode == "endless":
                client.send(struct.pack("<I", 64 << 20))
                while True:
                    client.send(bytes(1 << 16))
            elif mode == "malformed":
                while client.recv(4096):
                    client.send(struct.pack("<I", 5) + b"\0\xff\xff\xff\xff")
            elif mode == "strange":
                # An answer to another question.
                while client.recv(4096):
                    client.send(struct.pack("<I", 1) + b"\x03")
        except OSError:
            pass

    while True:
        client, _ = listener.accept()
        threading.Thread(target=serve, args=(client,), daemon=True).start()


def library(path, telltale):
    """A library that tells when its code is run."""
    source = path.with_suffix(".c")
    source.write_text("#include <fcntl.h>\n__attribute__((constructor)) static void ran(void) "
                      f'{{ open("{telltale}", O_CREAT | O_WRONLY, 0666); }}\nint cuInit(int f) {{ return 0; }}\n')
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(source)], check=True)


def mapping(path, ready):
    """A program of another user that maps a file and waits."""
    import mmap
    with open(path, "rb") as file:
        held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ | mmap.PROT_EXEC, flags=mmap.MAP_PRIVATE)
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    os.write(ready, b"!")
    while held:
        time.sleep(3600)


class Attacks:
    def __init__(self, target):
        self.gpucr = str(pathlib.Path(target).resolve() / "gpucr")
        self.workload = str(pathlib.Path(target).resolve() / "workload")
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-attacks-"))
        os.chmod(self.dir, 0o755)
        self.telltale = self.dir / "code-was-run"
        self.outcomes = collections.defaultdict(collections.Counter)
        self.children = []
        self.faults = []

    def child(self, work, *args):
        """Forks a process that does something for ever, and waits until it is ready."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)
                work(*args, writing)
            finally:
                os._exit(1)
        os.close(writing)
        self.children.append(pid)
        assert os.read(reading, 1), "the attacker does not start"
        return pid

    def outside(self):
        found = set()
        for top in OUTSIDE:
            for folder, _, names in os.walk(top):
                if "/.cargo" not in folder and "/.cache" not in folder:
                    found.update(os.path.join(folder, name) for name in names)
        return found

    def run(self, category, *args, sent=None, after=0.3, stdin=subprocess.DEVNULL):
        command = [self.gpucr, *map(str, args)]
        child = subprocess.Popen(command, cwd=self.dir, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 start_new_session=True)
        if sent is not None:
            time.sleep(after)
            child.send_signal(sent)
        try:
            out, err = child.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return self.count(category, "hang", command, "")
        said = err.decode(errors="replace")
        raw = any(byte in err + (out if "export" not in args else b"") for byte in (b"\x1b]", b"\x07", b"\xc2\x9b"))
        if self.telltale.exists():
            self.telltale.unlink()
            return self.count(category, "code run", command, said)
        if child.returncode < 0 or child.returncode == 101 or "panicked" in said:
            return self.count(category, "crash", command, said)
        if raw:
            return self.count(category, "raw", command, said)
        if child.returncode == 0:
            return self.count(category, "success", command, said)
        # What `verify` finds is its output, however much it is.
        found = args[0] == "verify" and out
        clear = found or len(said.strip()) > 10 and len(said.splitlines()) <= 20
        return self.count(category, "clear error" if clear else "unclear", command, said)

    def count(self, category, outcome, command, said):
        self.outcomes[category][outcome] += 1
        if outcome not in ("success", "clear error"):
            self.faults.append((category, outcome, command[1:], said[:600]))

    def program(self):
        log = open(self.dir / "program.log", "w")
        command = [self.gpucr, "run", "--device", "soft", "--", self.workload, "sgd", "--steps", "5000",
                   "--step-delay-ms", "200"]
        child = subprocess.Popen(command, cwd=self.dir, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)
        end = time.monotonic() + 60
        while "ready" not in (self.dir / "program.log").read_text():
            assert time.monotonic() < end, "the program does not start"
            time.sleep(0.05)
        return child

    def numbers(self):
        for pid in ["0", "-1", "1", "4194305", "2147483647", "2147483648", "4294967296", "1e3", "abc", "", " 4194305",
                    "0x10", str(os.getpid())]:
            self.run("numbers", "dump", "--pid", pid, "-o", "none")
            self.run("numbers", "trace", "--for", "100ms", "--pid", pid)
        for option, values in {
            "--memory-limit": ["-1", "0", "16E", "99999999999999999999", "NaN"],
        }.items():
            for value in values:
                self.run("numbers", "warm", "image", option, value)
        for value in ["-1", "nan", "inf", "1e400", "99999999999999999999s", ""]:
            self.run("numbers", "dump", "--timeout", value, "--pid", "1", "-o", "none")

    def names(self):
        os.mkfifo(self.dir / "fifo")
        (self.dir / "loop").symlink_to("loop")
        (self.dir / "empty").write_text("")
        (self.dir / "folder").mkdir()
        (self.dir / "noise").write_bytes(random.Random(1).randbytes(1 << 16))
        names = ["none", "fifo", "/dev/zero", "/dev/full", "loop", "empty", "folder", "noise", "empty/below", EVIL,
                 "x" * 5000, "/proc/self/mem", "../../../../etc/passwd", "line\nfeed"]
        for name in names:
            for command in (["inspect"], ["verify"], ["restore"], ["warm"], ["ls"], ["gc"], ["diff", "image"],
                            ["export", name, "out.tar"], ["import", "-o", "made"], ["report", "-o", "page.html"]):
                command = command if name in command else [*command, name]
                self.run("names", *command)
                shutil.rmtree(self.dir / "made", ignore_errors=True)
                (self.dir / "out.tar").unlink(missing_ok=True)

    def images(self):
        chance = random.Random(2)
        files = [path for path in sorted((self.dir / "image").rglob("*")) if path.is_file()]
        for number in range(24):
            copy = self.dir / "damaged"
            shutil.copytree(self.dir / "image", copy)
            path = copy / files[number % len(files)].relative_to(self.dir / "image")
            content = bytearray(path.read_bytes())
            how = number // len(files) % 4
            if how == 0 and content:
                content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            elif how == 1:
                del content[len(content) // 2:]
            elif how == 2:
                content += bytes(100)
            else:
                content = bytearray(chance.randbytes(len(content)))
            path.write_bytes(content)
            for command in (["inspect", "damaged"], ["verify", "damaged"], ["restore", "damaged"], ["warm", "damaged"],
                            ["export", "damaged", "out.tar"]):
                # What is whole in spite of that is restored; the program must not stay.
                self.run("images", *command)
                (self.dir / "out.tar").unlink(missing_ok=True)
                subprocess.run(["pkill", "-9", "-f", f"{self.workload} sgd"], check=False)
            self.run("images", "warm", "--drop", "damaged")
            shutil.rmtree(copy)

    def agents(self):
        for mode in ["deaf", "full", "silent", "closes", "drips", "noise", "long", "endless", "malformed", "strange"]:
            pid = self.child(agent, mode)
            self.run("agents", "dump", "--timeout", "2s", "--pid", pid, "-o", "none")
            self.run("agents", "trace", "--for", "100ms", "--pid", pid, sent=signal.SIGINT, after=2)
            self.run("agents", "ps")
            self.run("agents", "ps", "--json")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def libraries(self):
        for name in ["libcuda.so.1", "libcuda.so", "libcuda.so.580.1", "libsoftcuda.so"]:
            folder = self.dir / "libraries"
            folder.mkdir(exist_ok=True)
            path = folder / name
            library(path, self.telltale)
            pid = self.child(mapping, path)
            self.run("driver libraries", "dump", "--pid", pid, "-o", "none")
            self.run("driver libraries", "trace", "--for", "100ms", "--pid", pid)
            self.run("driver libraries", "ps")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def signals(self, pid):
        for sent in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            for after in (0.05, 0.2, 0.5):
                self.run("signals", "dump", "--leave-running", "--pid", pid, "-o", "signalled", sent=sent, after=after)
                shutil.rmtree(self.dir / "signalled", ignore_errors=True)
            self.run("signals", "trace", "--for", "1h", "--pid", pid, sent=sent, after=1)
            self.run("signals", "import", "fifo", "-o", "made", sent=sent)
            self.run("signals", "import", "-", "-o", "made", sent=sent, stdin=os.open(self.dir / "fifo", os.O_RDWR))

    def files(self, pid):
        (self.dir / "link").symlink_to(self.dir / "victim")
        (self.dir / "victim").write_text("untouched")
        os.chmod(self.dir / "victim", 0o600)
        for path in ["link", "/dev/full", "fifo", "folder", "none/below", "x" * 300]:
            for option in ("--events", "--timeline"):
                self.run("files", "dump", "--leave-running", "--pid", pid, "-o", "written", option, path)
                shutil.rmtree(self.dir / "written", ignore_errors=True)
            self.run("files", "report", "noise", "-o", path)

    def all(self):
        program = self.program()
        done = subprocess.run([self.gpucr, "dump", "--leave-running", "--pid", str(program.pid), "-o", "image"],
                              cwd=self.dir, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        before = self.outside()
        self.numbers()
        self.names()
        self.agents()
        self.libraries()
        self.signals(program.pid)
        self.files(program.pid)
        alive = program.poll() is None
        if alive:
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
        self.images()
        made = sorted(self.outside() - before)
        return made, alive


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="target/debug")
    attacks = Attacks(parser.parse_args().target)
    try:
        made, alive = attacks.all()
    finally:
        for pid in attacks.children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    columns = ["success", "clear error", "hang", "crash", "code run", "unclear", "raw"]
    print("| what | invocations | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 2))
    total = collections.Counter()
    for category, counts in attacks.outcomes.items():
        total.update(counts)
        print(f"| {category} | {sum(counts.values())} | " + " | ".join(str(counts[column]) for column in columns) + " |")
    print(f"| all | {sum(total.values())} | " + " | ".join(str(total[column]) for column in columns) + " |")
    print(json.dumps({"files outside": made, "the program that was dumped runs on": alive}))
    for category, outcome, command, said in attacks.faults:
        print(f"{category}: {outcome}: {command}\n{said}", file=sys.stderr)
    shutil.rmtree(attacks.dir)
    raise SystemExit(bool(attacks.faults or made or not alive))


if __name__ == "__main__":
    main()
