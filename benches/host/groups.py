#!/usr/bin/env python3
"""How long a group of processes stands still for its dump, against one process with the same device memory; and whether
many processes that share many blocks with each other are dumped and restored. Needs root, CRIU and gpucr built: no GPU."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

# One process of the group: `rank`, how many there are, MiB of its own, and how many blocks of 2 MiB it gives to each
# other process by legacy IPC. A file for each rank has the handles; a line in `rank.N` says how far it is.
PROGRAM = """
import ctypes, os, sys, time
folder, rank, count, mib, blocks = sys.argv[1], *map(int, sys.argv[2:6])
cuda = ctypes.CDLL("libcuda.so.1")
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]
cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
def check(code):
    if code:
        raise SystemExit(f"rank {rank}: the driver says {code}")
def say(text):
    with open(f"{folder}/rank.{rank}.new", "w") as out:
        out.write(text)
    os.rename(f"{folder}/rank.{rank}.new", f"{folder}/rank.{rank}")
def wait(name, what):
    while True:
        try:
            with open(f"{folder}/{name}", "rb") as file:
                if file.read().startswith(what):
                    return
        except FileNotFoundError:
            pass
        time.sleep(0.05)
device, context = ctypes.c_int(), ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDeviceGet(ctypes.byref(device), 0))
check(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device))
def allocate(size, value):
    memory = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
    check(cuda.cuMemsetD32_v2(memory, value, ctypes.c_size_t(size // 4 if mib else 16)))
    return memory
def first_word(memory):
    word = ctypes.c_uint32()
    check(cuda.cuMemcpyDtoH_v2(ctypes.byref(word), memory, ctypes.c_size_t(4)))
    return word.value
own = [allocate(2 << 20, rank << 16 | number) for number in range(blocks or mib // 2)]
with open(f"{folder}/handles.{rank}", "wb") as out:
    for memory in own if blocks else []:
        handle = Handle()
        check(cuda.cuIpcGetMemHandle(ctypes.byref(handle), memory))
        out.write(bytes(handle))
say("offered")
opened = []
for other in range(count) if blocks else []:
    wait(f"rank.{other}", b"o")
    if other != rank:
        with open(f"{folder}/handles.{other}", "rb") as file:
            for number in range(blocks):
                memory = ctypes.c_uint64()
                handle = Handle.from_buffer_copy(file.read(64))
                check(cuda.cuIpcOpenMemHandle_v2(ctypes.byref(memory), handle, 1))
                opened.append((memory, other << 16 | number))
say("open")
wait("go", b"go")
all_of_it = [(memory, rank << 16 | number) for number, memory in enumerate(own)] + opened
if any(first_word(memory) != value for memory, value in all_of_it):
    raise SystemExit(f"rank {rank}: memory is wrong")
say(f"well {len(all_of_it)}")
"""


def said(folder, rank):
    try:
        with open(os.path.join(folder, f"rank.{rank}"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def wait_for(folder, count, word, program=None):
    while not all(said(folder, rank).startswith(word) for rank in range(count)):
        if program is not None and program.poll() is not None:
            with open(os.path.join(folder, "log"), encoding="utf-8") as log:
                sys.exit(f"the program has ended:\n{log.read()}")
        time.sleep(0.1)


def dumped_and_restored(options, count, mib, blocks):
    """The reports of dump and restore, and how many blocks each process had."""
    folder = tempfile.mkdtemp(dir=options.dir)
    try:
        with open(os.path.join(folder, "program.py"), "w", encoding="utf-8") as file:
            file.write(PROGRAM)
        each = f'"{sys.executable}" {folder}/program.py {folder} $rank {count} {mib // count} {blocks}'
        ranks = " ".join(map(str, range(count)))
        script = f"for rank in {ranks}; do {each} & done; wait"
        environment = {**os.environ, "SOFTCUDA_MEMORY": options.memory}
        with open(os.path.join(folder, "log"), "w", encoding="utf-8") as log:
            run = [options.gpucr, "run", "--device", "soft", "--", "sh", "-c", script]
            program = subprocess.Popen(
                run, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment
            )
            wait_for(folder, count, "open", program)
            image = os.path.join(folder, "image")
            dump = [options.gpucr, "dump", "--json", "--pid", str(program.pid), "-o", image, "--protocol", "stop"]
            dump = subprocess.run(dump, capture_output=True, text=True, check=False, env=environment)
            if dump.returncode:
                program.kill()
                sys.exit(dump.stderr)
            program.wait()
        with open(os.path.join(folder, "go"), "w", encoding="utf-8") as file:
            file.write("go")
        begun = time.monotonic()
        restore = [options.gpucr, "restore", image]
        restore = subprocess.run(restore, capture_output=True, text=True, check=False, env=environment)
        if restore.returncode:
            sys.exit(restore.stderr)
        wait_for(folder, count, "well")
        took = time.monotonic() - begun
        return json.loads(dump.stdout), took, {said(folder, rank).split()[1] for rank in range(count)}
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="target/release/gpucr")
    parser.add_argument("--dir", default="/dev/shm", help="where images are written")
    parser.add_argument("--mib", type=int, default=1024, help="device memory of all processes together")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--memory", default="16G", help="memory of the device")
    parser.add_argument("--share", type=int, default=0, metavar="BLOCKS", help="blocks that each gives to all others")
    options = parser.parse_args()
    print(f"{os.uname().release}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    if options.share:
        for count in options.processes:
            report, took, shared = dumped_and_restored(options, count, 0, options.share)
            print(
                f"{count} processes, {'/'.join(shared)} shared blocks in each: stopped {report['stopped_ms'] / 1000:.2f} s,"
                f" restored and compared after {took:.2f} s",
                flush=True,
            )
        return
    times = {count: [] for count in options.processes}
    for _ in range(options.runs):
        for count in options.processes:
            report, _, _ = dumped_and_restored(options, count, options.mib, 0)
            times[count].append(report["stopped_ms"] / 1000)
            print(f"{count} processes: {report['stopped_ms']} ms, {json.dumps(report.get('phases'))}", flush=True)
    first = statistics.median(times[options.processes[0]])
    for count, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{count} processes, {options.mib} MiB: stopped {median:.2f} s in the median, {median / first:.2f} times")


if __name__ == "__main__":
    main()
