#!/usr/bin/env python3
"""How often gpucr says rightly, of the launches of a Python test suite, that doing them twice is the same as doing them
once. The suite runs under gpucr on the software driver, which makes each launch a second time and notes whether that
changes device memory (SOFTCUDA_TWICE); `gpucr trace` watches meanwhile. If a launch was said to be idempotent and is not,
the exit status is 1. Needs root, gpucr built, and what a script of softcuda/tests/users has made: no GPU.

    softcuda/tests/users/numba.sh /tmp/softcuda-users numba.cuda.tests.cudadrv.test_detect
    benches/host/idempotence.py --users /tmp/softcuda-users --within numba -- -p numba_option --timeout 300 \\
        --benchmark-disable --pyargs numba.cuda.tests.cudapy

    softcuda/tests/users/cupy.sh /tmp/softcuda-users core_tests/test_scan.py
    SOFTCUDA_DRIVER=610 SOFTCUDA_DEVICE="softcuda,12.1,2,8G" CUPY_COMPILE_WITH_PTX=1 CUPY_ACCELERATORS= \\
        benches/host/idempotence.py --users /tmp/softcuda-users --within cupy/cupy-14.2.0/tests/cupy_tests -- \\
        --timeout 120 -m "not slow and not multi_gpu" core_tests
"""

import argparse
import collections
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

# A plugin of pytest: the first test begins when the trace records, and the process ends when the trace has ended.
HOLD = """
import ctypes, os, pathlib, time
folder = pathlib.Path(os.environ["HOLD"])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def pytest_sessionstart(session):
    # Before that the program has nothing that could be traced.
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
    (folder / "begun").touch()
    wait_for("recorded")

def pytest_sessionfinish(session, exitstatus):
    (folder / "over").touch()
    wait_for("traced")
"""
LIMIT = 3600


def wait_for(holds, what, process):
    begun = time.monotonic()
    while not holds():
        if process.poll() is not None:
            sys.exit(f"{what}: it ended with {process.returncode}")
        if time.monotonic() - begun > LIMIT:
            sys.exit(f"{what}: not after {LIMIT} s")
        time.sleep(0.02)


def judged(kernels, notes):
    """For each kernel: how it was judged, and what the driver has found. Launches of both kinds cannot be told apart, so of
    a kernel that has both as many may have changed something as are not said to be idempotent."""
    truth = collections.defaultdict(collections.Counter)
    for line in notes.read_text().splitlines() if notes.exists() else []:
        kernel, what = line.rsplit(" ", 1)
        truth[kernel][what] += 1
    launches = yes = missed = 0
    wrong = []
    for row in kernels:
        found = truth[row["name"]]
        of = {True: 0, False: 0}
        for one in row["repeated"]:
            of[one["idempotent"] is True] += one["launches"]
        all_of = of[True] + of[False]
        seen = found["same"] + found["differs"]
        may_differ = of[False] + max(0, seen - all_of) if of[False] else 0
        if of[True] and found["differs"] > may_differ:
            wrong.append((row["name"], dict(of), dict(found)))
        launches += all_of
        yes += of[True]
        missed += max(0, all_of * found["same"] // max(seen, 1) - of[True])
    return launches, yes, wrong, missed, sum(found["unknown"] for found in truth.values())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--users", required=True, type=pathlib.Path, help="the folder that the script was given")
    parser.add_argument("--within", default=".", help="where in that folder the tests run")
    parser.add_argument("--out", type=pathlib.Path, help="keep there what trace, driver and tests say")
    parser.add_argument("tests", nargs="+", help="arguments of pytest, after `--`")
    args = parser.parse_args()
    gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    python = args.users / "venv/bin/python"
    nvidia = subprocess.run([python, "-c", "import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])"],
                            check=True, capture_output=True, text=True).stdout.strip()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-idempotence-"))
    (folder / "hold.py").write_text(HOLD)
    within = args.users / args.within
    notes, log, trace_log = folder / "notes", folder / "tests.log", folder / "trace.log"
    environment = {**os.environ, "HOLD": str(folder), "PYTHONPATH": f"{folder}:{within}", "SOFTCUDA_TWICE": str(notes),
                   "LD_LIBRARY_PATH": f"{nvidia}/lib", "CUDA_HOME": nvidia, "CUDA_PATH": nvidia,
                   "PATH": f"{nvidia}/bin:{os.environ['PATH']}"}
    command = [gpucr, "run", "--device", "soft", "--", str(python), "-W", "ignore", "-m", "pytest", "-q", "--tb", "no",
               "-p", "no:cacheprovider", "-p", "hold", *args.tests]
    with open(log, "w") as out:
        tests = subprocess.Popen(command, cwd=within, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                 start_new_session=True)
    try:
        wait_for((folder / "begun").exists, f"the tests, see {log}", tests)
        with open(trace_log, "w") as err:
            trace = subprocess.Popen([gpucr, "trace", "--json", "--no-observe", "--for", f"{LIMIT}s", "--pid", str(tests.pid)],
                                     stdout=subprocess.PIPE, stderr=err, text=True,
                                     env={**os.environ, "GPUCR_LOG": "gpucr_core=debug", "NO_COLOR": "1"})
        wait_for(lambda: "recording" in trace_log.read_text(), f"the trace, see {trace_log}", trace)
        (folder / "recorded").touch()
        wait_for((folder / "over").exists, f"the tests, see {log}", tests)
        trace.send_signal(signal.SIGINT)
        said, _ = trace.communicate(timeout=300)
        if trace.returncode:
            sys.exit(f"the trace failed: {trace_log.read_text()[-2000:]}")
        (folder / "traced").touch()
        tests.wait(timeout=300)
    finally:
        if tests.poll() is None:
            os.killpg(tests.pid, signal.SIGKILL)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "trace.json").write_text(said)
        for path in (log, notes):
            shutil.copy(path, args.out)
    kernels = [kernel for process in json.loads(said)["processes"] for kernel in process["kernels"]]
    launches, yes, wrong, missed, unknown = judged(kernels, notes)
    last = log.read_text().strip().splitlines()[-1]
    print(re.sub(r"\x1b\[[0-9;]*m", "", last).strip("= "))
    print(f"{len(kernels)} kernels, {launches} launches; idempotent {yes}, of these wrong {len(wrong)}, missed {missed}; "
          f"of {unknown} launches the driver finds out nothing")
    for one in wrong:
        print("WRONG", *one)
    shutil.rmtree(folder)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
