#!/usr/bin/env python3
"""Kernels that `gpucr run --interruptible` interrupts, on a real GPU.

`loops` and `long`: one kernel that takes long runs uninterrupted; then it is dumped twice while it runs and goes on, dumped
and ended, restored, dumped and ended again, and restored on demand to its end, which must print the same. The table has
how long the gates were shut until the device was idle, and how many blocks were done. The first kernel has few blocks, whose
threads are interrupted in their loops; the second has shared memory, and is interrupted at barriers. `again`: a kernel
whose threads have memory of their own is aborted, by one dump less, and begins anew each time. `waited`: the same without
`--interruptible`, with kernels of a few seconds one after the other, which are waited for. `cost`: several kernels run with and without `--interruptible`, in processes by turns:
median time, and what their twins cost more. Exit status 1 if anything differs or fails.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import verify

PROGRAM = [sys.executable, str(verify.HERE / "programs" / "long_kernels.py")]


def dump(args, pid, image, *flags):
    command = [args.gpucr, "dump", "--pid", str(pid), "-o", str(image), "--json", "--timeout", "60", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"dump: {done.stderr.strip()}")
    report = json.loads(done.stdout)
    gate = sum(phase["ms"] for phase in report["phases"] if phase["name"] == "gate")
    [one] = report["interrupted"] or [None]
    blocks = f"{one['done']} of {one['blocks']} blocks" if one else "nothing was interrupted"
    blocks += {"loop": ", in loops", "barrier": ", at barriers", "abort": ", by abort"}.get(one["level"] if one else None, "")
    print(f"{image.name:<18} {gate:>9.1f} {report['stopped_ms']:>9.1f}  {blocks}", flush=True)
    if one is None:
        raise RuntimeError("nothing was interrupted")
    return gate


def long(args, out, images, what, kernel, command, level="loop", left_running=2):
    """Dumped so often while it runs on, and twice to its end, all within one kernel."""
    plain, log, err = out / f"{what}.plain.log", out / f"{what}.log", out / f"{what}.restore.err"
    if verify.start(command, plain, {}, None).wait(timeout=300) != 0:
        raise RuntimeError(f"the plain run failed, see {plain}")
    taken = next(line.split()[1] for line in plain.read_text().splitlines() if line.startswith("took "))
    print(f"{kernel} takes {taken} s by itself")
    pause = float(taken) / 14
    print(f"{'dump':<18} {'gate ms':>9} {'stopped':>9}  interrupted")
    with open(log, "w") as said:
        process = subprocess.Popen([args.gpucr, "run", "--interruptible", kernel, "--interrupt-level", level, "--",
                                    *command],
                                   stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
    verify.wait_for_step(log, 0, process)
    pid = process.pid
    for number in range(left_running):
        time.sleep(pause)
        dump(args, pid, images / f"{what}-running-{number}", "--leave-running")
    for number in range(2):
        time.sleep(pause)
        dump(args, pid, images / f"{what}-ended-{number}")
        process.wait(timeout=60)
        with open(err, "w") as said:
            process = subprocess.Popen([args.gpucr, "restore", *([] if number == 0 else ["--on-demand"]),
                                        str(images / f"{what}-ended-{number}")],
                                       stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said)
        time.sleep(pause)
    if process.wait(timeout=300) != 0:
        raise RuntimeError(f"restore: {err.read_text().strip()}")
    if verify.meaningful(log) != verify.meaningful(plain):
        raise RuntimeError(f"it ended differently: {plain}, {log}")
    print("identical to the uninterrupted run")


def waited_for(args, out, images):
    """Kernels that are not interrupted, one after the other: gpucr's contexts come and go beside them."""
    command = PROGRAM + ["long", "--bodies", str(args.bodies * 3 // 8), "--launches", "6"]
    plain = out / "waited.plain.log"
    if verify.start(command, plain, {}, None).wait(timeout=300) != 0:
        raise RuntimeError(f"the plain run failed, see {plain}")
    for name, flags in {"cow": ["-R"], "recopy": ["-R", "--protocol", "recopy"],
                        "stop": ["-R", "--protocol", "stop"], "on demand": []}.items():
        image, log = images / name.replace(" ", "-"), out / f"waited.{name.replace(' ', '-')}.log"
        process = verify.start(command, log, {}, args.gpucr)
        verify.wait_for_step(log, 0, process)
        time.sleep(1)
        done = subprocess.run([args.gpucr, "dump", "--pid", str(process.pid), "-o", str(image), "--timeout", "60", *flags],
                              capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise RuntimeError(f"dump: {done.stderr.strip()}")
        status = process.wait(timeout=300)
        if not flags:
            status = subprocess.run([args.gpucr, "restore", "--on-demand", str(image)], capture_output=True,
                                    timeout=300).returncode
        if status != 0 or verify.meaningful(log) != verify.meaningful(plain):
            raise RuntimeError(f"{name}: it ended differently ({status}): {plain}, {log}")
        print(f"kernels that are waited for, {name}: identical", flush=True)


def cost(args, out):
    command, ways = PROGRAM + ["cost"], {
        "plain": [], "block": ["--interruptible", "*"],
        "loop": ["--interruptible", "*", "--interrupt-level", "loop"],
        "auto": ["--interruptible", "auto", "--interrupt-level", "loop"]}
    times = {way: {} for way in ways}
    for number in range(args.rounds):
        for way, flags in ways.items():
            log = out / f"cost.{way}.{number}.log"
            with open(log, "w") as said:
                subprocess.run([args.gpucr, "run", *flags, "--", *command], stdin=subprocess.DEVNULL, stdout=said,
                               stderr=said, timeout=300, check=True)
            for line in log.read_text().splitlines():
                if line.startswith("cost "):
                    _, name, ms = line.split()
                    times[way].setdefault(name, []).append(float(ms))
    print(f"{'kernel/blocks':<20} {'ms':>9} {'block':>9} {'more':>7} {'loop':>9} {'more':>7} "
          f"{'auto':>9} {'more':>7}")
    for name, plain in times["plain"].items():
        base = statistics.median(plain)
        twins = [statistics.median(times[way][name]) for way in ("block", "loop", "auto")]
        cells = " ".join(f"{ms:>9.2f} {100 * (ms / base - 1):>6.1f}%" for ms in twins)
        print(f"{name:<20} {base:>9.2f} {cells}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--out", default="interruptible-logs")
    parser.add_argument("--bodies", type=int, default=1 << 23, help="of the long kernel: its time grows by the square")
    parser.add_argument("--turns", type=int, default=4_000_000_000, help="of the threads that loop")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind for the costs")
    parts = ["loops", "long", "again", "waited", "cost"]
    parser.add_argument("--only", nargs="*", choices=parts, default=parts)
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-interruptible-", dir="/dev/shm"))
    failed = 0
    try:
        if "loops" in args.only:
            long(args, out, images, "loops", "wave", PROGRAM + ["loops", "--turns", str(args.turns)])
        if "long" in args.only:
            long(args, out, images, "long", "n_body", PROGRAM + ["long", "--bodies", str(args.bodies)])
        if "again" in args.only:
            # Whoever is aborted more often than that without having come to an end is waited for.
            long(args, out, images, "again", "again", PROGRAM + ["again", "--turns", str(args.turns)], "abort", 1)
        if "waited" in args.only:
            waited_for(args, out, images)
    except (RuntimeError, subprocess.SubprocessError) as error:
        failed = 1
        print(f"FAILED: {error}")
    finally:
        shutil.rmtree(images)
    if "cost" in args.only:
        cost(args, out)
    return failed


if __name__ == "__main__":
    sys.exit(main())
