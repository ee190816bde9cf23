"""PyTorch programs of several processes on several GPUs, which are checkpointed as one group.

Rank 0 prints like the programs of `torch_programs.py`: `ready`, `step N VALUE`, `result HASH`, with a hash over the
final state of all ranks. The same arguments and the same number of GPUs give the same result. NCCL takes its
transports itself; no variable of its is set here.
"""

import argparse
import os
import socket
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

import torch_programs  # noqa: E402
from torch_programs import Result, mlp, say  # noqa: E402


def data(rank, step, width, batch=256):
    generator = torch.Generator(device="cuda").manual_seed(step * 64 + rank)
    x = torch.randn(batch, width, device="cuda", generator=generator)
    return x, x[:, :16].sin()


def ddp(rank, world, args):
    """Data parallel training: gradients are reduced in buckets while the backward pass runs."""
    model = nn.parallel.DistributedDataParallel(mlp(args.width, 6).cuda(), device_ids=[rank],
                                                bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x, y = data(rank, step, args.width)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
    yield list(model.parameters())


def fsdp(rank, world, args):
    """Parameters and optimizer state are split over the ranks and gathered for each layer."""
    from torch.distributed.fsdp import fully_shard
    model = mlp(args.width, 6).cuda()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(args.steps):
        x, y = data(rank, step, args.width)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()
    yield [p.to_local() for p in model.parameters()]


def tensor_parallel(rank, world, args):
    """Inference with each layer's columns, then rows, split over the ranks; one all-reduce in a layer."""
    part = 4 * args.width // world
    generator = torch.Generator(device="cuda").manual_seed(rank)
    layers = [(torch.randn(args.width, part, device="cuda", generator=generator) * args.width**-0.5,
               torch.randn(part, args.width, device="cuda", generator=generator) * args.width**-0.5)
              for _ in range(args.layers)]
    x = torch.ones(16, args.width, device="cuda")
    for step in range(args.steps):
        y = x
        for columns, rows in layers:
            z = torch.tanh(y @ columns) @ rows
            dist.all_reduce(z)
            y = torch.tanh(y + z)
        x = y + (step + 1) * 0.01
        yield y.abs().sum()
    yield [w for layer in layers for w in layer] + [x]


RANKED = {"ddp": ddp, "fsdp": fsdp, "tensor-parallel": tensor_parallel}


def rank_main(rank, world, port, args):
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world,
                            device_id=torch.device("cuda", rank))
    result = Result()
    for step, value in enumerate(RANKED[args.program](rank, world, args)):
        if step == args.steps:
            break
        if rank == 0:
            result.value(step, value)
            if step == 0:
                say("ready", os.getppid())
        else:
            float(value)
        time.sleep(args.delay)
    mine = torch.tensor([torch_programs.word_sums(tensor)[0] for tensor in value], device="cuda")
    everyone = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine)
    if rank == 0:
        result.state(everyone)
        result.print()
    dist.destroy_process_group()


def ranked(args):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = args.ranks or torch.cuda.device_count()
    mp.spawn(rank_main, args=(world, port, args), nprocs=world)


def shared_worker(inbox, outbox):
    """Changes each tensor that it is given where it lies."""
    while (message := inbox.get()) is not None:
        step, tensor = message
        tensor.mul_(1 + step * 2**-12).add_(step)
        torch.cuda.synchronize()
        del tensor, message
        outbox.put(step)


def shared(args):
    """CUDA tensors that torch.multiprocessing shares with another process, by handles of CUDA's IPC."""
    mp.set_start_method("spawn")
    inbox, outbox = mp.Queue(), mp.Queue()
    worker = mp.Process(target=shared_worker, args=(inbox, outbox))
    worker.start()
    result = Result()
    tensors = [torch.arange(2**20, device="cuda", dtype=torch.float32) * (i + 1) for i in range(4)]
    for step in range(args.steps):
        tensor = tensors[step % 4]
        inbox.put((step, tensor))
        assert outbox.get() == step
        result.value(step, tensor.double().sum())
        if step == 0:
            say("ready", os.getpid())
        time.sleep(args.delay)
    inbox.put(None)
    worker.join()
    result.state(tensors)
    result.print()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=[*RANKED, "shared"])
    parser.add_argument("--ranks", type=int, help="default: one for each GPU")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8, help="of tensor-parallel")
    parser.add_argument("--delay", type=float, default=0.01, help="seconds to sleep after each step")
    args = parser.parse_args()
    (shared if args.program == "shared" else ranked)(args)


if __name__ == "__main__":
    sys.exit(main())
