#!/usr/bin/env python3
"""How far the access sets of launches can be trusted, on real programs.

Each program is stopped after each launch for a while (`gpucr trace --check`), and the chunks of device
memory that changed are compared with those that the launch was thought to write. A launch is exact if
they are the same, over-approximated if more were thought to change, wrong if another changed. Prints a
table; reports and logs are left in the output directory. Exit status 1 if a program cannot be checked.
"""

import argparse
import json
import pathlib
import subprocess
import sys

from verify import PROGRAMS, start, wait_for_step

NAMES = ["inference", "adamw", "triton", "graphs", "cudnn", "cupy", "jax"]


def check(name, args):
    command, environment = PROGRAMS[name]
    log = args.out / f"{name}.log"
    program = start(command, log, environment, args.gpucr)
    try:
        wait_for_step(log, 20, program)
        trace = [args.gpucr, "trace", "--check", "--json", "--pid", str(program.pid), "--for", args.time]
        done = subprocess.run(trace, capture_output=True, text=True, timeout=120)
        (args.out / f"{name}.json").write_text(done.stdout)
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        # It runs on, unharmed.
        last = log.read_text().splitlines()[-1].split()
        wait_for_step(log, int(last[1]) + 4 if last[0] == "step" else 30, program)
    finally:
        program.kill()
        program.wait()
    [process] = json.loads(done.stdout)["processes"]
    return process


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("access-sets"))
    parser.add_argument("--time", default="8s", help="how long each program is checked")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=NAMES)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    failed = False
    print(f"{'program':12} {'launches':>8} {'kernels':>7} {'exact':>8} {'over':>8} {'wrong':>8}"
          f"   {'chunks: expected':>16} {'changed':>9} {'missed':>7}")
    for name in args.only:
        try:
            process = check(name, args)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(f"{name:12} FAILED: {error}", flush=True)
            failed = True
            continue
        checked = process["checked"]
        share = lambda kind: f"{100 * checked[kind] / max(checked['launches'], 1):7.2f}%"
        chunks = checked["chunks"]
        print(f"{name:12} {checked['launches']:8} {len(process['kernels']):7} {share('exact')}"
              f" {share('too_much')} {share('wrong')}   {chunks['expected']:16}"
              f" {chunks['changed']:9} {chunks['missed']:7}", flush=True)
        for kernel in process["kernels"]:
            if kernel["checked"] and kernel["checked"]["wrong"]:
                print(f"  wrong {kernel['checked']['wrong']} of {kernel['checked']['launches']}:"
                      f" {kernel['name'][:150]} ({', '.join(kernel['derived'])})", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
