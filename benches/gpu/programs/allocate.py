#!/usr/bin/env python3
"""Allocates and frees device memory, and prints what a call takes, in microseconds: the median over rounds of the mean of a round."""

import ctypes
import statistics
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *args):
    result = getattr(cuda, name)(*args)
    if result != 0:
        sys.exit(f"error: {name} gives {result}")


def once(size, count):
    """What an allocation takes, and a free."""
    places = [ctypes.c_uint64() for _ in range(count)]
    began = time.perf_counter()
    for place in places:
        call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size))
    between = time.perf_counter()
    for place in places:
        call("cuMemFree_v2", place)
    ended = time.perf_counter()
    return (between - began) / count * 1e6, (ended - between) / count * 1e6


def main():
    call("cuInit", 0)
    context = ctypes.c_void_p()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    for name, size, count, rounds in [("1 KiB", 1 << 10, 2000, 30), ("64 MiB", 64 << 20, 50, 30)]:
        # The first round finds nothing that an earlier one has left.
        times = [once(size, count) for _ in range(rounds)]
        first, rest = times[0], times[1:]
        medians = [statistics.median(column) for column in zip(*rest)]
        print(f"allocation\t{name}\t{medians[0]:.3f}\t{medians[1]:.3f}\t{first[0]:.3f}\t{first[1]:.3f}", flush=True)


main()
