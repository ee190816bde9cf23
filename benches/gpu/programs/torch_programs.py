"""PyTorch programs that are checkpointed on a real GPU.

Each prints `ready`, then `step N VALUE` lines, and at the end `result HASH`: a hash of all values
and of all bytes of the final state. The same arguments give the same result, always: algorithms are the
deterministic ones (but for `infer`, whose products give the same results without). `median ms` at the
end is the median time of a step. With `--times FILE` the time of each step's end (seconds of the
monotonic clock, 8 bytes) is appended to that file.
"""

import argparse
import hashlib
import os
import statistics
import struct
import sys
import time

# What cuBLAS needs to give the same results also where several streams use it. With it the thread of
# `infer` that launches needs three times as long (`docs/results/concurrent-copies.md`). `infer` uses one stream at a time, and its pace is measured.
if "infer" not in sys.argv:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
from torch import nn  # noqa: E402


def say(*words):
    print(*words, flush=True)


# Words that are added up at a time: 4 MiB, so that it can be done on a device that is full.
PIECE = 2**19
# What the sum so far is multiplied with before the next piece is added; odd.
STEP = 0x5851F42D4C957F2D


def word_sums(tensor):
    """A number that depends on every byte of a tensor, made on the device: each word of 8 bytes is multiplied with
    an odd number of its own and added up, modulo 2**64. So one changed word always changes it, whatever the
    order of the additions."""
    data = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    words = data[: len(data) // 8 * 8].view(torch.int64)
    odd = torch.arange(min(PIECE, len(words)), device=data.device, dtype=torch.int64) * 2 + 1
    total = torch.zeros((), device=data.device, dtype=torch.int64)
    for piece in words.split(PIECE):
        total = total * STEP + (piece * odd[: len(piece)]).sum()
    return int(total), bytes(data[len(words) * 8 :].tolist())


class Result:
    """Collects what a program computes."""

    def __init__(self):
        self.hash = hashlib.sha256()

    def value(self, step, tensor):
        number = float(tensor)
        self.hash.update(number.hex().encode())
        say("step", step, number.hex())

    def state(self, tensors):
        for tensor in tensors:
            self.hash.update(repr(word_sums(tensor)).encode())

    def print(self):
        say("result", self.hash.hexdigest())


def mlp(width, depth):
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 16))


def train(args, compile_model=False):
    """A network trained with AdamW."""
    width, batch = args.width, args.batch
    model = mlp(width, 6).cuda()
    step_model = torch.compile(model) if compile_model else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    result = Result()
    for step in range(args.steps):
        generator = torch.Generator(device="cuda").manual_seed(step)
        x = torch.randn(batch, width, device="cuda", generator=generator)
        y = x[:, :16].sin()
        loss = nn.functional.mse_loss(step_model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.value(step, loss)
        yield step
    result.state(model.parameters())
    for values in optimizer.state.values():
        result.state(v for v in values.values() if torch.is_tensor(v))
    result.print()


def captured(work):
    """Does the same by a CUDA graph. Its result is overwritten by the next call."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()

    def replay():
        graph.replay()
        return result

    return replay


class HostMemory:
    """So many GiB in the host's memory, of which each step looks at a page and writes it."""

    FIRST = 2**40

    def __init__(self, gib):
        self.words = torch.arange(int(gib * 2**27), dtype=torch.int64)

    def step(self, step):
        if len(self.words):
            # Pages far from each other: a prime number of them lies between.
            place = step * 7919 * 512 % len(self.words)
            found = int(self.words[place])
            if found % self.FIRST != place:
                raise RuntimeError(f"word {place} of the host's memory is {found}")
            self.words[place] = found + self.FIRST


def infer(args):
    """A stack of large layers that occupies `--gib` of memory, of which a step uses `--used-gib`. With `--graph`
    its launches are captured once and replayed, as servers of models do. It has `--host-gib` of host memory besides."""
    host = HostMemory(args.host_gib)
    width = 8192
    bytes_each = width * width * 2
    count = max(1, int(args.gib * 2**30 / bytes_each))
    used = max(1, int(args.used_gib * 2**30 / bytes_each)) if args.used_gib else count
    weights = []
    for i in range(count):
        generator = torch.Generator(device="cuda").manual_seed(i)
        w = torch.randn(width, width, device="cuda", dtype=torch.bfloat16, generator=generator)
        weights.append(w.mul_(width**-0.5))
    result = Result()
    x = torch.ones(16, width, device="cuda", dtype=torch.bfloat16)

    def layers():
        y = x
        for w in weights[:used]:
            y = torch.tanh(y @ w)
        return y

    replayed = captured(layers) if args.graph else layers
    for step in range(args.steps):
        y = replayed()
        result.value(step, y.float().abs().sum())
        x.copy_(y + (step + 1) * 0.01)
        host.step(step)
        yield step
    result.state(weights)
    result.print()


def graphs(args):
    """A training step captured in a CUDA graph and replayed."""
    model = mlp(512, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    x = torch.zeros(128, 512, device="cuda")
    y = torch.zeros(128, 16, device="cuda")

    def work():
        optimizer.zero_grad(set_to_none=False)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    replayed = captured(work)
    result = Result()
    for step in range(args.steps):
        generator = torch.Generator(device="cuda").manual_seed(step)
        x.copy_(torch.randn(128, 512, device="cuda", generator=generator))
        y.copy_(x[:, :16].sin())
        result.value(step, replayed())
        yield step
    result.state(model.parameters())
    result.print()


def convolution(args):
    """cuDNN convolutions and cuBLAS products."""
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(64),
        nn.Conv2d(64, 64, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(64 * 16 * 16, 10),
    ).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    result = Result()
    for step in range(args.steps):
        generator = torch.Generator(device="cuda").manual_seed(step)
        x = torch.randn(64, 3, 32, 32, device="cuda", generator=generator)
        y = (x.mean((1, 2, 3)) > 0).long()
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        result.value(step, loss)
        yield step
    result.state(net.parameters())
    result.print()


def growing(args):
    """Tensors that come and go, for allocators that grow segments."""
    result = Result()
    kept = []
    for step in range(args.steps):
        generator = torch.Generator(device="cuda").manual_seed(step)
        size = 1024 * (1 + (step * 7919) % 4096)
        kept.append(torch.randn(size, device="cuda", generator=generator))
        if len(kept) > 40:
            del kept[(step * 31) % 40]
        result.value(step, sum(t.sum() for t in kept))
        yield step
    result.state(kept)
    result.print()


def full(args):
    """A program that leaves less of the device free than another context needs."""
    result = Result()
    generator = torch.Generator(device="cuda").manual_seed(0)
    x = torch.randn(1024, 1024, device="cuda", generator=generator)
    (x @ x).sum().item()
    kept = []
    for size in (2**30, 2**26, 2**24):
        while torch.cuda.mem_get_info()[0] > size + 2**27:
            kept.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
    say("free MiB", torch.cuda.mem_get_info()[0] >> 20)
    for step in range(args.steps):
        kept[step % len(kept)][step] = step % 251
        x = torch.sin(x @ x / 32 + step)
        result.value(step, x.sum() + sum(int(k[step]) for k in kept[:8]))
        yield step
    result.state([x, *kept])
    result.print()


PROGRAMS = {
    "full": full,
    "train": train,
    "compile": lambda args: train(args, compile_model=True),
    "infer": infer,
    "graphs": graphs,
    "convolution": convolution,
    "growing": growing,
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--used-gib", type=float)
    parser.add_argument("--host-gib", type=float, default=0, help="of infer: host memory besides")
    parser.add_argument("--graph", action="store_true", help="of infer: replay a CUDA graph")
    parser.add_argument("--width", type=int, default=1024, help="of the trained network")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--delay", type=float, default=0, help="seconds to sleep after each step")
    parser.add_argument("--times", help="file for the times of the steps")
    args = parser.parse_args()
    if args.program != "infer":
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    times = []
    clock = open(args.times, "ab", buffering=0) if args.times else None
    last = time.perf_counter()
    for step in PROGRAMS[args.program](args):
        if step == 0:
            say("ready", os.getpid())
        if args.delay:
            time.sleep(args.delay)
        # Each step has read its loss back, so the device is done with it.
        if clock:
            clock.write(struct.pack("d", time.monotonic()))
        now = time.perf_counter()
        times.append(now - last)
        last = now
    say("median ms", f"{statistics.median(times[len(times) // 5:]) * 1000:.4f}")


if __name__ == "__main__":
    sys.exit(main())
