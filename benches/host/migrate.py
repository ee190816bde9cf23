#!/usr/bin/env python3
"""Programs that go from one host to another by `gpucr migrate`, over ssh and a link of limited rate: downtime, bytes
and the program's speed meanwhile, and the same by `gpucr export | gpucr import`. Both hosts are namespaces of this
machine (hosts.py). Needs root, CRIU, openssh-server, and gpucr built (release): no GPU. Every program compares all of
its memory at its end."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time

from hosts import Hosts

PROGRAM = """
import ctypes, hashlib, os, sys, time
mib, percent, pause, stop = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0
assert cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(mib << 20)) == 0
# Noise, which no compression makes smaller.
def noise(unit, number):
    return hashlib.shake_128(f"{unit} {number}".encode()).digest(1 << 20)
def write(unit, number):
    at = ctypes.c_uint64(memory.value + (unit << 20))
    assert cuda.cuMemcpyHtoD_v2(at, noise(unit, number), ctypes.c_size_t(1 << 20)) == 0
written = [0] * mib
for unit in range(mib):
    write(unit, 0)
print("ready", flush=True)
# One MiB after the other, as a cache that fills.
# Not the monotonic clock, which CRIU sets back.
due, unit, last, steps, work = 0.0, 0, time.time(), 0, bytes(100_000)
while not os.path.exists(stop):
    if pause:
        time.sleep(pause)
    else:
        hashlib.sha256(work).digest()
    steps += 1
    now = time.time()
    # What a program would have written while it stood still it does not write.
    due, last = due + mib * percent / 100 * min(now - last, 1.0), now
    while due >= 1:
        written[unit] += 1
        write(unit, written[unit])
        unit, due = (unit + 1) % mib, due - 1
    print(f"{now:.4f} {steps} {sum(written)}", flush=True)
back = ctypes.create_string_buffer(1 << 20)
for unit in range(mib):
    at = ctypes.c_uint64(memory.value + (unit << 20))
    assert cuda.cuMemcpyDtoH_v2(back, at, ctypes.c_size_t(1 << 20)) == 0
    assert back.raw == noise(unit, written[unit]), unit
print("same", flush=True)
"""


class Program:
    """A program on the first host, under `gpucr run`."""

    def __init__(self, options, hosts, folder, percent, pause):
        self.log, self.end = os.path.join(folder, "log"), os.path.join(folder, "end")
        command = [options.gpucr, "run", "--device", "soft", "--", sys.executable, "-c", PROGRAM]
        command += [str(options.mib), str(percent), str(pause), self.end]
        with open(self.log, "w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                hosts.here(*command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.wait(lambda: "ready" in self.said())

    def said(self):
        with open(self.log, encoding="utf-8") as text:
            return text.read()

    def wait(self, holds):
        begun = time.monotonic()
        while not holds():
            # Whoever is dumped and ended is a child of this process.
            self.process.poll()
            if time.monotonic() - begun > 60:
                sys.exit(f"it takes too long:\n{self.said()[-2000:]}")
            time.sleep(0.02)

    def steps(self):
        """When each step was made, and its number."""
        return [step[:2] for step in self.told()]

    def told(self):
        """When each step was made, its number, and how often memory had been written by then."""
        lines = [line.split() for line in self.said().splitlines()]
        return [(float(line[0]), int(line[1]), int(line[2])) for line in lines if len(line) == 3]

    def gap(self):
        """For how long it has stood still at most."""
        times = [at for at, _ in self.steps()]
        return max(after - before for before, after in zip(times, times[1:]))

    def rate(self, begin, end):
        """Steps a second between two moments."""
        inside = [step for step in self.steps() if begin <= step[0] <= end]
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def finish(self):
        """It comes to its end, and finds its memory as it should be."""
        with open(self.end, "w", encoding="utf-8"):
            pass
        self.wait(lambda: "same" in self.said() or "rror" in self.said())
        if not self.said().endswith("same\n"):
            sys.exit(self.said()[-2000:])
        self.process.wait()


def checked(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout}{done.stderr}")
    return done.stdout


def migrate(options, hosts, program, *more, store="/var/lib/gpucr/store"):
    """Lets it go to the second host. Gives the report, with the bytes that the wire has seen."""
    before = hosts.sent()
    command = [options.gpucr, "migrate", "--json", "--pid", str(program.process.pid), "--compress", options.compress]
    command += ["--to", f"ssh://{hosts.there}{store}", "--ssh", hosts.connect, *options.migrate, *more]
    with subprocess.Popen(hosts.here(*command), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as gpucr:
        while gpucr.poll() is None:
            # The ended program has to be reaped, as its parent would do.
            program.process.poll()
            time.sleep(0.01)
        said = gpucr.stdout.read(), gpucr.stderr.read()
    if gpucr.returncode:
        sys.exit("".join(said))
    report = json.loads(said[0])
    report["wire"] = hosts.sent() - before
    return report


def goes_and_comes_back(options, hosts, folder):
    """By ssh to the second host, and from there to the first."""
    program = Program(options, hosts, folder, 1.0, 0.01)
    dry = checked(
        hosts.here(options.gpucr, "migrate", "--dry-run", "--pid", str(program.process.pid), "--to",
                   f"ssh://{hosts.there}", "--ssh", hosts.connect)
    )
    report = migrate(options, hosts, program)
    program.wait(lambda: program.steps()[-1][1] > 100)
    # There is no SSH server on the first host: the second one's gpucr talks through a socket, which ssh carries.
    back = os.path.join(folder, "back")
    receive = subprocess.Popen(hosts.here(options.gpucr, "receive", "--from", f"unix:{back}", "--store", f"{folder}/s"))
    program.wait(lambda: os.path.exists(back))
    there = hosts.ssh(f"gpucr migrate --pid {report['new_pid']} --to unix:{back}")
    if there.returncode or receive.wait():
        sys.exit(there.stdout + there.stderr)
    program.finish()
    print(f"  {dry.strip()}; there as {report['new_pid']}, and back; stood still for {program.gap():.2f} s at most")


def stands_still(options, hosts, folder):
    """Downtime of a program that writes nothing, against export | import."""
    program = Program(options, hosts, folder, 0, 0.01)
    report = migrate(options, hosts, program)
    program.wait(lambda: program.said().count("\n") and time.time() - program.steps()[-1][0] < 0.2)
    time.sleep(0.5)
    program.finish()
    ours = program.gap()
    print(f"  gpucr migrate            {ours:7.2f} s, {report['wire'] / 2**20:.0f} MiB on the wire", flush=True)
    print("   ", *[f"{phase['name']} {phase['ms']:.0f}" for phase in report["dump"]["phases"]], f"whole {report['downtime_ms']:.0f} ms")
    shutil.rmtree(folder)
    os.mkdir(folder)
    program = Program(options, hosts, folder, 0, 0.01)
    image, there = os.path.join(folder, "image"), os.path.join(folder, "there")
    before = hosts.sent()
    checked(
        hosts.here(options.gpucr, "dump", "--json", "--pid", str(program.process.pid), "-o", image, "--compress", options.compress)
    )
    program.process.wait()
    ship = f"{options.gpucr} export {image} - | {hosts.connect} {hosts.there} gpucr import - -o {there}"
    checked(hosts.here("bash", "-o", "pipefail", "-c", ship))
    moved = hosts.sent() - before
    restored = hosts.ssh(f"gpucr restore --detach {there} > /dev/null")
    if restored.returncode:
        sys.exit(restored.stderr)
    time.sleep(0.5)
    program.finish()
    theirs = program.gap()
    print(f"  gpucr export | import    {theirs:7.2f} s, {moved / 2**20:.0f} MiB on the wire")
    print(f"  share                    {100 * ours / theirs:7.1f} %")


def writes(options, hosts, folder):
    """Bytes on the wire of a program that writes, and of the same once more where its image was."""
    program = Program(options, hosts, folder, options.written, 0.01)
    first = migrate(options, hosts, program)
    time.sleep(0.5)
    told = program.told()
    moved = max(zip(told, told[1:]), key=lambda pair: pair[1][0] - pair[0][0])[0][2]
    program.finish()
    whole, sent = (100 * first[bytes] / (options.mib << 20) for bytes in ("wire", "sent_bytes"))
    print(
        f"  first time: {first['wire'] / 2**20:.0f} MiB on the wire, {whole:.1f} % of its device memory ({sent:.1f} % before ssh and"
        f" TCP); it had written {100 * moved / options.mib:.1f} % when it was stopped; stood still for {program.gap():.2f} s",
        flush=True,
    )
    shutil.rmtree(folder)
    os.mkdir(folder)
    # The same program is one that has come as far.
    program = Program(options, hosts, folder, options.written, 0.01)
    program.wait(lambda: program.told() and program.told()[-1][2] >= moved)
    again = migrate(options, hosts, program)
    time.sleep(0.5)
    program.finish()
    print(f"  again:      {again['wire'] / 2**20:.0f} MiB on the wire, {100 * again['wire'] / first['wire']:.1f} % of the first time; stood still for {program.gap():.2f} s")


def goes_on(options, hosts, folder):
    """The speed of a program that computes during the pre-copy."""
    if not options.netem:
        # What splits data into packets in the place of a network card would need the program's cores.
        hosts.send_long_segments()
    program = Program(options, hosts, folder, options.written, 0)
    time.sleep(3)
    begun = time.time()
    report = migrate(options, hosts, program)
    phases = {phase["name"]: phase["ms"] / 1000 for phase in report["dump"]["phases"]}
    time.sleep(0.5)
    program.finish()
    stood = max(zip(program.steps(), program.steps()[1:]), key=lambda pair: pair[1][0] - pair[0][0])[0][0]
    alone, beside = program.rate(begun - 2.5, begun), program.rate(stood - phases["precopy"], stood)
    print(f"  {alone:.0f} steps a second alone, {beside:.0f} in the {phases['precopy']:.1f} s of the pre-copy: {100 * beside / alone:.1f} %")


WAYS = {"ssh": goes_and_comes_back, "still": stands_still, "written": writes, "speed": goes_on}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="target/release/gpucr", type=os.path.abspath)
    parser.add_argument("--mib", type=int, default=1024, help="device memory of the program")
    parser.add_argument("--written", type=float, default=1.0, help="percent of it that are written each second")
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it")
    parser.add_argument("--netem", help='delay and loss of the link, as tc takes them: "delay 5ms loss 0.1%%"')
    parser.add_argument("--compress", default="1", help="as of gpucr migrate")
    parser.add_argument("--dir", default="/dev/shm", help="for images and logs")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--migrate", nargs="+", default=[], help="more options of gpucr migrate", metavar="OPTION")
    options = parser.parse_args()
    print(
        f"{os.uname().release}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; link {options.rate}"
        f" {options.netem or ''}; {options.mib} MiB of device memory"
    )
    for way in options.only:
        print(f"{way}: {WAYS[way].__doc__}", flush=True)
        folder = tempfile.mkdtemp(dir=options.dir)
        try:
            with Hosts(options.gpucr, options.rate, options.netem) as hosts:
                WAYS[way](options, hosts, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
