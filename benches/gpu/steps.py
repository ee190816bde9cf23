"""The times at which a program's steps ended, as `torch_programs.py --times` writes them."""

import struct


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
