#!/usr/bin/env python3
"""Concurrent dumps of PyTorch programs on a real GPU: what the program notices of them.

The program appends the time of each step to a file, so its speed before, during and after a dump is
known. Images are written to memory: a tmpfs of `--room` GiB mounted for the purpose, in which nothing
is compressed.

  inference   `gpucr dump` (recopy): stopped time, rate of the copy, speed of the program during it; with
              `--host-gib 0 32 0 32` in turn without and with so much host memory besides
  store       two dumps with --leave-running into one store: what the second one had to copy
  training    `gpucr dump --leave-running` (cow) of AdamW: stopped time, time until full speed again

Each row is one dump. Each last image of a program is restored for some steps, and all that the program has printed
is compared with an undisturbed run (not with --no-restore). `reports.json` in the output directory has all reports.
Exit status 1 if anything differs or fails.
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
import time

import steps
from steps import rate, read_times

HERE = pathlib.Path(__file__).resolve().parent
TORCH = [sys.executable, str(HERE / "programs" / "torch_programs.py")]
STEPS = "1000000"
# So many steps a restored program does before it is compared.
MORE = 10
CHUNK = 2 << 20


class Program:
    """A program under `gpucr run`, with the times of its steps."""

    def __init__(self, args, command, folder):
        self.command = command
        self.times_file = folder / "times"
        self.log = folder / "log"
        with open(self.log, "w") as out:
            self.process = subprocess.Popen(
                [args.gpucr, "run", "--", *command, "--steps", STEPS, "--times", str(self.times_file)],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        self.pid = self.process.pid

    def times(self):
        return read_times(self.times_file)

    def wait_for_steps(self, count, limit=240):
        deadline = time.monotonic() + limit
        while len(self.times()) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {count} steps: {self.log.read_text()[-500:]}")
            time.sleep(0.05)

    def end(self):
        subprocess.run(["pkill", "-9", "-s", str(self.pid)])
        self.process.wait()


def dump(args, program, flags, out, name):
    """Dumps, and gives the report and the moments at which each phase began."""
    command = [args.gpucr, "dump", "--pid", str(program.pid), "--json", *flags]
    began = time.monotonic()
    with open(out / f"{name}.stderr", "w") as err:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=err, text=True,
                              env={**os.environ, "GPUCR_LOG": "gpucr_core=debug"})
    if done.returncode != 0:
        raise RuntimeError((out / f"{name}.stderr").read_text()[-600:])
    report = json.loads(done.stdout)
    report["command_s"] = time.monotonic() - began
    edges, at = {}, began
    for phase in report["phases"]:
        edges[phase["name"]] = (at, at + phase["ms"] / 1000)
        at += phase["ms"] / 1000
    return report, edges


def restored(args, program, image, folder):
    """Restores a program that has ended, lets it do some steps, and says whether all that it has printed is what an
    undisturbed run prints."""
    if args.no_restore:
        return None
    # What it printed or wrote after the dump, if it ran on, was not in the image.
    for file in json.loads(subprocess.check_output([args.gpucr, "inspect", "--json", str(image)]))["files"]:
        if file["path"] in (str(program.log), str(program.times_file)):
            os.truncate(file["path"], file["size"])
    lines = len(steps.of_log(program.log))
    subprocess.run([args.gpucr, "restore", "--detach", str(image)], stdout=subprocess.DEVNULL, check=True)
    deadline = time.monotonic() + 240
    while len(steps.of_log(program.log)) < lines + MORE:
        if time.monotonic() > deadline:
            raise RuntimeError("the restored program does not go on")
        time.sleep(0.05)
    subprocess.run(["pkill", "-9", "-s", str(program.pid)])
    return steps.Expected(program.command, folder / "plain").check([steps.of_log(program.log)])[0]


def judged(same):
    return {None: "not restored", True: "restored: identical", False: "restored: DIFFERENT"}[same]


def slices(path, name, precopy):
    """When each slice of this name of a timeline began and ended, and its bytes. `precopy` is when that phase
    began."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    zero = next(e["ts"] for e in events if e["name"] == "precopy")
    chosen = [e for e in events if e["name"] == name]
    starts = [precopy + (e["ts"] - zero) / 1e6 for e in chosen]
    return [(start, start + e["dur"] / 1e6, e["args"].get("bytes", 0)) for start, e in zip(starts, chosen)]


def describe(name, report, more):
    phases = " ".join(f"{p['name']}={p['ms']:.0f}" for p in report["phases"])
    validation = report["validation"] or {}
    gib = report["bulk_bytes"] / 2**30
    checked = validation.get("ms", 0)
    print(f"{name}: {report['protocol']}, {gib:.1f} GiB, stopped {report['stopped_ms']:.0f} ms, "
          f"total {report['total_ms']:.0f} ms; {more}")
    print(f"    {phases}")
    print(f"    precopied {report['precopied_chunks']} chunks, validation {validation}"
          + (f" = {report['bulk_bytes'] / checked / 1e9:.2f} TB/s" if checked else "")
          + f", shadowed {report['shadowed_bytes'] / 2**20:.0f} MiB", flush=True)
    if report.get("deferral"):
        deferral = report["deferral"]
        print(f"    deferred {deferral['chunks']} chunks, blocked {deferral['blocked']} calls for"
              f" {deferral['blocked_ms']:.0f} ms, misspeculated {deferral['misspeculated']}", flush=True)


def touch(folder, size):
    """Writes and removes so many bytes, so that a virtual machine's host has given it that memory."""
    files = [folder / f"touch-{i}" for i in range(os.cpu_count())]
    each = str(size // len(files) >> 20)
    writers = [subprocess.Popen(["dd", "if=/dev/zero", f"of={f}", "bs=1M", f"count={each}"],
                                stderr=subprocess.DEVNULL) for f in files]
    for writer in writers:
        writer.wait()
    for file in files:
        file.unlink()


def of(gib, host):
    """What a row is of."""
    return f"inference {gib:g} GiB" + (f" with {host:g} GiB of host memory" if host else "")


def inference(args, gib, host, name, images, out):
    command = TORCH + ["infer", "--gib", str(gib), "--host-gib", str(host)] + ["--graph"] * args.graph
    program = Program(args, command, images)
    try:
        program.wait_for_steps(100)
        alone = time.monotonic()
        time.sleep(3)
        alone = (alone, time.monotonic())
        if args.touch:
            touch(images, int((gib + host) * 2**30))
        timeline = out / f"{name}.timeline.json"
        flags = ["-o", str(images / "image"), "--compress", "none", "--timeline", str(timeline)]
        report, edges = dump(args, program, flags, out, name)
        times = program.times()
        precopy = edges.get("precopy", (0, 0))
        before = rate(times, alone)
        copies = slices(timeline, "ahead", precopy[0])
        hash_passes = slices(timeline, "hash pass", precopy[0])
        total = sum(size for _, _, size in copies)
        seconds = sum(end - start for start, end, _ in copies)
        meanwhile = rate(times, *[(start, end) for start, end, _ in copies])
        report["copies"] = {"slices": copies, "speed": meanwhile / before, "gb_s": total / seconds / 1e9}
        report["hash_passes"] = hash_passes
        report["times"] = [t for t in times if precopy[0] - 4 < t < precopy[1] + 1]
        report["edges"] = edges
        print(f"{name}: {len(copies)} copies of {total / 2**30:.1f} GiB in {seconds:.3f} s = "
              f"{total / seconds / 1e9:.1f} GB/s, program at {meanwhile / before * 100:.1f} % meanwhile; "
              f"{len(hash_passes)} hash passes in {sum(end - start for start, end, _ in hash_passes):.3f} s", flush=True)
        during = rate(times, precopy)
        seconds = precopy[1] - precopy[0]
        copied = report["precopied_chunks"] * CHUNK
        report["copy_gb_s"] = copied / seconds / 1e9 if seconds else 0
        report["speed_during_copy"] = during / before
        describe(of(gib, host), report,
                 f"pre-copy {copied / 2**30:.1f} GiB in {seconds:.2f} s = {report['copy_gb_s']:.1f} "
                 f"GB/s, program at {during / before * 100:.1f} % of {before:.1f} steps/s")
        program.process.wait()
        report["same"] = restored(args, program, images / "image", images)
        print(f"{name}: {judged(report['same'])}", flush=True)
        return report
    finally:
        program.end()
        shutil.rmtree(images / "image", ignore_errors=True)


def store(args, gib, images, out):
    program = Program(args, TORCH + ["infer", "--gib", str(gib)], images)
    try:
        program.wait_for_steps(100)
        time.sleep(1)
        for number in (1, 2):
            flags = ["--store", str(images / "store"), "--name", f"image-{number}",
                     "--leave-running", "--compress", "none"]
            report, _ = dump(args, program, flags, out, f"store-{number}")
            chunks = report["precopied_chunks"] + report["validation"]["recopied"]
            share = chunks * CHUNK / report["bulk_bytes"]
            report["crossed_share"] = share
            describe(f"store, dump {number}", report,
                     f"{share * 100:.2f} % of the bulk crossed PCIe, "
                     f"{report['new_bytes'] / 2**20:.0f} MiB new")
            time.sleep(1)
        program.end()
        report["same"] = restored(args, program, images / "store" / "images" / "image-2", images)
        print(f"store: {judged(report['same'])}", flush=True)
        return report
    finally:
        program.end()
        shutil.rmtree(images / "store", ignore_errors=True)


def training(args, images, out):
    command = TORCH + ["train", "--width", str(args.width)]
    program = Program(args, command, images)
    try:
        program.wait_for_steps(100)
        time.sleep(1)
        flags = ["-o", str(images / "image"), "--leave-running", "--compress", "none"]
        if args.shadow_memory is not None:
            flags += ["--shadow-memory", args.shadow_memory]
        report, edges = dump(args, program, flags, out, "training")
        time.sleep(3)
        times = program.times()
        gate = edges["gate"][0]
        start = edges["precopy"][0]
        steps = [(b, b - a) for a, b in zip(times, times[1:])]
        usual = statistics.median(d for t, d in steps if start - 3 < t < start - 0.2)
        resumed = gate + report["stopped_ms"] / 1000
        after = [(t, d) for t, d in steps if t > resumed]
        # From here on every five steps in a row take, in the median, as long as before.
        slow = [i for i in range(len(after) - 4)
                if statistics.median(d for _, d in after[i : i + 5]) > usual * 1.05]
        back = after[slow[-1] + 4][0] - resumed if slow else 0.0
        longest = max(d for _, d in steps[-len(after) - 2:])
        report["full_speed_after_s"] = back
        describe("training", report,
                 f"step {usual * 1000:.1f} ms, longest {longest * 1000:.0f} ms, "
                 f"full speed {back:.2f} s after it resumed")
        program.end()
        report["same"] = restored(args, program, images / "image", images)
        print(f"training: {judged(report['same'])}", flush=True)
        return report
    finally:
        program.end()
        shutil.rmtree(images / "image", ignore_errors=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpucr", default="gpucr")
    parser.add_argument("--gib", type=float, nargs="*", default=[24, 96])
    parser.add_argument("--host-gib", type=float, nargs="*", default=[0],
                        help="of inference: host memory besides; each of --gib is measured with each of these")
    parser.add_argument("--store-gib", type=float, default=24)
    parser.add_argument("--shadow-memory", metavar="SIZE", help="for the training; default: all room")
    parser.add_argument("--width", type=int, default=13056, help="of the trained network: 16 GiB")
    parser.add_argument("--only", nargs="*", choices=["inference", "store", "training"],
                        default=["inference", "store", "training"])
    parser.add_argument("--graph", action="store_true",
                        help="of inference: the program replays a CUDA graph")
    parser.add_argument("--room", type=int, default=112, help="GiB of the tmpfs")
    parser.add_argument("--huge", choices=["never", "always"], default="never",
                        help="whether that tmpfs uses huge pages")
    parser.add_argument("--touch", action="store_true",
                        help="first write and remove a file of the image's size: in a virtual machine, "
                        "memory that was never touched has to be made by the host")
    parser.add_argument("--no-restore", action="store_true", help="only dump")
    parser.add_argument("--out", default="concurrent-logs")
    args = parser.parse_args()
    args.gpucr = str(pathlib.Path(shutil.which(args.gpucr) or args.gpucr).resolve())
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    images = pathlib.Path(tempfile.mkdtemp(prefix="gpucr-concurrent-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={args.room}g,mode=700,huge={args.huge}",
                    "gpucr-bench", str(images)], check=True)
    work = []
    pairs = [(gib, host) for gib in args.gib for host in args.host_gib] if "inference" in args.only else []
    for number, (gib, host) in enumerate(pairs, 1):
        name = f"inference-{gib:g}-{host:g}-{number}"
        work.append((name, lambda folder, gib=gib, host=host, name=name: inference(args, gib, host, name, folder, out)))
    if "store" in args.only:
        work.append(("store", lambda folder: store(args, args.store_gib, folder, out)))
    if "training" in args.only:
        work.append(("training", lambda folder: training(args, folder, out)))
    reports, failed = {}, 0
    try:
        for name, measure in work:
            folder = images / name
            folder.mkdir()
            try:
                reports[name] = measure(folder)
                failed += reports[name]["same"] is False
            except Exception as error:  # every failure is a row
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        subprocess.run(["umount", "-l", str(images)])
        images.rmdir()
    for gib, host in sorted(set(pairs)):
        rounds = [report for name, report in reports.items() if name.startswith(f"inference-{gib:g}-{host:g}-")]
        if len(rounds) > 1:
            print(f"{of(gib, host)}, medians of {len(rounds)}: copies "
                  f"{statistics.median(report['copies']['gb_s'] for report in rounds):.1f} GB/s, program at "
                  f"{statistics.median(report['copies']['speed'] for report in rounds) * 100:.1f} % meanwhile, stopped "
                  f"{statistics.median(report['stopped_ms'] for report in rounds):.0f} ms", flush=True)
    (out / "reports.json").write_text(json.dumps(reports, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
