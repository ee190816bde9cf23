#!/usr/bin/env python3
"""Whether a long kernel lives when another process comes to its device, by the driver alone, without gpucr.

A program launches a kernel that takes 13 s on an H200, and one second later another process makes a context and runs a
small kernel; or it has a context before, and copies, or ends. In some rows the driver has checkpointed and restored the program before (cuCheckpointProcess*). The table
has what the program's synchronise gives, when, and what the kernel log says of it. Needs driver 570 or newer.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "programs"))

from long_kernels import LOOP, PROGRAMS, Device, call, cuda  # noqa: E402

BODIES = 1 << 22
SMALL = LOOP % {"turns": 300}

# name: kernel of the program, restored, what the other process does, when that makes its context: while the kernel runs,
# before, or before the program is restored
ROWS = {
    "never restored": ("n_body", False, "kernel", "while"),
    "restored": ("n_body", True, "kernel", "while"),
    "restored, many short blocks": ("loop", True, "kernel", "while"),
    "restored, a stream made since": ("stream", True, "kernel", "while"),
    "restored, a context made since": ("context", True, "kernel", "while"),
    "restored, the other copies out": ("n_body", True, "copy out", "before"),
    "restored, the other copies in": ("n_body", True, "copy in", "before"),
    "restored, the other runs a kernel": ("n_body", True, "kernel", "before"),
    "restored, the other gives it back": ("n_body", True, "give back", "before"),
    "restored, the other ends": ("n_body", True, "end", "before"),
    "restored, an older one copies out": ("n_body", True, "copy out", "older"),
    "restored, an older one copies in": ("n_body", True, "copy in", "older"),
    "restored, an older one runs a kernel": ("n_body", True, "kernel", "older"),
    "restored, an older one gives it back": ("n_body", True, "give back", "older"),
    "restored, an older one ends": ("n_body", True, "end", "older"),
}


def launch_of(device):
    bodies = ctypes.c_uint32(BODIES)
    function = device.kernel(PROGRAMS.read_text(), "n_body")
    memory = [device.memory(4 * BODIES, seed) for seed in (1, 2)]
    return lambda grid: device.launch(function, grid, 128, *memory, bodies)


def program(kind):
    device = Device()
    if kind == "loop":
        function, memory = device.kernel(LOOP % {"turns": 30000}, "loop_30000"), device.memory(4096, 1)
        launch, grid = lambda grid: device.launch(function, grid, 128, memory), 1 << 18
        began = time.monotonic()
        launch(grid)
        device.synchronize()
        grid = int(grid * 13 / (time.monotonic() - began))
    else:
        launch, grid = launch_of(device), BODIES // 128
        launch(132)
        device.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    if kind in ("stream", "context"):
        if kind == "context":
            call("cuCtxCreate_v2", ctypes.byref(ctypes.c_void_p()), 0, 0)
        call("cuStreamCreate", ctypes.byref(device.stream), 1)
        launch = launch_of(device) if kind == "context" else launch
    launch(grid)
    print("launched", flush=True)
    began = time.monotonic()
    result = cuda.cuStreamSynchronize(device.stream)
    print(f"{result} after {time.monotonic() - began:.1f} s", flush=True)
    os._exit(0)


def other(what):
    device = Device()
    function, memory = device.kernel(SMALL, "loop_300"), device.memory(1 << 20, 1)
    host = ctypes.c_void_p()
    call("cuMemHostAlloc", ctypes.byref(host), ctypes.c_size_t(4 << 20), 0)
    sys.stdin.readline()
    if what == "kernel":
        device.launch(function, 1000, 128, memory)
    elif what == "copy out":
        call("cuMemcpyDtoHAsync_v2", host, memory, ctypes.c_size_t(4 << 20), device.stream)
    elif what == "copy in":
        call("cuMemcpyHtoDAsync_v2", memory, host, ctypes.c_size_t(4 << 20), device.stream)
    if what == "give back":
        call("cuDevicePrimaryCtxReset_v2", 0)
    else:
        device.synchronize()
    if what != "end":
        # It stays until the program has ended.
        sys.stdin.readline()


def restored(pid):
    call("cuInit", 0)
    for name in ("Lock", "Checkpoint", "Restore", "Unlock"):
        call("cuCheckpointProcess" + name, int(pid), (ctypes.c_uint64 * 8)())


def start(*words):
    return subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def go(process):
    process.stdin.write("\n")
    process.stdin.flush()


def xids():
    log = subprocess.run(["dmesg"], capture_output=True, text=True).stdout
    return [line.split("NVRM: ")[1] for line in log.splitlines() if "NVRM: Xid" in line]


def main():
    print(f"{'program':<37} {'synchronise':<18} kernel log", flush=True)
    for name, (kind, is_restored, what, when) in ROWS.items():
        known = len(xids())
        one = start("program", kind)
        if one.stdout.readline().strip() != "ready":
            sys.exit("the program does not start")
        two = start("other", what) if when == "older" else None
        time.sleep(3 if two else 0)
        if is_restored:
            subprocess.run([sys.executable, __file__, "restored", str(one.pid)], check=True)
        if when == "before":
            two = start("other", what)
            time.sleep(3)
        go(one)
        one.stdout.readline()
        time.sleep(1)
        two = two or start("other", what)
        go(two)
        said = one.stdout.readline().strip()
        one.wait()
        two.stdin.close()
        two.wait()
        print(f"{name:<37} {said:<18} {'; '.join(xids()[known:]) or '-'}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        {"program": program, "other": other, "restored": restored}[sys.argv[1]](sys.argv[2])
    else:
        main()
