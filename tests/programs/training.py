"""A loop as of a training, for the test of the Python package: a kernel changes the weights in each step."""

import ctypes
import os
import signal
import sys
import threading

import gpucr

PTX = b"""
.version 8.0
.target sm_70
.address_size 64
.visible .entry step(.param .u64 words, .param .u32 number)
{
    .reg .b64 %rd<4>;
    .reg .b32 %r<5>;
    ld.param.u64 %rd1, [words];
    ld.param.u32 %r1, [number];
    mov.u32 %r2, %tid.x;
    mul.wide.u32 %rd2, %r2, 4;
    add.u64 %rd3, %rd1, %rd2;
    ld.global.u32 %r3, [%rd3];
    mad.lo.u32 %r4, %r3, 1664525, %r1;
    st.global.u32 [%rd3], %r4;
    ret;
}
"""
WORDS = 256
STEPS = 12

cuda = ctypes.CDLL("libcuda.so.1")


def must(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code != 0:
        sys.exit(f"{name}: {code}")


def said(text):
    print(text, flush=True)


class Model:
    def __init__(self):
        context, module = ctypes.c_void_p(), ctypes.c_void_p()
        self.kernel, self.words = ctypes.c_void_p(), ctypes.c_uint64()
        must("cuInit", 0)
        must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        must("cuCtxSetCurrent", context)
        must("cuModuleLoadData", ctypes.byref(module), PTX)
        must("cuModuleGetFunction", ctypes.byref(self.kernel), module, b"step")
        must("cuMemAlloc_v2", ctypes.byref(self.words), ctypes.c_size_t(4 * WORDS))
        must("cuMemsetD32_v2", self.words, 1, ctypes.c_size_t(WORDS))

    def train(self, step):
        number = ctypes.c_uint32(step)
        pointers = [ctypes.addressof(self.words), ctypes.addressof(number)]
        arguments = (ctypes.c_void_p * 2)(*pointers)
        shape = [1, 1, 1, WORDS, 1, 1, 0]
        must("cuLaunchKernel", self.kernel, *shape, None, arguments, None)
        host = (ctypes.c_uint32 * WORDS)()
        must("cuMemcpyDtoH_v2", host, self.words, ctypes.c_size_t(4 * WORDS))
        return sum(host) & 0xFFFFFFFF


gpucr.before_dump(lambda: said("before 1"))


@gpucr.before_dump
def before():
    said("before 2")


@gpucr.after_dump
def after_dump():
    said("after dump")


@gpucr.after_restore
def after_restore():
    said("after restore 1")


gpucr.after_restore(lambda: said("after restore 2"))


def main():
    try:
        gpucr.checkpoint()
    except gpucr.Error as error:
        said(f"early {error.code.name}")
    model = Model()
    # Another thread that is at work all the time.
    over = threading.Event()
    other = threading.Thread(target=lambda: [None for _ in iter(lambda: over.wait(0.001), True)])
    other.start()
    lives = 1
    for step in range(STEPS):
        said(f"step {step} {model.train(step):08x}")
        if step == 5:
            outcome = gpucr.checkpoint("epoch")
            said(outcome.name)
            lives += outcome == gpucr.RESTORED
        if step == 8 and lives == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    for name in ["epoch", "../epoch", "a\0b"]:
        try:
            gpucr.checkpoint(name)
        except gpucr.Error as error:
            said(f"{error.code.name}")

    @gpucr.before_dump
    def failing():
        raise ValueError("of a callback")

    try:
        gpucr.checkpoint()
    except ValueError as error:
        said(f"raised {error}")
    over.set()
    other.join()
    said("end")


main()
