#!/usr/bin/env python3
"""How fast memory goes over in a migration, by ssh alone and over 1, 4 and 8 streams with TLS, and how fast iperf3 finds
the same link (if it is there). Both hosts are namespaces of this machine (hosts.py), so both sides share its processors.
Needs root, CRIU, openssh-server, and gpucr built: no GPU. Every program compares all of its memory at its end."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile

from hosts import ADDRESSES, Hosts, call
from migrate import Program, migrate


def iperf(hosts, streams):
    """GB/s over so many connections, or None."""
    if not shutil.which("iperf3"):
        return None
    server = ["ip", "netns", "exec", hosts.names[1], "iperf3", "--server", "--one-off", "--forceflush"]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as listening:
        # It says so when it listens.
        while "listening" not in (line := listening.stdout.readline()):
            if not line:
                return None
        client = ["iperf3", "--client", ADDRESSES[1], "--time", "5", "--parallel", str(streams), "--json"]
        done = subprocess.run(hosts.here(*client), capture_output=True, text=True, check=False)
        listening.communicate()
    if done.returncode:
        return None
    return json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9


def gpucr(options, hosts, folder, streams):
    """GB/s of memory from the begin of the copy to the stop of the program, and for how long it stood still."""
    os.makedirs(folder)
    program = Program(options, hosts, folder, 0, 0.05)
    more = ["--streams", str(streams)] if streams else []
    report = migrate(options, hosts, program, *more, store=f"/var/lib/gpucr/{streams}")
    program.finish()
    phases = {phase["name"]: phase["ms"] for phase in report["dump"]["phases"]}
    return report["sent_bytes"] / phases["precopy"] / 1e6, report["downtime_ms"] / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpucr", default="target/release/gpucr", type=os.path.abspath)
    parser.add_argument("--mib", type=int, default=1024, help="device memory of the program, which it does not write")
    parser.add_argument("--rate", help="of the link, as tc takes it; none for what the machine does")
    parser.add_argument("--compress", default="none", help="as of gpucr migrate")
    parser.add_argument("--dir", default="/dev/shm", help="for logs")
    parser.add_argument("--streams", type=int, nargs="+", default=[0, 1, 4, 8], help="0 for ssh alone")
    options = parser.parse_args()
    options.migrate = []
    print(
        f"{os.uname().release}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; link"
        f" {options.rate or 'without a limit'}; {options.mib} MiB of device memory"
    )
    folder = tempfile.mkdtemp(dir=options.dir)
    try:
        with Hosts(options.gpucr, options.rate) as hosts:
            # Without netem nothing is to be split into packets that are lost one by one.
            hosts.send_long_segments()
            print("streams     gpucr, GB/s  stood still, s     iperf3, GB/s           share")
            for streams in options.streams:
                rate, still = gpucr(options, hosts, os.path.join(folder, str(streams)), streams)
                wire = iperf(hosts, streams or 1)
                name = str(streams or "ssh")
                shown = f"{wire:16.3f} {100 * rate / wire:13.0f} %" if wire else f"{'-':>16}"
                print(f"{name:7} {rate:15.3f} {still:15.2f} {shown}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
