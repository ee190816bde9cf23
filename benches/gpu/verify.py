#!/usr/bin/env python3
"""Real programs on a real GPU, dumped in the middle, killed, restored, and compared.

Each program runs twice: uninterrupted, and dumped at a step, restored, and run to its end. The
lines that it printed (values to the last bit) and its final hash must be the same. Prints a table;
the logs are left in the output directory. Exit status 1 if any program differs or fails.
"""

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TORCH = [sys.executable, str(HERE / "programs" / "torch_programs.py")]
OTHER = [sys.executable, str(HERE / "programs" / "other_programs.py")]

# name: command, environment
PROGRAMS = {
    "inference": (TORCH + ["infer", "--gib", "4", "--steps", "200", "--delay", "0.01"], {}),
    "adamw": (TORCH + ["train", "--steps", "300", "--delay", "0.01"], {}),
    "triton": (TORCH + ["compile", "--steps", "300", "--delay", "0.01"], {}),
    "graphs": (TORCH + ["graphs", "--steps", "300", "--delay", "0.01"], {}),
    "cudnn": (TORCH + ["convolution", "--steps", "300", "--delay", "0.01"], {}),
    "expandable": (
        TORCH + ["growing", "--steps", "400", "--delay", "0.005"],
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    ),
    # Memory of cuMemAllocAsync.
    "async": (
        TORCH + ["train", "--steps", "300", "--delay", "0.01"],
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"},
    ),
    "full device": (TORCH + ["full", "--steps", "200", "--delay", "0.02"], {}),
    "cupy": (OTHER + ["cupy", "--steps", "300", "--delay", "0.01"], {}),
    "cupy async": (OTHER + ["cupy", "--steps", "300", "--delay", "0.01", "--asynchronous"], {}),
    "hidden": (OTHER + ["hidden", "--steps", "1500", "--delay", "0.01"], {}),
    "jax": (OTHER + ["jax", "--steps", "300", "--delay", "0.01"],
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", "XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}),
    "jax async": (OTHER + ["jax", "--steps", "300", "--delay", "0.01"],
                  {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1", "XLA_PYTHON_CLIENT_ALLOCATOR": "cuda_async",
                   "XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}),
}


def device_map(number):
    """Where the devices of the image go with --move, at the restore of that number."""
    return f"0={(number + 1) % 2}"


def wait_for_step(log, step, process, limit=180):
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines() if log.exists() else []
        if any(line.startswith(f"step {step} ") for line in lines):
            return
        if process.poll() is not None:
            raise RuntimeError(f"the program ended with {process.returncode} before step {step}")
        time.sleep(0.01)
    raise RuntimeError(f"step {step} did not come in {limit} s")


def meaningful(log):
    return [line for line in log.read_text().splitlines() if line.startswith(("step ", "result "))]


def start(command, log, environment, under):
    prefix = [under, "run", "--"] if under else []
    with open(log, "w") as out:
        return subprocess.Popen(prefix + command, stdin=subprocess.DEVNULL, stdout=out,
                                stderr=out, start_new_session=True,
                                env={**os.environ, **environment})


def verify(name, args, out, images):
    command, environment = PROGRAMS[name]
    under = None if args.bare else args.gpucr
    plain_log, log = out / f"{name}.plain.log", out / f"{name}.log"
    image = images / name
    plain = start(command, plain_log, environment, None)
    if plain.wait(timeout=300) != 0:
        raise RuntimeError(f"the plain run failed, see {plain_log}")
    expected = meaningful(plain_log)
    process = start(command, log, environment, under)
    report = {}
    pid, times = process.pid, []
    dumps = [40] + ([120] if args.twice else [])
    for number, step in enumerate(dumps):
        wait_for_step(log, step, process)
        dump = subprocess.run(
            [args.gpucr, "dump", "--pid", str(pid), "-o", f"{image}-{number}", "--json"],
            capture_output=True, text=True, timeout=300)
        if dump.returncode != 0:
            subprocess.run(["pkill", "-9", "-P", str(pid)])
            subprocess.run(["kill", "-9", str(pid)])
            raise RuntimeError(f"dump: {dump.stderr.strip()}")
        report = json.loads(dump.stdout)
        times.append(report["stopped_ms"])
        process.wait(timeout=60)
        began = time.monotonic()
        process = subprocess.Popen(
            [args.gpucr, "restore", f"{image}-{number}", "--json",
             *(["--on-demand"] if args.on_demand else []), *(["--share"] if args.share else []),
             *(["--device-map", device_map(number)] if args.move else [])],
            stdin=subprocess.DEVNULL, stdout=open(out / f"{name}.restore.json", "w"),
            stderr=open(out / f"{name}.restore.err", "w"))
        wait_for_step_after(log, step, process, out / f"{name}.restore.err")
        report["restore_to_step_ms"] = (time.monotonic() - began) * 1000
    if process.wait(timeout=300) != 0:
        raise RuntimeError(f"restore: {(out / f'{name}.restore.err').read_text().strip()}"
                           f" exit {process.returncode}; log: {log.read_text()[-300:]}")
    if args.move and args.twice:
        used = [json.loads(subprocess.run([args.gpucr, "inspect", "--json", f"{image}-{number}"],
                                          capture_output=True, text=True, check=True).stdout)["devices"]
                for number in range(2)]
        if len(used[0]) == 1 and used[0][0]["uuid"] == used[1][0]["uuid"]:
            raise RuntimeError("the restored program is on the same device")
    restored = json.loads((out / f"{name}.restore.json").read_text())
    report["on_demand"] = restored.get("on_demand")
    report["shared"] = restored.get("shared")
    got = meaningful(log)
    if got != expected:
        first = next((i for i, (a, b) in enumerate(zip(got, expected)) if a != b), len(got))
        raise RuntimeError(f"different from line {first} on: {got[first:first + 1]} "
                           f"instead of {expected[first:first + 1]}")
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    return report


def verify_left_running(name, args, out, images):
    """Dumped while it runs on: it ends well, and so does the program that is restored from the image."""
    command, environment = PROGRAMS[name]
    plain_log, log = out / f"{name}.plain.log", out / f"{name}.log"
    if start(command, plain_log, environment, None).wait(timeout=300) != 0:
        raise RuntimeError(f"the plain run failed, see {plain_log}")
    expected = meaningful(plain_log)
    process = start(command, log, environment, args.gpucr)
    wait_for_step(log, 40, process)
    flags = ["--leave-running"]
    if args.shadow_memory is not None:
        flags += ["--shadow-memory", args.shadow_memory]
    dump = subprocess.run(
        [args.gpucr, "dump", "--pid", str(process.pid), "-o", str(images / name), "--json", *flags],
        capture_output=True, text=True, timeout=300)
    if dump.returncode != 0:
        process.kill()
        raise RuntimeError(f"dump: {dump.stderr.strip()}")
    report = json.loads(dump.stdout)
    if process.wait(timeout=300) != 0 or meaningful(log) != expected:
        raise RuntimeError(f"the program that ran on ended differently, see {log}")
    # What it printed since is taken back, as the image is older.
    files = json.loads(subprocess.run([args.gpucr, "inspect", "--json", str(images / name)],
                                      capture_output=True, text=True, check=True).stdout)["files"]
    [size] = [file["size"] for file in files if file["path"] == str(log.resolve())]
    os.truncate(log, size)
    began = time.monotonic()
    with open(out / f"{name}.restore.err", "w") as err:
        process = subprocess.Popen([args.gpucr, "restore", "--files", "rewind", str(images / name)],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err)
    wait_for_step_after(log, 40, process, out / f"{name}.restore.err")
    report["restore_to_step_ms"] = (time.monotonic() - began) * 1000
    if process.wait(timeout=300) != 0 or meaningful(log) != expected:
        raise RuntimeError(f"the restored program ended differently, see {log}")
    shutil.rmtree(images / name)
    return report


def wait_for_step_after(log, step, process, err):
    """Waits for the first line that the restored program prints."""
    size = log.stat().st_size
    deadline = time.monotonic() + 120
    while log.stat().st_size == size:
        if process.poll() is not None:
            if process.returncode == 0:
                return
            raise RuntimeError(f"restore: {err.read_text().strip()} exit {process.returncode}")
        if time.monotonic() > deadline:
            raise RuntimeError("the restored program did not print another step in 120 s")
        time.sleep(0.002)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--out", default="verify-logs")
    parser.add_argument("--bare", action="store_true", help="do not run under gpucr: driver + CRIU")
    parser.add_argument("--twice", action="store_true", help="dump the restored program again")
    parser.add_argument("--on-demand", action="store_true", help="restore on demand")
    parser.add_argument("--share", action="store_true", help="restore with memory that may be shared")
    parser.add_argument("--move", action="store_true",
                        help="restore on the second GPU; with --twice then on the first again")
    parser.add_argument("--leave-running", action="store_true",
                        help="dump once, let the program run on, then restore the image too")
    parser.add_argument("--shadow-memory", metavar="SIZE", help="with --leave-running")
    parser.add_argument("--only", nargs="*", choices=PROGRAMS)
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-verify-", dir="/dev/shm"))
    failed = 0
    print(f"{'program':<12} {'stopped':>9} {'to step':>9} {'bulk':>10} {'stored':>10}  outcome")
    for name in args.only or PROGRAMS:
        try:
            check = verify_left_running if args.leave_running else verify
            report = check(name, args, out, images)
            print(f"{name:<12} {report['stopped_ms']:>6.0f} ms "
                  f"{report.get('restore_to_step_ms', 0):>6.0f} ms "
                  f"{report['bulk_bytes'] / 2**20:>6.0f} MiB {report['stored_bytes'] / 2**20:>6.0f} MiB"
                  f"  identical", flush=True)
            phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
            print(f"  {phases}", flush=True)
            if report.get("host"):
                sizes = {key: value for key, value in report["host"].items() if key.endswith("_bytes")}
                said = ", ".join(f"{key[:-6]} {'-' if value is None else f'{value / 2**20:.1f} MiB'}"
                                 for key, value in sizes.items())
                print(f"  host memory: {report['host']['tracked']} processes tracked; {said}", flush=True)
            if report.get("shared"):
                print(f"  shared: {report['shared']}", flush=True)
            if report.get("deferral"):
                deferral = report["deferral"]
                print(f"  {report['protocol']}: {deferral['chunks']} chunks deferred,"
                      f" {deferral['blocked']} calls blocked for {deferral['blocked_ms']:.0f} ms,"
                      f" {deferral['misspeculated']} misspeculated", flush=True)
        except Exception as error:  # every failure is a row of the table
            failed += 1
            print(f"{name:<12} FAILED: {error}", flush=True)
    shutil.rmtree(images, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
