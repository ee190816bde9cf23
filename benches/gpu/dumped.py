"""A PyTorch program that was dumped in the middle and ended, and restores of it, for the other scripts here."""

import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

import verify


class Dumped:
    """Its image is raw and lies in /dev/shm."""

    def __init__(self, gpucr, out, program):
        """Runs `program`, the arguments of torch_programs.py, once to its end, and a second time up to
        the dump."""
        self.gpucr = str(pathlib.Path(shutil.which(gpucr) or gpucr).resolve())
        out = pathlib.Path(out).resolve()
        out.mkdir(parents=True, exist_ok=True)
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-", dir="/dev/shm"))
        self.image = self.folder / "image"
        self.log = out / "log"
        self.command = command = [*verify.TORCH, *program]
        plain = out / "plain.log"
        began = time.monotonic()
        process = verify.start(command, plain, {}, None)
        verify.wait_for_step(plain, 0, process)
        print(f"cold start to step 0: {(time.monotonic() - began) * 1000:.0f} ms", flush=True)
        if process.wait(timeout=300) != 0:
            raise RuntimeError(f"the plain run failed, see {plain}")
        self.expected = verify.meaningful(plain)
        process = verify.start(command, self.log, {}, self.gpucr)
        verify.wait_for_step(self.log, 40, process)
        subprocess.run([self.gpucr, "dump", "--pid", str(process.pid), "-o", str(self.image),
                        "--compress", "none"], check=True)
        process.wait()
        self.size = self.log.stat().st_size

    def restore(self, extra):
        """Restores it in the background. Gives the report, and the milliseconds from the start of the
        command to the first step."""
        os.truncate(self.log, self.size)
        report = self.log.with_suffix(".json")
        began = time.monotonic()
        with open(report, "w") as out:
            command = subprocess.Popen([self.gpucr, "restore", "--detach", "--json", *extra, str(self.image)],
                                       stdin=subprocess.DEVNULL, stdout=out)
            while self.log.stat().st_size == self.size:
                if command.poll() not in (None, 0) or time.monotonic() > began + 120:
                    raise RuntimeError(f"restore: exit {command.returncode}")
                time.sleep(0.001)
            first = time.monotonic() - began
            size = self.log.stat().st_size
            while self.log.stat().st_size == size and time.monotonic() < began + 120:
                time.sleep(0.001)
            second = time.monotonic() - began
            command.wait()
        report = json.loads(report.read_text())
        report["next_step_ms"] = (second - first) * 1000
        return report, first * 1000

    def end(self, report, kill):
        """Lets what was restored come to its end, or kills it. Gives whether its output is right."""
        if kill:
            os.kill(report["pid"], 9)
        while pathlib.Path(f"/proc/{report['pid']}").exists():
            time.sleep(0.01)
        return verify.meaningful(self.log) == self.expected

    def remove(self):
        shutil.rmtree(self.folder, ignore_errors=True)
