#!/usr/bin/env python3
"""Makes blake3.ptx from blake3.cu. Needed only after a change to the source.

    build.py /path/to/libnvrtc.so.12

NVRTC 12.4 (the PyPI package nvidia-cuda-nvrtc-cu12==12.4.127 has it): it still writes PTX for
compute capability 7.0, in a version that drivers from 550 on accept. nvcc 13 begins at 7.5.
"""

import ctypes
import pathlib
import sys


def main() -> None:
    here = pathlib.Path(__file__).parent
    nvrtc = ctypes.CDLL(sys.argv[1])
    program = ctypes.c_void_p()
    source = (here / "blake3.cu").read_bytes()
    checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"blake3.cu", 0, None, None))
    options = [b"--gpu-architecture=compute_70", b"--std=c++17"]
    status = nvrtc.nvrtcCompileProgram(
        program, len(options), (ctypes.c_char_p * len(options))(*options)
    )
    log = text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if log.strip():
        print(log, file=sys.stderr)
    checked(status)
    ptx = text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    (here / "blake3.ptx").write_text(ptx)


def text(size, get, program) -> str:
    length = ctypes.c_size_t()
    checked(size(program, ctypes.byref(length)))
    buffer = ctypes.create_string_buffer(length.value)
    checked(get(program, buffer))
    return buffer.value.decode()


def checked(status: int) -> None:
    if status != 0:
        sys.exit(f"NVRTC error {status}")


if __name__ == "__main__":
    main()
