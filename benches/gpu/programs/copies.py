#!/usr/bin/env python3
"""Copies device memory to pinned memory of the host in pieces of 2 MiB, on a stream of its own, with 32 copies
queued. What arrives is not touched.

Reads lines "SECONDS GB/S" (0: as fast as it goes) and answers each with "BEGAN ENDED BYTES", in seconds of the
monotonic clock; "ready" before the first.
"""

import sys
import time

import torch

PIECE = 2 << 20
PIECES = 32


def main():
    source = torch.empty((PIECES * 16, PIECE), dtype=torch.uint8, device="cuda").fill_(1)
    staging = torch.empty((PIECES, PIECE), dtype=torch.uint8, pin_memory=True)
    stream = torch.cuda.Stream()
    events = [torch.cuda.Event() for _ in range(PIECES)]
    torch.cuda.synchronize()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, limit = map(float, line.split())
        began, number = time.monotonic(), 0
        with torch.cuda.stream(stream):
            while time.monotonic() - began < seconds:
                slot = number % PIECES
                while number >= PIECES and not events[slot].query():
                    time.sleep(50e-6)
                while limit and number * PIECE > limit * 1e9 * (time.monotonic() - began):
                    time.sleep(20e-6)
                staging[slot].copy_(source[number % len(source)], non_blocking=True)
                events[slot].record()
                number += 1
        stream.synchronize()
        print(began, time.monotonic(), number * PIECE, flush=True)


if __name__ == "__main__":
    main()
