#!/usr/bin/env python3
"""Makes add.ptx, softmax.ptx and matmul_*.ptx, which are kept in the repository: Triton kernels for
sm_80, compiled without a GPU.

    pip install triton==3.9.0
    python softcuda/tests/triton/build.py
"""

import os
import pathlib

# Read when triton is loaded. Positions in this file would make the PTX differ with its path.
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def add(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(out + at, tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


@triton.jit
def softmax(x, out, columns, BLOCK: tl.constexpr):
    """One program for each row."""
    at = tl.arange(0, BLOCK)
    inside = at < columns
    row = tl.program_id(0) * columns
    values = tl.load(x + row + at, mask=inside, other=-float("inf"))
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row + at, powers / tl.sum(powers, axis=0), mask=inside)


@triton.jit
def matmul(a, b, c, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """C = A B in tiles of M by N, each by one program; A, B and C are stored by rows."""
    across = tl.cdiv(n, N)
    rows = tl.program_id(0) // across * M + tl.arange(0, M)
    columns = tl.program_id(0) % across * N + tl.arange(0, N)
    depth = tl.arange(0, K)
    sums = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, k, K):
        left = k - start
        left_tile = tl.load(
            a + rows[:, None] * k + start + depth[None, :],
            mask=(rows[:, None] < m) & (depth[None, :] < left),
            other=0.0,
        )
        right_tile = tl.load(
            b + (start + depth)[:, None] * n + columns[None, :],
            mask=(depth[:, None] < left) & (columns[None, :] < n),
            other=0.0,
        )
        sums = tl.dot(left_tile, right_tile, sums)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows[:, None] * n + columns[None, :], sums, mask=inside)


def build(name, kernel, types, constants):
    """`types` are those of the parameters; a pointer and a count divide by 16 where `:16` says so."""
    arguments = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(arguments, (text.split(":")[0] for text in types)))
    aligned = {
        (kernel.arg_names.index(argument),): [["tt.divisibility", 16]]
        for argument, text in zip(arguments, types)
        if text.endswith(":16")
    }
    source = ASTSource(
        kernel,
        {**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
        attrs=aligned,
    )
    compiled = triton.compile(source, GPUTarget("cuda", 80, 32), {"num_warps": 4, "num_stages": 3})
    text = compiled.asm["ptx"]
    header = f"// triton {triton.__version__}, shared memory: {compiled.metadata.shared} bytes\n"
    file = pathlib.Path(__file__).with_name(f"{name}.ptx")
    file.write_text(header + "\n".join(line.rstrip() for line in text.splitlines()) + "\n")
    print(f"{file}: {len(text)} bytes, shared memory: {compiled.metadata.shared} bytes")


build("add", add, ["*fp32:16", "*fp32:16", "*fp32:16", "i32"], {"BLOCK": 256})
build("softmax", softmax, ["*fp32:16", "*fp32:16", "i32"], {"BLOCK": 512})
tile = {"M": 64, "N": 64, "K": 32}
for name, element in [("f16", "fp16"), ("bf16", "bf16"), ("tf32", "fp32")]:
    types = [f"*{element}:16", f"*{element}:16", "*fp32:16", "i32", "i32:16", "i32:16"]
    build(f"matmul_{name}", matmul, types, tile)
