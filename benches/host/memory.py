#!/usr/bin/env python3
"""How long a program with much host memory stands still for its dump: gpucr, gpucr without copies ahead, gpucr with
memory written by CRIU, CRIU alone, and CRIU after a pre-dump. With --restore, how long it takes until it runs again:
gpucr, gpucr with memory that comes when it is touched, and CRIU alone; with --first-step, until it has made a step.
Needs root, CRIU, and gpucr built (release): no GPU."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

PROGRAM = """
import ctypes, mmap, os, sys, time
mib, blocks, percent, reserved = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
stretch = int(sys.argv[5])
beat = sys.argv[6] if len(sys.argv) > 6 else None
if reserved:
    # Addresses without memory, as CUDA's driver has them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which older Pythons do not name
    addresses = mmap.mmap(-1, reserved << 30, flags=flags, prot=0)
if blocks:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
    assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
    assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(blocks << 21)) == 0
memory = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
noise = open("/dev/urandom", "rb", buffering=0)
view = memoryview(memory)
for at in range(mib):
    # Half of each page is noise, so that it can be compressed a little.
    for page in range(at << 20, (at + 1) << 20, 4096):
        view[page:page + 2048] = noise.read(2048)
print("ready", flush=True)
pages, at, last, due = mib * 256, 0, time.monotonic(), 0.0
while True:
    time.sleep(0.05)
    now = time.monotonic()
    # What a step takes that has not been made for a while, because the program did not exist, is no more than that.
    last = max(last, now - 1)
    # Stretches far from each other: a prime number of them lies between.
    due, last = due + pages * percent / 100 * (now - last), now
    while due >= stretch:
        at, due = (at + 7919) % (pages // stretch), due - stretch
        for page in range(at * stretch, (at + 1) * stretch):
            view[page * 4096] = (view[page * 4096] + 1) % 256
    if beat:
        with open(beat, "w") as file:
            file.write(str(time.time()))
"""


def written(options):
    """What the program is told of what it has and writes."""
    return [str(options.written), str(options.reserved), str(options.stretch)]


def start(command, log):
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while True:
        with open(log.name, encoding="utf-8") as text:
            said = text.read()
        if "ready" in said:
            return program
        if program.poll() is not None:
            sys.exit(f"the program has ended:\n{said}")
        time.sleep(0.05)


def by_gpucr(options, mib, folder, environment):
    with open(os.path.join(folder, "log"), "w+", encoding="utf-8") as log:
        run = [options.gpucr, "run", "--device", "soft", "--", sys.executable, "-c", PROGRAM, str(mib), "1"]
        run += written(options)
        if options.first_step:
            run.append(os.path.join(folder, "beat"))
        program = start(run, log)
        command = [options.gpucr, "dump", "--json", "--pid", str(program.pid), "-o", os.path.join(folder, "image")]
        command += ["--compress", options.compress]
        dump = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
        if dump.returncode:
            sys.exit(dump.stderr)
        program.wait()
        report = json.loads(dump.stdout)
        return report["stopped_ms"] / 1000


def by_criu(options, mib, folder):
    with open(os.path.join(folder, "log"), "w+", encoding="utf-8") as log:
        program = start([sys.executable, "-c", PROGRAM, str(mib), "0", *written(options)], log)
        images = os.path.join(folder, "image")
        os.mkdir(images)
        begun = time.monotonic()
        subprocess.run([options.criu, "dump", "-t", str(program.pid), "-D", images], check=True)
        took = time.monotonic() - begun
        program.wait()
        return took


def by_criu_twice(options, mib, folder):
    """The dump that follows a pre-dump. `None` where the kernel cannot tell what was written in between."""
    with open(os.path.join(folder, "log"), "w+", encoding="utf-8") as log:
        program = start([sys.executable, "-c", PROGRAM, str(mib), "0", *written(options)], log)
        before, images = os.path.join(folder, "before"), os.path.join(folder, "image")
        os.mkdir(before)
        os.mkdir(images)
        about = ["-t", str(program.pid), "--track-mem"]
        pre = [options.criu, "pre-dump", *about, "-D", before]
        took = None
        if subprocess.run(pre, capture_output=True, check=False).returncode == 0:
            begun = time.monotonic()
            subprocess.run([options.criu, "dump", *about, "-D", images, "--prev-images-dir", "../before"], check=True)
            took = time.monotonic() - begun
        program.kill()
        program.wait()
        return took


def restored_by_gpucr(options, mib, folder, flags):
    by_gpucr(options, mib, folder, {})
    command = [options.gpucr, "restore", "--json", "-d", "--files", "keep", *flags, os.path.join(folder, "image")]
    begun = time.time()
    restore = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first_step = first_beat(os.path.join(folder, "beat"), begun) if options.first_step else None
    said, failed = restore.communicate()
    if restore.returncode:
        sys.exit(failed)
    report = json.loads(said)
    end(report["pid"])
    if flags and not report["on_demand"]["host_bytes"]:
        sys.exit(f"no host memory came late: {report}")
    return first_step or report["running_ms"] / 1000


def first_beat(path, begun):
    """How long after `begun` the program has made its first step."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        with open(path, encoding="utf-8") as file:
            said = file.read()
        if said and float(said) > begun:
            return float(said) - begun
        time.sleep(0.001)
    sys.exit("the program has made no step")


def restored_by_criu(options, mib, folder):
    by_criu(options, mib, folder)
    begun = time.monotonic()
    pids = os.path.join(folder, "pid")
    command = [options.criu, "restore", "-d", "-D", os.path.join(folder, "image"), "--pidfile", pids]
    subprocess.run(command, check=True)
    took = time.monotonic() - begun
    with open(pids, encoding="utf-8") as text:
        end(int(text.read()))
    return took


def end(pid):
    """Ends a process that was restored, and waits until its pid is free."""
    os.kill(pid, 9)
    while os.path.exists(f"/proc/{pid}"):
        time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="target/release/gpucr")
    parser.add_argument("--criu", default="/usr/local/lib/gpucr/criu")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 1024, 3072], help="host memory of the program")
    parser.add_argument("--written", type=float, default=1.0, help="percent of it that are written each second")
    parser.add_argument("--stretch", type=int, default=1, metavar="PAGES", help="pages in a row written at a time")
    parser.add_argument("--reserved", type=int, default=0, metavar="GIB", help="addresses that it reserves besides")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compress", default="none", help="as of gpucr dump")
    parser.add_argument("--dir", default="/dev/shm", help="where images are written")
    parser.add_argument("--restore", action="store_true", help="measure restores")
    parser.add_argument(
        "--first-step", action="store_true", help="measure restores by gpucr until the program has made a step"
    )
    parser.add_argument("--ways", nargs="+", help="only those whose names begin so")
    options = parser.parse_args()
    ways = {
        "gpucr": lambda mib, folder: by_gpucr(options, mib, folder, {}),
        "gpucr, nothing ahead": lambda mib, folder: by_gpucr(options, mib, folder, {"GPUCR_HOST_AHEAD": "0"}),
        "gpucr, memory by CRIU": lambda mib, folder: by_gpucr(
            options, mib, folder, {"GPUCR_CRIU_WRITES_MEMORY": "1"}
        ),
        "criu dump (whole command)": lambda mib, folder: by_criu(options, mib, folder),
        "criu dump after pre-dump": lambda mib, folder: by_criu_twice(options, mib, folder),
    }
    if options.restore or options.first_step:
        ways = {
            "gpucr restore": lambda mib, folder: restored_by_gpucr(options, mib, folder, []),
            "gpucr restore --on-demand": lambda mib, folder: restored_by_gpucr(options, mib, folder, ["--on-demand"]),
            "criu restore (whole command)": lambda mib, folder: restored_by_criu(options, mib, folder),
        }
    if options.first_step:
        del ways["criu restore (whole command)"]
    if options.ways:
        ways = {way: measure for way, measure in ways.items() if any(way.startswith(w) for w in options.ways)}
    what = "until it runs" if options.restore else "until its first step" if options.first_step else "stopped"
    print(f"{os.uname().release}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; seconds {what}, medians")
    for mib in options.mib:
        times = {way: [] for way in ways}
        for _ in range(options.runs):
            for way, measure in ways.items():
                folder = tempfile.mkdtemp(dir=options.dir)
                try:
                    times[way].append(measure(mib, folder))
                finally:
                    shutil.rmtree(folder)
        for way, seconds in times.items():
            if None in seconds:
                print(f"{mib:6} MiB  {way:28} not on this kernel", flush=True)
                continue
            print(f"{mib:6} MiB  {way:28} {statistics.median(seconds):8.3f}   {[round(s, 3) for s in seconds]}", flush=True)


if __name__ == "__main__":
    main()
