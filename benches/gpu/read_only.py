#!/usr/bin/env python3
"""Whether device memory can be shared between processes, read-only for some: what the driver and the device
say to reads and writes through a mapping with CU_MEM_ACCESS_FLAGS_PROT_READ. Needs nothing but the driver.
"""

import ctypes as c
import os
import subprocess
import sys

SIZE = 2 << 20
READ, READ_WRITE = 1, 3
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry put(.param .u64 to) {
    .reg .u64 %rd<2>; .reg .u32 %r<2>;
    ld.param.u64 %rd1, [to]; mov.u32 %r1, 77; st.global.u32 [%rd1], %r1; ret;
}
.visible .entry get(.param .u64 from, .param .u64 to) {
    .reg .u64 %rd<3>; .reg .u32 %r<2>;
    ld.param.u64 %rd1, [from]; ld.param.u64 %rd2, [to];
    ld.global.u32 %r1, [%rd1]; st.global.u32 [%rd2], %r1; ret;
}
"""
driver = c.CDLL("libcuda.so.1")


class Location(c.Structure):
    _fields_ = [("kind", c.c_int), ("id", c.c_int)]


class Properties(c.Structure):
    _fields_ = [("kind", c.c_int), ("handles", c.c_int), ("location", Location),
                ("windows", c.c_void_p), ("flags", c.c_ubyte * 8)]


class Access(c.Structure):
    _fields_ = [("location", Location), ("flags", c.c_int)]


def call(name, *arguments):
    """The code that the driver answers with."""
    return getattr(driver, name)(*arguments)


def start():
    context = c.c_void_p()
    for code in (call("cuInit", 0), call("cuDevicePrimaryCtxRetain", c.byref(context), 0),
                 call("cuCtxSetCurrent", context)):
        if code:
            raise RuntimeError(f"error {code}")


def access(address, flags):
    description = Access(Location(1, 0), flags)
    return call("cuMemSetAccess", address, c.c_size_t(SIZE), c.byref(description), c.c_size_t(1))


def mapped(handle, flags):
    address = c.c_uint64()
    codes = [call("cuMemAddressReserve", c.byref(address), c.c_size_t(SIZE), c.c_size_t(0),
                  c.c_uint64(0), c.c_uint64(0)),
             call("cuMemMap", address, c.c_size_t(SIZE), c.c_size_t(0), handle, c.c_uint64(0)),
             access(address, flags)]
    return address, codes


def word(address):
    value = c.c_uint32()
    return call("cuMemcpyDtoH_v2", c.byref(value), address, c.c_size_t(4)), value.value


def launch(name, *pointers):
    module, function = c.c_void_p(), c.c_void_p()
    call("cuModuleLoadData", c.byref(module), PTX)
    call("cuModuleGetFunction", c.byref(function), module, name)
    values = [c.c_uint64(pointer.value) for pointer in pointers]
    each = (c.c_void_p * len(values))(*[c.addressof(value) for value in values])
    return call("cuLaunchKernel", function, 1, 1, 1, 1, 1, 1, 0, None, each, None), call("cuCtxSynchronize")


def child(descriptor, flags, how):
    start()
    handle = c.c_uint64()
    print("  import", call("cuMemImportFromShareableHandle", c.byref(handle), c.c_void_p(descriptor), 1))
    address, codes = mapped(handle, flags)
    print("  reserve, map, access", codes)
    own = c.c_uint64()
    call("cuMemAlloc_v2", c.byref(own), c.c_size_t(4))
    print("  copied from", word(address), "read by a kernel", launch(b"get", address, own), word(own))
    if how == "kernel":
        print("  written by a kernel", launch(b"put", address))
    else:
        code = call("cuMemsetD32_v2", address, c.c_uint(5), c.c_size_t(1))
        print("  filled", (code, call("cuCtxSynchronize")))
    print("  copied from", word(address))
    if how == "fill":
        print("  made writable later", access(address, READ_WRITE))


def main():
    if len(sys.argv) > 1:
        return child(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    start()
    properties, handle = Properties(1, 1, Location(1, 0)), c.c_uint64()
    print("create", call("cuMemCreate", c.byref(handle), c.c_size_t(SIZE), c.byref(properties), c.c_uint64(0)))
    address, codes = mapped(handle, READ_WRITE)
    print("reserve, map, access", codes, "fill",
          call("cuMemsetD32_v2", address, c.c_uint(42), c.c_size_t(SIZE // 4)))
    descriptor = c.c_int()
    print("export", call("cuMemExportToShareableHandle", c.byref(descriptor), handle, 1, c.c_uint64(0)))
    os.set_inheritable(descriptor.value, True)
    for flags, name in [(READ, "read-only"), (READ_WRITE, "writable")]:
        for how in ("kernel", "fill"):
            print(f"{name} in another process, written by a {how}:", flush=True)
            subprocess.run([sys.executable, __file__, str(descriptor.value), str(flags), how], close_fds=False)
            print("  seen by the first process", word(address), flush=True)


if __name__ == "__main__":
    main()
