"""The real alternative: NVIDIA's driver checkpoint with CRIU, for the other scripts here.

The plain sequence: cuCheckpointProcessLock, cuCheckpointProcessCheckpoint, criu dump; and back: criu restore,
cuCheckpointProcessRestore, cuCheckpointProcessUnlock.
"""

import contextlib
import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import steps


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

    def wait_for_step_after(self, size, limit=240):
        """Waits until the program, restored, has done a step: until there is a whole line of one behind the first
        `size` bytes of its log."""
        deadline = time.monotonic() + limit
        while not steps.of_log(self.log, size):
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


def add_arguments(parser, optional=False):
    """With `optional` the peer is measured only with `--peer`."""
    if optional:
        parser.add_argument("--peer", action="store_true", help="measure the driver's checkpoint with CRIU too")
    parser.add_argument("--criu", default=os.environ.get("GPUCR_CRIU", "criu"))
    parser.add_argument("--criu-libs", default=os.environ.get("GPUCR_CRIU_LIBRARY_PATH"))


def measure(args, driver, program_command, folder):
    """The program is dumped at its fifth step into the folder, and restored. Gives seconds and bytes."""
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
    program.wait_for_step_after(size)
    to_step = time.monotonic() - start
    subprocess.run(["kill", "-9", str(program.pid)])
    return {"stopped": stopped, "dump": stopped, "to step": to_step, "image": size_of(image),
            "steps": steps.of_log(program.log)}


@contextlib.contextmanager
def folder():
    """A folder in memory, and an end to all programs."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-peer-", dir="/dev/shm"))
    try:
        yield path
    finally:
        Program.end_all()
        shutil.rmtree(path, ignore_errors=True)


def show(args, program_command, which=""):
    """If that is asked for: prints what the peer takes for a program, once."""
    if not args.peer:
        return
    with folder() as path:
        row = measure(args, Driver(), program_command, path)
    print(f"{which}driver + CRIU: stopped {row['stopped']:.2f} s, restore to step {row['to step']:.2f} s", flush=True)
