"""The steps of a program of torch_programs.py: what it printed of them, and when they ended (`--times`)."""

import subprocess
import struct


def of_log(path, start=0):
    """The lines of steps that are whole in a log, from the byte `start` on: each has the number of the step and
    its value to the last bit."""
    with open(path, "rb") as log:
        log.seek(start)
        whole = log.read().rpartition(b"\n")[0]
    return [line.decode() for line in whole.splitlines() if line.startswith(b"step ")]


class Expected:
    """What an undisturbed run of a program prints. It is run once, when all is known that has to be compared."""

    def __init__(self, command, log):
        """`command` is without its `--steps`."""
        self.command, self.log, self.lines = command, log, []

    def check(self, runs):
        """Which of these runs, each a list of lines from step 0 on, are the same as far as they go."""
        count = max(map(len, runs), default=0)
        if len(self.lines) < count:
            with open(self.log, "w") as out:
                subprocess.run([*self.command, "--steps", str(count)], stdin=subprocess.DEVNULL,
                               stdout=out, stderr=out, check=True)
            self.lines = of_log(self.log)
        return [bool(lines) and lines == self.lines[: len(lines)] for lines in runs]


def read_times(path):
    """Seconds of the monotonic clock; none if there is no file yet."""
    data = path.read_bytes() if path.exists() else b""
    return [t for (t,) in struct.iter_unpack("d", data[: len(data) // 8 * 8])]


def rate(times, *spans):
    """Steps in a second of what lies between two moments, given the times at which steps ended; of a step that a
    moment divides, the part."""
    steps = sum(max(0, min(b, end) - max(a, start)) / (b - a)
                for start, end in spans for a, b in zip(times, times[1:]))
    return steps / sum(end - start for start, end in spans)
