#!/usr/bin/env python3
"""Prints a table of kinds of programs: whether each can be dumped and restored, with which options, or why not.

    tests/programs/kinds.py [--only WORD] [--gpucr FILE]

As root, after `cargo build --workspace`. Each program uses CUDA on the software driver, counts in device memory, and has
something that a checkpoint may find hard. It is dumped; where that is refused, with the options that `gpucr dump
--dry-run` names. Then it is restored, in the same way, and has to count on where it was. docs/results/kinds.md has the table.
"""

import argparse
import ctypes
import fcntl
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

LIMIT = 300  # seconds for anything: a busy machine is no failure

KINDS = {}


def kind(name, **how):
    """Registers what a program of this kind sets up before it counts; what it returns is kept."""
    def register(setup):
        KINDS[name] = (setup, how)
        return setup
    return register


@kind("alone, in a session of its own")
def plain():
    pass


@kind("child of a shell that waits for it", start='bash -c "$PROGRAM > log 2>&1; true"')
def job():
    pass


@kind("tree: a child with CUDA of its own, too")
def tree():
    if os.fork() == 0:
        count(open("child.log", "a"))


@kind("Python with a thread")
def thread():
    threading.Thread(target=lambda: time.sleep(1e6), daemon=True).start()


@kind("cuda-bindings (cuda.bindings.driver)", needs="cuda.bindings.driver")
def bindings():
    from cuda.bindings import driver
    return driver.cuInit(0)


@kind("TCP server without a connection")
def listener():
    return socket.create_server(("127.0.0.1", 0))


def pair_of_tcp():
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    return server, client, server.accept()


@kind("TCP connection, both ends inside")
def tcp_inside():
    return pair_of_tcp()


@kind("TCP connection to a process outside", outside=True)
def tcp_outside():
    return socket.create_connection(("127.0.0.1", int(os.environ["PORT"])))


@kind("UDP socket")
def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("127.0.0.1", 0))
    return s


@kind("Unix socket that listens")
def unix_listener():
    s = socket.socket(socket.AF_UNIX)
    s.bind("socket")
    s.listen()
    return s


@kind("socketpair")
def socketpair():
    return socket.socketpair()


@kind("Unix stream to a process outside", outside=True)
def unix_outside():
    s = socket.socket(socket.AF_UNIX)
    s.connect(os.environ["STREAM"])
    return s


@kind("Unix datagrams to a process outside, as syslog", outside=True)
def dgram_outside():
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.connect(os.environ["DGRAM"])
    return s


@kind("inotify")
def inotify():
    libc = ctypes.CDLL(None)
    fd = libc.inotify_init()
    libc.inotify_add_watch(fd, b".", 2)
    return fd


@kind("epoll, eventfd, timerfd, signalfd")
def polled():
    import select
    libc = ctypes.CDLL(None)
    fds = [libc.eventfd(0, 0), libc.timerfd_create(1, 0)]
    mask = (ctypes.c_ulong * 16)(1 << (signal.SIGUSR2 - 1))
    fds.append(libc.signalfd(-1, mask, 0))
    poll = select.epoll()
    for fd in fds:
        poll.register(fd)
    return fds, poll


@kind("interval timer with a handler")
def timer():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)


@kind("file in /dev/shm, mapped")
def dev_shm():
    import mmap
    name = f"/dev/shm/gpucr-kinds-{os.getpid()}"
    f = open(name, "w+b")
    f.truncate(1 << 20)
    return f, mmap.mmap(f.fileno(), 0)


@kind("System V shared memory")
def sysv():
    libc = ctypes.CDLL(None)
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(0, 1 << 16, 0o1600)
    address = libc.shmat(segment, None, 0)
    libc.shmctl(segment, 0, None)  # it goes with its last user
    return address


@kind("memfd")
def memfd():
    fd = os.memfd_create("kinds")
    os.write(fd, b"text" * 1000)
    return fd


@kind("deleted file that is open")
def deleted():
    f = open("gone", "w+b")
    f.write(b"text" * 1000)
    f.flush()
    os.remove("gone")
    return f


@kind("deleted name of a file with another one")
def hard_link():
    f = open("first", "w+b")
    os.link("first", "second")
    os.remove("first")
    return f


@kind("FIFO")
def fifo():
    os.mkfifo("fifo")
    return os.open("fifo", os.O_RDWR)


@kind("flock on a file")
def flock():
    f = open("locked", "w")
    fcntl.flock(f, fcntl.LOCK_EX)
    return f


@kind("POSIX lock on a file")
def posix_lock():
    f = open("locked", "w")
    fcntl.lockf(f, fcntl.LOCK_EX)
    return f


@kind("io_uring")
def io_uring():
    parameters = (ctypes.c_char * 120)()
    fd = ctypes.CDLL(None).syscall(425, 8, parameters)
    if fd < 0:
        raise OSError("no io_uring here")
    return fd


@kind("perf event")
def perf():
    attributes = (ctypes.c_uint32 * 32)(1, 128)  # software event, its size
    fd = ctypes.CDLL(None).syscall(298, attributes, 0, -1, -1, 0)
    if fd < 0:
        raise OSError("no perf events here")
    return fd


TERMINAL = "script -qefc 'exec $PROGRAM' log"


@kind("on a terminal", start=TERMINAL, terminal=True)
def terminal():
    pass


@kind("with /dev/tty open, output to a file", start="script -qefc 'exec $PROGRAM > log 2>&1 < /dev/null' /dev/null")
def dev_tty():
    return open("/dev/tty", "w")


@kind("output by `> log`", start="$PROGRAM > log 2>&1")
def log_written():
    pass


@kind("output by `>> log`", start="$PROGRAM >> log 2>&1")
def log_appended():
    pass


@kind("log that was rotated (renamed)", after=lambda: os.rename("log", "log.1"), log="log.1")
def log_renamed():
    pass


@kind("log to which its shell writes \"Killed\"", start="bash -c '$PROGRAM; echo Killed' >> log 2>&1", child=True)
def log_shared():
    pass


@kind("output by `| tee log`, tee outside", start="bash -c '$PROGRAM | tee log > /dev/null'", child=True)
def tee_outside():
    pass


@kind("output by `| tee log`, tee inside", start="bash -c '$PROGRAM | tee log > /dev/null; true'")
def tee_inside():
    pass


@kind("of another user", start="env HOME=$PWD setpriv --reuid=65534 --regid=65534 --clear-groups $PROGRAM > log 2>&1")
def user():
    pass


@kind("in a user namespace", start="unshare -U -r setsid -w $PROGRAM > log 2>&1", child=True)
def user_namespace():
    pass


@kind("in a pid and mount namespace", start="unshare -mpf --mount-proc bash -c 'exec $PROGRAM > log 2>&1 < /dev/null'",
      child=True, new_pids=True)
def namespaces():
    pass


@kind("in a network namespace", start="unshare -n $PROGRAM > log 2>&1")
def network_namespace():
    pass


@kind("under `gpucr run --new-pids`", start="$GPUCR run --new-pids --device soft -- $BARE > log 2>&1", child=True,
      new_pids=True)
def new_pids():
    pass


@kind("in a container with a root directory of its own", child=True, start="""unshare -mpf --mount-proc bash -c '
    mkdir base && mount -t tmpfs tmpfs base && mkdir base/upper base/work base/root
    mount -t overlay overlay -o lowerdir=/,upperdir=base/upper,workdir=base/work base/root
    for dir in /proc /dev "$PWD" "$BUILT" "$HERE"; do mkdir -p base/root$dir; mount --rbind "$dir" "base/root$dir"; done
    exec chroot base/root bash -c "cd $PWD; exec $PROGRAM > log 2>&1 < /dev/null"'""")
def container():
    pass


@kind("suspended by SIGSTOP", after=lambda pid: os.kill(pid, signal.SIGSTOP))
def stopped():
    pass


def count(out):
    """Counts in device memory, for ever."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    value = ctypes.c_uint32()
    calls = [
        cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), 0),
        cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), cuda.cuMemAlloc_v2(ctypes.byref(memory), 1 << 20),
        cuda.cuMemsetD32_v2(memory, 0, 1 << 18),
    ]
    assert not any(calls), calls
    print("pid", os.getpid(), file=out, flush=True)
    while True:
        assert not cuda.cuMemcpyDtoH_v2(ctypes.byref(value), memory, 4)
        value.value += 1
        assert not cuda.cuMemcpyHtoD_v2(memory, ctypes.byref(value), 4)
        print("count", value.value, file=out, flush=True)
        until = time.monotonic() + 0.02
        while time.monotonic() < until:
            time.sleep(0.005)


# From here on: the side that dumps and restores.


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


def gpucr(args, options):
    done = subprocess.run([args.gpucr, *options], capture_output=True, text=True, stdin=subprocess.DEVNULL,
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
    return reason + (f" — {remedy[1].strip()}" if remedy and remedy[1].strip() else "")


def named_options(args, pid):
    """The options that a dry run names."""
    _, out, _ = gpucr(args, ["dump", "--pid", str(pid), "--dry-run", "--json"])
    remedies = [blocker.get("remedy") or "" for blocker in json.loads(out)["blockers"]]
    found = [re.findall(r"--[a-z][a-z-]+", remedy) for remedy in remedies]
    return [options[0] for options in found if options]


def one(args, name, outside):
    setup, how = KINDS[name]
    if how.get("needs"):
        try:
            __import__(how["needs"])
        except ImportError:
            return "not tried", f"{how['needs']} is not installed", ""
    here = os.getcwd()
    bare = f"{sys.executable} {os.path.realpath(__file__)} --run {shlex.quote(setup.__name__)}"
    environment = dict(os.environ, GPUCR=args.gpucr, PWD=here, BARE=bare, PROGRAM=f"{args.gpucr} run --device soft -- {bare}",
                       BUILT=os.path.dirname(args.gpucr), HERE=os.path.dirname(os.path.realpath(__file__)), **outside)
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
        status, _, said = gpucr(args, ["dump", "--pid", str(pid), "-o", "image"])
        if status and (options := named_options(args, pid)):
            first = said
            status, _, said = gpucr(args, ["dump", "--pid", str(pid), "-o", "image", *options])
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
        out = ["--stdout", "out"] if "tee log" in start and nested else []
        if how.get("terminal"):
            # It goes on at the terminal at which it is restored.
            line = shlex.join([args.gpucr, "restore", "image"])
            shell2 = subprocess.Popen(["script", "-qefc", line, "log2"], stdin=subprocess.DEVNULL,
                                      stdout=subprocess.DEVNULL, start_new_session=True)
            ours.append(shell2.pid)
            log = "log2"
        else:
            status, said, error = gpucr(args, [*restore, *out, "image"])
            if status:
                return "not restored", why(error), " ".join(options)
            ours.append(json.loads(said)["pid"])
            log = "out" if out else log
        now = wait_for("it counts on", lambda: [n for n in counts(log) if n > had])
        # What the old terminal had not shown yet went with it.
        if now[0] > had + (10 if how.get("terminal") else 1):
            raise NotSo(f"it counted from {had} to {now[0]}")
        return "works", "", " ".join([*options, *(["(restore) --stdout"] if out else []),
                                      *(["(restore) --new-pids"] if how.get("new_pids") else [])])
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
        print(f"| {name} | {result} | {options} | {reason} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
