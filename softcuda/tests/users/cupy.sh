#!/bin/sh
# Runs test files of CuPy on softcuda, unchanged: the wheel of PyPI with the tests of the source package.
#
#   softcuda/tests/users/cupy.sh [FOLDER [FILE...]]
#
# FILE is a test file below tests/cupy_tests; all of the list below if none is named. See begin.sh for FOLDER and what
# is needed.
#
# The driver is 610: the wheel's own kernels (CUB, Thrust) are PTX 9.2, of CUDA 13.2. The device is one of compute
# capability 12.1: those kernels and cuRAND's are there as PTX for the newest architecture only. CuPy does not check
# whether CUB's kernels were launched: on an older device its reductions silently give zeros. CuPy's own kernels are
# compiled to PTX (CUPY_COMPILE_WITH_PTX). CUPY_ACCELERATORS is empty, so that reductions do not compile CUB for each
# type, which takes longer than all else; the tests of it choose it themselves.
#
# What is known not to run is named below, with the reason; anything else that fails ends the script with exit status
# 1. Each test has 120 s.
. "$(dirname "$0")/begin.sh"
source=https://files.pythonhosted.org/packages/dc/10/059a92d40b161ea24607c9e41a75098812ca7021f2b565524f87beba15c9
sum=cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c

[ $# -gt 0 ] || set -- \
    core_tests/test_raw.py \
    core_tests/test_elementwise.py \
    core_tests/test_userkernel.py \
    core_tests/test_core.py \
    core_tests/test_scan.py \
    core_tests/test_ndarray_get.py \
    core_tests/test_ndarray_math.py \
    core_tests/test_ndarray_scatter.py \
    core_tests/test_reduction.py \
    core_tests/test_cub_reduction.py \
    sorting_tests/test_count.py \
    sorting_tests/test_sort.py \
    binary_tests \
    cuda_tests/test_texture.py \
    cuda_tests/test_stream.py \
    cuda_tests/test_graph.py \
    cuda_tests/test_memory.py \
    cuda_tests/test_memory_hook.py \
    cuda_tests/test_pinned_memory.py \
    cuda_tests/test_device.py \
    cuda_tests/test_driver.py \
    cuda_tests/test_runtime.py \
    cuda_tests/test_compiler.py \
    cuda_tests/test_nvrtc.py

mkdir -p "$folder/cupy"
cat > "$folder/cupy/known.txt" <<'END_OF_FILE'
# They have nvcc compile to a cubin, or load one.
test_raw.*\[NVCC
test_raw.TestRaw::test_load_cubin
test_raw.TestRawPicklable::
# With PTX they expect the linker to find what is wrong, but NVRTC 13 does.
test_raw.TestRaw::test_dynamical_parallelism_compile_failure\[NVRTC
# They need cuFFT, cuBLAS, cuSOLVER or cuSPARSE, whose device code is cubins.
test_graph.TestGraph::test_capture_run_on_
test_graph.TestGraph::test_stream_capture_failure_cu(blas|solver|sparse)
test_ndarray_get.*::test_non_contiguous_array
test_device.TestDeviceHandles::
test_sort.TestLexsort::test_F_order
END_OF_FILE

# pip would build the source package to download it, which needs all of CUDA.
if [ ! -d "$folder/cupy/cupy-14.2.0" ]; then
    "$python" - "$source/cupy-14.2.0.tar.gz" "$sum" "$folder/cupy" <<'END_OF_FILE'
import hashlib, io, sys, tarfile, urllib.request
address, wanted, folder = sys.argv[1:]
packed = urllib.request.urlopen(address).read()
assert hashlib.sha256(packed).hexdigest() == wanted, address
with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
    # Not the package itself, which would stand in the way of the wheel.
    archive.extractall(folder, [m for m in archive.getmembers() if m.name.startswith("cupy-14.2.0/tests/")])
    archive.extract("cupy-14.2.0/setup.cfg", folder)
    archive.extract("cupy-14.2.0/pyproject.toml", folder)
END_OF_FILE
fi
export SOFTCUDA_DRIVER=610 SOFTCUDA_DEVICE="softcuda,12.1,2,8G" CUPY_COMPILE_WITH_PTX=1 CUPY_ACCELERATORS= \
    CUPY_CACHE_DIR="$folder/cupy/cache"

cd "$folder/cupy/cupy-14.2.0/tests/cupy_tests"
tested cupy "$folder/cupy/known.txt" --dist loadfile --timeout 120 -m "not slow and not multi_gpu" "$@"
exit "$failed"
