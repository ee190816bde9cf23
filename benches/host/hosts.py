"""Two hosts on one machine: network namespaces that a veth joins, with a limit of its rate on either end. The second
one has pids, mounts and a /var/lib/gpucr of its own, and an SSH server. Needs root, iproute2 and openssh-server; the
kernel needs veth, and the tbf and netem queues for a limit and for loss."""

import os
import shutil
import signal
import subprocess
import tempfile
import time

ADDRESSES = ("10.213.0.1", "10.213.0.2")

# What the second host runs as its first process.
INIT = """
set -e
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /var/lib/gpucr
ip link set lo up
exec "$@"
"""


def call(*command):
    subprocess.run(command, check=True)


class Hosts:
    """Use it with `with`: everything of it is gone afterwards, also what still runs on the second host."""

    def __init__(self, gpucr, rate=None, netem=None):
        """`rate` as tc takes it, such as 1gbit; `netem` as tc takes it, such as "delay 10ms loss 0.1%"."""
        self.names = [f"gpucr-{os.getpid()}-{side}" for side in "ab"]
        self.gpucr = os.path.abspath(gpucr)
        self.rate, self.netem = rate, netem
        self.folder = tempfile.mkdtemp(prefix="gpucr-hosts-")
        self.init = None

    def __enter__(self):
        try:
            self.join()
            self.serve()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.init and self.init.poll() is None:
            # The first process of its pid namespace: all others end with it.
            for child in self.children():
                os.kill(child, signal.SIGKILL)
            self.init.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def children(self):
        with open(f"/proc/{self.init.pid}/task/{self.init.pid}/children", encoding="ascii") as text:
            return [int(pid) for pid in text.read().split()]

    def join(self):
        first, second = self.names
        call("ip", "netns", "add", first)
        call("ip", "netns", "add", second)
        call("ip", "link", "add", "veth", "netns", first, "type", "veth", "peer", "name", "veth", "netns", second)
        for name, address in zip(self.names, ADDRESSES):
            call("ip", "-n", name, "link", "set", "lo", "up")
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "veth")
            call("ip", "-n", name, "link", "set", "veth", "up")
            # Else segments of 64 KiB pass for packets, which netem loses and delays as one.
            call("ip", "-n", name, "link", "set", "dev", "veth", "gso_max_segs", "1")
            at = ["tc", "-n", name, "qdisc", "add", "dev", "veth"]
            if self.rate:
                call(*at, "root", "handle", "1:", "tbf", "rate", self.rate, "burst", "1mb", "latency", "50ms")
            if self.netem:
                where = ["parent", "1:1"] if self.rate else ["root"]
                call(*at, *where, "netem", *self.netem.split(), "limit", "100000")

    def serve(self):
        """An SSH server with a configuration and keys of its own."""
        file = lambda name: os.path.join(self.folder, name)
        for key in ("host", "user"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file(key))
        with open(file("sshd_config"), "w", encoding="utf-8") as text:
            text.write(
                f"ListenAddress {ADDRESSES[1]}\nHostKey {file('host')}\nAuthorizedKeysFile {file('user.pub')}\n"
                "StrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
                f"PidFile none\nSetEnv PATH={os.path.dirname(self.gpucr)}:{os.environ['PATH']}\n"
            )
        with open(file("host.pub"), encoding="utf-8") as key:
            host = key.read()
        with open(file("known_hosts"), "w", encoding="utf-8") as text:
            text.write(f"{ADDRESSES[1]} {host}")
        with open(file("ssh_config"), "w", encoding="utf-8") as text:
            text.write(f"IdentityFile {file('user')}\nIdentitiesOnly yes\nUserKnownHostsFile {file('known_hosts')}\n")
        os.makedirs("/run/sshd", exist_ok=True)
        os.makedirs("/var/lib/gpucr", exist_ok=True)
        command = ["unshare", "--mount", "--pid", "--fork", "sh", "-c", INIT, "sh"]
        command += [shutil.which("sshd") or "/usr/sbin/sshd", "-D", "-e", "-f", file("sshd_config")]
        with open(file("sshd.log"), "w", encoding="utf-8") as log:
            self.init = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{self.names[1]}", *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        for _ in range(200):
            if self.ssh("true").returncode == 0:
                return
            if self.init.poll() is not None:
                break
            time.sleep(0.05)
        with open(file("sshd.log"), encoding="utf-8") as log:
            raise RuntimeError(f"the SSH server does not answer:\n{log.read()}")

    def send_long_segments(self):
        """Segments of 64 KiB go over the link as they are, as with a network card that splits them."""
        for name in self.names:
            call("ip", "-n", name, "link", "set", "dev", "veth", "gso_max_segs", "65535")

    def here(self, *command):
        """A command, for the first host."""
        # Not `ip netns exec`, whose mount namespace CRIU does not take.
        return ["nsenter", f"--net=/run/netns/{self.names[0]}", *command]

    @property
    def connect(self):
        """The command that connects, without the host."""
        return f"ssh -F {self.folder}/ssh_config"

    @property
    def there(self):
        """The second host, as ssh takes it."""
        return f"root@{ADDRESSES[1]}"

    def ssh(self, command, **options):
        """Runs a command of a shell on the second host."""
        options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **options}
        return subprocess.run(self.here(*self.connect.split(), self.there, command), check=False, **options)

    def sent(self, side=0):
        """Bytes that a host has sent by now, with all that the protocols below add."""
        path = "/sys/class/net/veth/statistics/tx_bytes"
        command = ["ip", "netns", "exec", self.names[side], "cat", path]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
