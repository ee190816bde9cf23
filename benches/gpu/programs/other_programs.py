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
    parser.add_argument("program", choices=["cupy", "jax"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--delay", type=float, default=0)
    args = parser.parse_args()
    program = {"cupy": run_cupy, "jax": run_jax}[args.program]
    for number, _ in enumerate(program(args)):
        if number == 0:
            say("ready", os.getpid())
        time.sleep(args.delay)


if __name__ == "__main__":
    sys.exit(main())
