"""Kernels that are loaded as PTX text, by the driver API alone. For interruptible.py.

`long` launches one that takes about a minute and prints a hash of what it wrote; `loops` the same with few blocks, all of
which run at a time, whose threads loop; `again` the same with threads that keep something in memory of their own; `cost` prints the median time of each of several, in milliseconds.
"""

import argparse
import ctypes
import hashlib
import pathlib
import statistics
import sys
import time

HOME = pathlib.Path(__file__).resolve().parents[3]
PROGRAMS = HOME / "softcuda" / "tests" / "programs" / "programs.ptx"
# After so many launches it is settled where a kernel is interrupted.
WARM_UP = 9
ATTENTION = HOME / "rewrite" / "benches" / "attention.ptx"
LOOP = """.version 8.0
.target sm_80
.address_size 64
.visible .entry loop_%(turns)d(.param .u64 words)
{
    .reg .b32 %%r<4>;
    .reg .b64 %%rd<3>;
    .reg .pred %%p<1>;
    mov.u32 %%r0, %(turns)d;
    mov.u32 %%r1, %%tid.x;
NEXT:
    mad.lo.u32 %%r1, %%r1, 1664525, 1013904223;
    sub.u32 %%r0, %%r0, 1;
    setp.ne.u32 %%p0, %%r0, 0;
    @%%p0 bra NEXT;
    ld.param.u64 %%rd0, [words];
    st.global.u32 [%%rd0], %%r1;
    ret;
}
"""

WAVE = """.version 8.0
.target sm_80
.address_size 64
.visible .entry wave(.param .u64 words, .param .u32 turns)
{
    .reg .b32 %r<6>;
    .reg .b64 %rd<3>;
    .reg .pred %p<1>;
    ld.param.u32 %r0, [turns];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r1, %r2, %r3, %r4;
    mov.u32 %r5, %r1;
NEXT:
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    xor.b32 %r1, %r1, %r0;
    sub.u32 %r0, %r0, 1;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra NEXT;
    ld.param.u64 %rd0, [words];
    mul.wide.u32 %rd1, %r5, 4;
    add.u64 %rd0, %rd0, %rd1;
    st.global.u32 [%rd0], %r1;
    ret;
}
"""

# Reads what it does not write, so it may be done twice; local memory keeps its threads from being saved.
AGAIN = """.version 8.0
.target sm_80
.address_size 64
.visible .entry again(.param .u64 from, .param .u64 to, .param .u32 turns)
{
    .local .align 4 .b8 kept[16];
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    .reg .pred %p<1>;
    ld.param.u32 %r0, [turns];
    ld.param.u64 %rd0, [from];
    ld.param.u64 %rd1, [to];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    mul.wide.u32 %rd2, %r5, 4;
    add.u64 %rd3, %rd0, %rd2;
    add.u64 %rd4, %rd1, %rd2;
    ld.global.u32 %r1, [%rd3];
    and.b32 %r6, %r1, 3;
    mul.wide.u32 %rd5, %r6, 4;
    mov.u64 %rd6, kept;
    add.u64 %rd7, %rd6, %rd5;
    st.local.u32 [%rd7], %r1;
NEXT:
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    xor.b32 %r1, %r1, %r0;
    sub.u32 %r0, %r0, 1;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra NEXT;
    ld.local.u32 %r7, [%rd7];
    add.u32 %r1, %r1, %r7;
    st.global.u32 [%rd4], %r1;
    ret;
}
"""

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *args):
    result = getattr(cuda, name)(*args)
    if result != 0:
        sys.exit(f"error: {name} gives {result}")


def say(*words):
    print(*words, flush=True)


class Device:
    def __init__(self):
        call("cuInit", 0)
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        call("cuCtxSetCurrent", context)
        self.stream = ctypes.c_void_p()
        call("cuStreamCreate", ctypes.byref(self.stream), 1)

    def kernel(self, text, name):
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuModuleLoadData", ctypes.byref(module), text.encode() + b"\0")
        call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def memory(self, count, seed):
        """So many words of 32 bits, floats between 0 and 1."""
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4 * count))
        words, value = (ctypes.c_float * 4096)(), seed
        for at in range(len(words)):
            value = (value * 1664525 + 1013904223) & 0xFFFFFFFF
            words[at] = value / 2**32
        for at in range(0, count, len(words)):
            size = 4 * min(len(words), count - at)
            call("cuMemcpyHtoD_v2", ctypes.c_uint64(address.value + 4 * at), words, ctypes.c_size_t(size))
        return address

    def launch(self, function, grid, block, *params):
        pointers = (ctypes.c_void_p * len(params))(*(ctypes.addressof(param) for param in params))
        call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, self.stream, pointers, None)

    def synchronize(self):
        call("cuStreamSynchronize", self.stream)

    def hash(self, address, count):
        words = (ctypes.c_uint32 * count)()
        call("cuMemcpyDtoH_v2", words, address, ctypes.c_size_t(4 * count))
        return hashlib.sha256(words).hexdigest()


def long(device, args):
    bodies = args.bodies
    function = device.kernel(PROGRAMS.read_text(), "n_body")
    start, out = device.memory(4 * bodies, 1), device.memory(4 * bodies, 2)
    for step in range(args.launches):
        say(f"step {2 * step} launched")
        began = time.monotonic()
        device.launch(function, bodies // 128, 128, start, out, ctypes.c_uint32(bodies))
        device.synchronize()
        say("took", f"{time.monotonic() - began:.3f}")
        say(f"step {2 * step + 1}", device.hash(out, 4 * bodies))
        start, out = out, start
    # What comes behind it has all of it.
    device.launch(function, bodies // 128 // 64, 128, out, start, ctypes.c_uint32(bodies // 64))
    device.synchronize()
    say("result", device.hash(start, 4 * bodies))


def loops(device, args):
    count = 60 * 1024
    function, words = device.kernel(WAVE, "wave"), device.memory(count, 1)
    say("step 0 launched")
    began = time.monotonic()
    device.launch(function, 60, 1024, words, ctypes.c_uint32(args.turns))
    device.synchronize()
    say("took", f"{time.monotonic() - began:.3f}")
    say("result", device.hash(words, count))


def again(device, args):
    count = 60 * 1024
    function, words, out = device.kernel(AGAIN, "again"), device.memory(count, 1), device.memory(count, 2)
    say("step 0 launched")
    began = time.monotonic()
    device.launch(function, 60, 1024, words, out, ctypes.c_uint32(args.turns))
    device.synchronize()
    say("took", f"{time.monotonic() - began:.3f}")
    say("result", device.hash(out, count))


def cost(device, args):
    n, bodies, keys = ctypes.c_uint32(8192), ctypes.c_uint32(1 << 19), ctypes.c_uint32(1 << 14)
    a, b, c = (device.memory(n.value**2, seed) for seed in range(3))
    text = PROGRAMS.read_text()
    kernels = [
        ("loop_300", LOOP % {"turns": 300}, 1 << 26, 128, [a]),
        ("loop_3000", LOOP % {"turns": 3000}, 1 << 23, 128, [a]),
        ("wave", WAVE, 60, 1024, [a, ctypes.c_uint32(20_000_000)]),
        ("wave", WAVE, 1320, 1024, [a, ctypes.c_uint32(2_000_000)]),
        ("matmul", text, (n.value // 16) ** 2, 256, [a, b, c, n]),
        ("n_body", text, bodies.value // 128, 128, [a, b, bodies]),
        ("attention", ATTENTION.read_text(), (1 << 20) // 128, 128, [a, b, c, device.memory(1 << 25, 3), keys]),
    ]
    for name, text, grid, block, params in kernels:
        function = device.kernel(text, name)
        times = []
        for _ in range(args.rounds + WARM_UP):
            began = time.monotonic()
            device.launch(function, grid, block, *params)
            device.synchronize()
            times.append((time.monotonic() - began) * 1000)
        say("cost", f"{name}/{grid}", f"{statistics.median(times[WARM_UP:]):.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["long", "loops", "again", "cost"])
    parser.add_argument("--bodies", type=int, default=1 << 23)
    parser.add_argument("--launches", type=int, default=1, help="of the long kernel, one after the other")
    parser.add_argument("--turns", type=int, default=4_000_000_000, help="of the loops")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    {"long": long, "loops": loops, "again": again, "cost": cost}[args.what](Device(), args)


if __name__ == "__main__":
    main()
