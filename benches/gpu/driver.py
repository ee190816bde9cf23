#!/usr/bin/env python3
"""What gpucr's shim relies on in the driver's library, to be tried with each new driver: that the library finds
its own functions in itself; that the shim's table has every function that it exports and that cuGetProcAddress
gives out; that the entries of its table of symbols can be changed. Needs a GPU only for the last line.

    driver.py [LIBRARY]
"""

import ctypes as c
import os
import re
import subprocess
import sys

TABLE = os.path.join(os.path.dirname(__file__), "../../intercept/driver.table")
VERSIONS = [2000, 3020, *range(4000, 13000, 10), *range(13000, 13999, 10)]
SYMBOL_ENTRY = 1
libc = c.CDLL(None)


class Info(c.Structure):
    _fields_ = [("file", c.c_char_p), ("base", c.c_void_p), ("name", c.c_char_p), ("address", c.c_void_p)]


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1"
    driver = c.CDLL(path)
    address = lambda name: c.cast(getattr(driver, name), c.c_void_p).value
    info, entry = Info(), c.c_void_p()
    libc.dladdr1(c.c_void_p(address("cuInit")), c.byref(info), c.byref(entry), SYMBOL_ENTRY)
    file = os.path.realpath(info.file.decode())
    version = c.c_int()
    driver.cuDriverGetVersion(c.byref(version))
    print(f"{file}, CUDA {version.value // 1000}.{version.value % 1000 // 10}")

    dynamic = subprocess.run(["readelf", "-dW", file], capture_output=True, text=True, check=True).stdout
    print("finds its own functions in itself:", "yes" if "SYMBOLIC" in dynamic else "NO")

    symbols = subprocess.run(["readelf", "--dyn-syms", "-W", file], capture_output=True, text=True, check=True)
    words = [line.split() for line in symbols.stdout.splitlines()]
    names = {w[7].split("@")[0] for w in words if len(w) > 7 and w[3] == "FUNC" and w[6] != "UND"}
    names = {name for name in names if re.match("cu[A-Z]|cudbg", name)}
    table = {line.split()[0] for line in open(TABLE) if line.strip() and not line.startswith("#")}
    print(f"exports {len(names)} functions, not in the table:", " ".join(sorted(names - table)) or "none")

    exported = {address(name): name for name in names}
    several = len(names) - len(exported)
    print("functions under several names:", several or "none")
    strange, found = {}, c.c_void_p()
    for name in sorted({re.sub(r"(_v\d+)?(_pt[ds]s?z?)?$", "", name) for name in names | table}):
        for version in VERSIONS:
            for flags in (1, 2):
                code = driver.cuGetProcAddress_v2(name.encode(), c.byref(found), version, c.c_uint64(flags), None)
                if code == 0 and found.value and found.value not in exported:
                    strange.setdefault((name, found.value), version)
    given = [f"{name} (from {version} on)" for (name, _), version in strange.items()]
    print("given out by cuGetProcAddress, and not exported:", ", ".join(given) or "none")

    # As the shim does: the entry of one function is made to name another, and the driver goes on.
    start, end = address("cuProfilerStart"), address("cuProfilerStop")
    libc.dladdr1(c.c_void_p(start), c.byref(info), c.byref(entry), SYMBOL_ENTRY)
    value = c.c_uint64.from_address(entry.value + 8)
    page = c.c_void_p(entry.value & ~4095)
    if libc.mprotect(page, c.c_size_t(8192), 3) != 0:
        sys.exit("its table of symbols cannot be changed")
    value.value += end - start
    libc.mprotect(page, c.c_size_t(8192), 1)
    libc.dlsym.restype = c.c_void_p
    changed = libc.dlsym(c.c_void_p(driver._handle), b"cuProfilerStart") == end
    context, memory = c.c_void_p(), c.c_uint64()
    codes = [driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(c.byref(context), 0),
             driver.cuCtxSetCurrent(context), driver.cuMemAlloc_v2(c.byref(memory), c.c_size_t(1 << 20)),
             driver.cuMemsetD32_v2(memory, 7, c.c_size_t(1 << 18)), driver.cuCtxSynchronize()]
    print("its table of symbols can be changed:", "yes" if changed else "NO", "- the driver then says", codes)


if __name__ == "__main__":
    main()
