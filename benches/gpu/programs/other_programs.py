"""CuPy and JAX programs that are checkpointed on a real GPU; see torch_programs.py."""

import argparse
import hashlib
import os
import sys
import time


def say(*words):
    print(*words, flush=True)


def run_cupy(args):
    import cupy

    if args.asynchronous:
        cupy.cuda.set_allocator(cupy.cuda.MemoryAsyncPool().malloc)

    digest = hashlib.sha256()
    a = cupy.random.RandomState(1).standard_normal((1024, 1024), dtype=cupy.float32)
    kernel = cupy.ElementwiseKernel("T x, T y", "T z", "z = x * 0.999f + sinf(y) * 0.001f", "mix")
    x = cupy.eye(1024, dtype=cupy.float32)
    for step in range(args.steps):
        x = kernel(x, a)
        x = x @ (a / 40)
        x /= cupy.abs(x).max()
        value = float(x[step % 1024].sum())
        digest.update(value.hex().encode())
        say("step", step, value.hex())
        yield
    digest.update(cupy.asnumpy(x).tobytes())
    say("result", digest.hexdigest())


def run_hidden(args):
    """Memory that a kernel finds through a table of pointers, which lies in device memory itself."""
    import cupy

    kernel = cupy.RawKernel(r"""
extern "C" __global__ void chase(unsigned long long **table, unsigned long long *out, unsigned step) {
    unsigned long long *field = table[blockIdx.x];
    unsigned at = (step * 7919u + threadIdx.x * 104729u) & ((1u << 25) - 1);
    field[at] = field[at] * 6364136223846793005ull + step + threadIdx.x;
    out[blockIdx.x * blockDim.x + threadIdx.x] = field[at];
}""", "chase")
    digest = hashlib.sha256()
    # 256 MiB each.
    fields = [cupy.arange(i, i + (1 << 25), dtype=cupy.uint64) for i in range(int(args.gib * 4))]
    table = cupy.asarray([field.data.ptr for field in fields], dtype=cupy.uint64)
    out = cupy.zeros((len(fields), 64), dtype=cupy.uint64)
    for step in range(args.steps):
        kernel((len(fields),), (64,), (table, out, cupy.uint32(step)))
        value = int(cupy.asnumpy(out).sum(dtype="uint64"))
        digest.update(value.to_bytes(8, "little"))
        say("step", step, f"{value:016x}")
        yield
    for field in fields:
        digest.update(int(field.sum()).to_bytes(8, "little"))
    say("result", digest.hexdigest())


def run_jax(args):
    import jax
    import jax.numpy as jnp

    digest = hashlib.sha256()

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    @jax.jit
    def update(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return value, [p - 0.1 * g for p, g in zip(params, grads)]

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    params = [jax.random.normal(k, (512, 512)) * 0.05 for k in keys]
    for step in range(args.steps):
        x = jax.random.normal(jax.random.PRNGKey(step), (64, 512))
        value, params = update(params, x)
        value = float(value)
        digest.update(value.hex().encode())
        say("step", step, value.hex())
        yield
    for p in params:
        import numpy

        digest.update(numpy.asarray(p).tobytes())
    say("result", digest.hexdigest())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["cupy", "hidden", "jax"])
    parser.add_argument("--gib", type=float, default=8, help="of hidden memory")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0)
    parser.add_argument("--asynchronous", action="store_true", help="of CuPy: memory of cuMemAllocAsync")
    args = parser.parse_args()
    program = {"cupy": run_cupy, "hidden": run_hidden, "jax": run_jax}[args.program]
    for number, _ in enumerate(program(args)):
        if number == 0:
            say("ready", os.getpid())
        time.sleep(args.delay)


if __name__ == "__main__":
    sys.exit(main())
