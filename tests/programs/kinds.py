#!/usr/bin/env python3
"""Prints a table of kinds of programs: whether each can be dumped and restored, with which options, or why not.

    tests/programs/kinds.py [--only WORD] [--gpucr FILE]

As root, after `cargo build --workspace`. Each program uses CUDA on the software driver, counts in device memory, and
has something that a checkpoint may find hard. It is dumped; where that is refused, with the options that `gpucr dump
--dry-run` names. Then it is restored, in the same way, and has to count on where it was. docs/results/kinds.md has the
table.
"""

import argparse
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

from kinds_of_programs import KINDS, count

LIMIT = 300  # seconds for anything: a busy machine is no failure


class NotSo(Exception):
    """Something did not come out as it should."""


def wait_for(what, so):
    end = time.monotonic() + LIMIT
    while True:
        found = so()
        if found:
            return found
        if time.monotonic() > end:
            raise NotSo(f"not in time: {what}")
        time.sleep(0.02)


def counts(log):
    text = open(log, errors="replace").read() if os.path.exists(log) else ""
    return [int(n) for n in re.findall(r"^count (\d+)\r?$", text, re.M)]


def descendants(pid):
    found = [pid]
    for one in found:
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                found += map(int, open(f"/proc/{one}/task/{task}/children").read().split())
        except OSError:
            pass
    return found


def program_of(started):
    """The process that counts, among those that were started."""
    for pid in descendants(started):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\0")
        except OSError:
            continue
        if os.path.realpath(__file__) in words[1:2] and "--run" in words:
            return pid
    return None


def gpucr(args, options, first=None):
    """Runs gpucr, in the container of this first process if there is one."""
    enter = ["nsenter", "-t", str(first), *"-m -p -n -i -u -r -w".split()] if first else []
    done = subprocess.run([*enter, args.gpucr, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL,
                          timeout=LIMIT)
    return done.returncode, done.stdout, done.stderr


def first_line(text):
    for line in text.splitlines():
        line = line.strip(" ×│\u2502")
        if line:
            return line
    return "without a word"


def why(text):
    """What an error says: CRIU's own reason where it has one, and the remedy."""
    reason = re.search(r"Error \(criu/[^)]*\): (.*)", text)
    reason = reason[1] if reason else first_line(text)
    remedy = re.search(r"help: ((?:(?!CRIU's whole log).)*)", text)
    reason += f" — {remedy[1].strip()}" if remedy and remedy[1].strip() else ""
    # Numbers that are others each time.
    reason = re.sub(r"(\b(?:process|Task|inode|pgrp) | -(?:-pid|CONT|-target) )\d+", r"\1N", reason)
    return re.sub(r"@0?x?[0-9a-f]+", "@ADDRESS", reason)


def named_options(args, pid, first):
    """The options that a dry run names."""
    _, out, _ = gpucr(args, ["dump", "--pid", str(pid), "--dry-run", "--json"], first)
    remedies = [blocker.get("remedy") or "" for blocker in json.loads(out)["blockers"]]
    found = [re.findall(r"--[a-z][a-z-]+", remedy) for remedy in remedies]
    return [options[0] for options in found if options]


def pid_within(pid):
    """The pid that a process has in its own pid namespace."""
    return int(re.search(r"^NSpid:.*\t(\d+)$", open(f"/proc/{pid}/status").read(), re.M)[1])


def container_options(args):
    """What a restore of a container is told: its root directory, and to mount there what is outside at the same paths."""
    _, out, _ = gpucr(args, ["inspect", "--json", "image"])
    places = json.loads(out)["container"]
    return ["--root", "root", *(word for place in places for word in ("--mount", f"{place}={place}"))]


def new_network():
    """A process in a network namespace of its own, whose loopback device is up."""
    line = "ip link set lo up && echo && exec sleep 100000"
    keeper = subprocess.Popen(["unshare", "-n", "sh", "-c", line], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    if not keeper.stdout.readline():
        raise NotSo("no network namespace")
    return keeper


def one(args, name, outside):
    setup, how = KINDS[name]
    if how.get("needs"):
        try:
            __import__(how["needs"])
        except ImportError:
            return "not tried", f"{how['needs']} is not installed", ""
    here = os.getcwd()
    bare = f"{sys.executable} {os.path.realpath(__file__)} --run {shlex.quote(setup.__name__)}"
    built, scripts = (os.path.dirname(os.path.realpath(file)) for file in (args.gpucr, __file__))
    python = {prefix for prefix in (sys.prefix, sys.base_prefix) if not prefix.startswith("/usr")}
    environment = dict(os.environ, GPUCR=args.gpucr, PWD=here, BARE=bare,
                       PROGRAM=f"{args.gpucr} run --device soft -- {bare}", BUILT=built, HERE=scripts,
                       MOUNTS=" ".join(["/usr", here, built, scripts, *python]), **outside)
    start = how.get("start", "$PROGRAM > log 2>&1")
    for variable in ("PROGRAM", "BARE", "GPUCR", "PWD"):
        start = start.replace(f"${variable}", environment[variable])
    nested = how.get("child") or "script" in start
    shell = subprocess.Popen(["bash", "-c", start if nested else f"exec {start}"], env=environment, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    ours = []
    try:
        def begun():
            if shell.poll() is not None:
                text = open("log", errors="replace").read() if os.path.exists("log") else ""
                raise NotSo(f"it did not start: {first_line(text[-500:])}")
            return len(counts("log")) > 1
        wait_for("it counts", begun)
        program = wait_for("its pid", lambda: program_of(shell.pid))
        pid = program if nested or not start.startswith("bash") else shell.pid
        if after := how.get("after"):
            after(pid) if after.__code__.co_argcount else after()
        log = how.get("log", "log")
        options = []
        # The first process of the container, for a gpucr that is in there.
        inside = next(p for p in descendants(shell.pid) if pid_within(p) == 1) if how.get("inside") else None
        pid = pid_within(pid) if inside else pid
        status, _, said = gpucr(args, ["dump", "--pid", str(pid), "-o", "image"], inside)
        if status and (options := named_options(args, pid, inside)):
            first = said
            status, _, said = gpucr(args, ["dump", "--pid", str(pid), "-o", "image", *options], inside)
            if status:
                said = first
        if status:
            if how.get("after") is None or name != "suspended by SIGSTOP":
                had = len(counts(log))
                wait_for("it runs on after the refusal", lambda: len(counts(log)) > had)
            return "refused", why(said), ""
        # Its pid is free when its parent has waited for it.
        wait_for("it is ended", lambda: shell.poll() is not None or not os.path.exists(f"/proc/{program}"))
        wait_for("its pid is free", lambda: not os.path.exists(f"/proc/{program}"))
        had = counts(log)[-1]
        restore = ["restore", "-d", "--json", *(["--new-pids"] if how.get("new_pids") else [])]
        restore += container_options(args) if how.get("root") else []
        if how.get("netns"):
            keeper = new_network()
            ours.append(keeper.pid)
            restore += ["--netns", f"/proc/{keeper.pid}/ns/net"]
        out = ["--stdout", "out"] if "tee log" in start and nested else []
        if how.get("terminal"):
            # It goes on at the terminal at which it is restored.
            line = shlex.join([args.gpucr, "restore", "image"])
            shell2 = subprocess.Popen(["script", "-qefc", line, "log2"], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, start_new_session=True)
            ours.append(shell2.pid)
            log = "log2"
        else:
            status, said, error = gpucr(args, [*restore, *out, "image"], inside)
            if status:
                return "not restored", why(error), " ".join(options)
            # A pid within a container is another one here, and ends with the container.
            ours += [] if inside else [json.loads(said)["pid"]]
            log = "out" if out else log
        now = wait_for("it counts on", lambda: [n for n in counts(log) if n > had])
        # What the old terminal had not shown yet went with it.
        if now[0] > had + (10 if how.get("terminal") else 1):
            raise NotSo(f"it counted from {had} to {now[0]}")
        wait_for("it goes on", lambda: counts(log)[-1] > now[0] + 10)
        of_restore = [*(["--stdout"] if out else []), *(["--new-pids"] if how.get("new_pids") else []),
                      *(["--root --mount"] if how.get("root") else []), *(["--netns"] if how.get("netns") else [])]
        return "works", "", " ".join([*options, *(["(restore)"] if of_restore else []), *of_restore])
    except NotSo as error:
        return "FAILED", str(error), ""
    finally:
        # The pid of what has ended may be somebody else's by now.
        for root in [*ours, *([shell.pid] if shell.poll() is None else [])]:
            for pid in reversed(descendants(root)):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        shell.wait()
        os.chdir(here)


def accept(server, accepted):
    try:
        while True:
            accepted.append(server.accept())
    except OSError:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="only kinds with this word in their names")
    parser.add_argument("--gpucr", default=os.path.join(os.path.dirname(os.path.realpath(__file__)),
                                                        "../../target/debug/gpucr"))
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        kept = next(setup for setup, _ in KINDS.values() if setup.__name__ == args.run)()
        count(sys.stdout)
        return kept
    args.gpucr = os.path.realpath(args.gpucr)
    os.closerange(3, 1024)
    print("| program | what came of it | with | why |\n|---|---|---|---|")
    failed = 0
    for name in KINDS:
        if args.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="gpucr-kinds-") as folder:
            os.chmod(folder, 0o777)
            server = socket.create_server(("127.0.0.1", 0))
            stream, dgram = (os.path.join(folder, n) for n in ("stream", "dgram"))
            streams = socket.socket(socket.AF_UNIX)
            streams.bind(stream)
            streams.listen()
            accepted = []
            threading.Thread(target=lambda: accept(streams, accepted), daemon=True).start()
            datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            datagrams.bind(dgram)
            outside = {"PORT": str(server.getsockname()[1]), "STREAM": stream, "DGRAM": dgram}
            here = os.getcwd()
            os.chdir(folder)
            result, reason, options = one(args, name, outside)
            os.chdir(here)
            for s in (server, streams, datagrams):
                s.close()
        failed += result == "FAILED"
        options = f"`{options}`" if options else ""
        reason = reason.replace("|", "\\|").replace(folder, "DIR")
        print(f"| {name.replace('|', chr(92) + '|')} | {result} | {options} | {reason} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
