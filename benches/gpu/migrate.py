#!/usr/bin/env python3
"""A PyTorch program that goes to another GPU, as to another host: the other gpucr is in namespaces of its own (mounts,
pids, network), and believes that this machine was booted another time. The link is a Unix socket. The program computes on
there, and its output is compared with that of an uninterrupted run. Needs root; with one GPU it stays on that, where
there has to be room for it twice.

How long it stood still is the longest time between two of its lines, of which it writes one each step.
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid

import verify

PROGRAMS = {
    "inference": lambda gib: ["infer", "--gib", str(gib)],
    "adamw": lambda _: ["train"],
}

# Brings up the loopback device, where no `ip` is installed: SIOCSIFFLAGS with IFF_UP.
LOOPBACK = """
import fcntl, socket, struct
with socket.socket() as any:
    fcntl.ioctl(any, 0x8914, struct.pack("16sh14x", b"lo", 1))
"""

# What the other host runs as its first process.
INIT = """
set -e
mount -t proc proc /proc
mount --bind "$1" /proc/sys/kernel/random/boot_id
mount -t tmpfs -o mode=755,size=80% tmpfs /var/lib/gpucr
python3 -c "$LOOPBACK"
shift
"$@"
exec sleep 3600
"""


class Watched:
    """Notes when a log grows."""

    def __init__(self, log):
        self.log, self.times, self.over = log, [], False
        self.thread = threading.Thread(target=self.watch)
        self.thread.start()

    def watch(self):
        size = -1
        while not self.over:
            now = self.log.stat().st_size
            if now != size:
                size = now
                self.times.append(time.monotonic())
            time.sleep(0.0005)

    def longest(self, begin):
        """The longest time between two lines of which the second came after `begin`."""
        self.over = True
        self.thread.join()
        return max(after - before for before, after in zip(self.times, self.times[1:]) if after > begin)


def gpus():
    said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return said.count("GPU ")


def wait_for(holds, what, process, limit=240):
    begun = time.monotonic()
    while not holds():
        if process.poll() is not None:
            raise RuntimeError(f"{what}: it ended with {process.returncode}")
        if time.monotonic() - begun > limit:
            raise RuntimeError(f"{what}: not after {limit} s")
        time.sleep(0.01)


def once(args, folder, expected, command):
    log, socket, said = folder / "log", folder / "link", folder / "received.json"
    boot = folder / "boot"
    boot.write_text(f"{uuid.uuid4()}\n")
    program = verify.start(command, log, {}, args.gpucr)
    verify.wait_for_step(log, 40, program)
    receive = [args.gpucr, "receive", "--from", f"unix:{socket}", "--json"]
    if gpus() > 1:
        receive += ["--device-map", "0=1"]
    there = ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c", INIT, "sh", str(boot)]
    with open(said, "w") as out, open(folder / "received.err", "w") as err:
        other = subprocess.Popen([*there, *receive], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                 env={**os.environ, **args.log, "LOOPBACK": LOOPBACK})
    try:
        wait_for(socket.exists, f"gpucr receive, see {folder}/received.err", other)
        watched = Watched(log)
        begun = time.monotonic()
        sent = subprocess.Popen([args.gpucr, "migrate", "--pid", str(program.pid), "--to", f"unix:{socket}", "--json",
                                 "--compress", args.compress, *args.migrate],
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, **args.log})
        while sent.poll() is None:
            program.poll()
            time.sleep(0.005)
        report, errors = sent.communicate()
        (folder / "migrate.err").write_text(errors)
        took = time.monotonic() - begun
        if sent.returncode:
            watched.over = True
            raise RuntimeError(f"gpucr migrate: {errors}{(folder / 'received.err').read_text()}")
        wait_for(lambda: "result " in log.read_text(), "the program at the other host", other)
        longest = watched.longest(begun)
    finally:
        other.kill()
        other.wait()
        if program.poll() is None:
            program.kill()
    return json.loads(report), took, longest, different(verify.meaningful(log), expected)


def different(got, expected):
    """Where two outputs begin to differ, in words; none if they do not."""
    if got == expected:
        return None
    line = next((at for at, (one, other) in enumerate(zip(got, expected)) if one != other), min(len(got), len(expected)))
    return f"line {line}: {got[line:line + 2]} instead of {expected[line:line + 2]}"


def with_run():
    """Starts this again where /run is a tmpfs, as on hosts with systemd: elsewhere CRIU keeps nothing of what it has found out
    about the kernel, and tries all of it anew each time."""
    kind = subprocess.run(["stat", "-f", "-c", "%T", "/run"], capture_output=True, text=True, check=True).stdout.strip()
    if kind != "tmpfs" and "GPUCR_BENCH_RUN" not in os.environ:
        os.environ["GPUCR_BENCH_RUN"] = "1"
        mount = 'mount -t tmpfs tmpfs /run && exec "$@"'
        os.execvp("unshare", ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, *sys.argv])


def main():
    with_run()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--program", choices=PROGRAMS, default="inference")
    parser.add_argument("--gib", type=float, default=24)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--delay", default="0.01", help="seconds between two steps")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--compress", default="none", help="as of gpucr migrate")
    parser.add_argument("--out", metavar="DIR", help="keep there what both gpucrs say, as with GPUCR_LOG=gpucr_core=debug")
    parser.add_argument("--migrate", nargs="+", default=[], help="more options of gpucr migrate", metavar="OPTION")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    # For the two gpucrs alone: the shim would write among the program's lines, and into them.
    level = os.environ.pop("GPUCR_LOG", None)
    args.log = {"GPUCR_LOG": level} if level else {}
    pathlib.Path("/var/lib/gpucr").mkdir(parents=True, exist_ok=True)
    command = verify.TORCH + PROGRAMS[args.program](args.gib) + ["--steps", str(args.steps), "--delay", args.delay]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-migrate-", dir="/dev/shm"))
    wrong, gaps, downtimes = 0, [], []
    try:
        plain = folder / "plain"
        if verify.start(command, plain, {}, None).wait(timeout=300) != 0:
            sys.exit(f"the plain run failed: {plain.read_text()[-500:]}")
        expected = verify.meaningful(plain)
        for run in range(args.runs):
            here = folder / str(run)
            here.mkdir()
            report, took, longest, difference = once(args, here, expected, command)
            wrong += difference is not None
            gaps.append(longest * 1000)
            downtimes.append(report["downtime_ms"])
            phases = " ".join(f"{phase['name']}={phase['ms']:.0f}" for phase in report["dump"]["phases"])
            print(f"run {run}: downtime {report['downtime_ms']:.0f} ms, longest time between two steps {longest * 1000:.0f} ms,"
                  f" {took:.1f} s in all, {report['sent_bytes'] / 2**30:.2f} GiB sent,"
                  f" {'DIFFERENT' if difference else 'identical'}", flush=True)
            print(f"  {phases}", flush=True)
            if difference:
                print(f"  {difference}")
            if args.out:
                out = pathlib.Path(args.out) / str(run)
                out.mkdir(parents=True, exist_ok=True)
                for name in ("migrate.err", "received.err"):
                    shutil.copy(here / name, out)
            shutil.rmtree(here)
        print(f"medians: downtime {statistics.median(downtimes):.0f} ms, between two steps {statistics.median(gaps):.0f} ms")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
