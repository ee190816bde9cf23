"""The programs of kinds.py: what each has besides CUDA, and how it is started."""

import ctypes
import fcntl
import os
import signal
import socket
import threading
import time

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

    def done(answer):
        if answer[0] != driver.CUresult.CUDA_SUCCESS:
            os._exit(1)
        return answer[1] if len(answer) > 1 else None

    def copy():
        done(driver.cuCtxSetCurrent(context))
        for n in range(1 << 30):
            there, back = n.to_bytes(4, "little"), bytearray(4)
            done(driver.cuMemcpyHtoD(memory, there, 4))
            done(driver.cuMemcpyDtoH(back, memory, 4))
            if back != there:
                os._exit(1)
            time.sleep(0.005)

    done(driver.cuInit(0))
    context = done(driver.cuDevicePrimaryCtxRetain(done(driver.cuDeviceGet(0))))
    done(driver.cuCtxSetCurrent(context))
    memory = done(driver.cuMemAlloc(4))
    threading.Thread(target=copy, daemon=True).start()


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


@kind("System V shared memory, in an IPC namespace of its own", start="unshare -i $PROGRAM > log 2>&1")
def sysv_alone():
    return sysv()


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


@kind("in a network namespace, with a TCP connection within", netns=True,
      start="unshare -n sh -c 'ip link set lo up; exec $PROGRAM > log 2>&1'")
def network_namespace():
    return pair_of_tcp()


@kind("under `gpucr run --new-pids`", start="$GPUCR run --new-pids --device soft -- $BARE > log 2>&1", child=True,
      new_pids=True)
def new_pids():
    pass


# A container as runtimes make it: a root directory to which pivot_root(2) goes, and mounts from outside.
CONTAINER = """bash -c '
    set -e
    mkdir -p root/dev root/old root/proc root/run root/tmp root/var/lib
    for name in bin lib lib64 sbin; do [ ! -L /$name ] || ln -s $(readlink /$name) root/$name; done
    mount --bind root root
    mount -t proc proc root/proc
    for dir in dev run tmp; do mount -t tmpfs tmpfs root/$dir; done
    for dir in $MOUNTS; do mkdir -p root$dir; mount --bind $dir root$dir; done
    mknod -m 666 root/dev/null c 1 3; mknod -m 666 root/dev/zero c 1 5; mknod -m 666 root/dev/urandom c 1 9
    ip link set lo up
    cd root; pivot_root . old; umount -l /old; cd $PWD
    exec < /dev/null > log 2>&1
    exec COMMAND'"""


@kind("in a container with a root directory of its own", child=True, root=True,
      start="unshare -mpf " + CONTAINER.replace("COMMAND", "$PROGRAM"))
def container():
    pass


@kind("in a container with a network, too, and a TCP connection within", child=True, root=True, netns=True,
      start="unshare -mpfniu " + CONTAINER.replace("COMMAND", "$PROGRAM"))
def container_with_network():
    return pair_of_tcp()


@kind("in a container, by a gpucr that is in it", child=True, inside=True,
      start="unshare -mpfniu " + CONTAINER.replace("COMMAND", "bash -c \"setsid -w $PROGRAM; sleep 100000\""))
def in_container():
    pass


CHANGED_ROOT = """unshare -mpf --mount-proc bash -c '
    mkdir base && mount -t tmpfs tmpfs base && mkdir base/upper base/work base/root
    mount -t overlay overlay -o lowerdir=/,upperdir=base/upper,workdir=base/work base/root
    for dir in /proc /dev "$PWD" "$BUILT" "$HERE"; do mkdir -p base/root$dir; mount --rbind "$dir" "base/root$dir"; done
    exec chroot base/root bash -c "cd $PWD; exec < /dev/null > log 2>&1; COMMAND"'"""


@kind("below a root directory by chroot", child=True, start=CHANGED_ROOT.replace("COMMAND", "exec $PROGRAM"))
def changed_root():
    pass


@kind("below a root directory by chroot, by a gpucr that is there", child=True, inside=True,
      start=CHANGED_ROOT.replace("COMMAND", "setsid -w $PROGRAM; sleep 100000"))
def in_changed_root():
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
