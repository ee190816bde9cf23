#!/bin/sh
# Runs test files of CuPy on softcuda, unchanged: the wheel of PyPI with the tests of the source package.
#
#   softcuda/tests/users/cupy.sh [FOLDER [FILE...]]
#
# FOLDER (/tmp/softcuda-cupy if none is named) takes a Python environment, the tests and compiled kernels. FILE is a
# test file below tests/cupy_tests; all of the list below if none is named.
# Needs cargo, Python 3.11 or newer with venv, and the network (PyPI).
#
# The device is one of compute capability 12.1: the wheel's own kernels (CUB, Thrust) and those of cuRAND are there as
# PTX for the newest architecture only. CuPy does not check whether CUB's kernels were launched: on an older device its
# reductions silently give zeros. CuPy's own kernels are compiled to PTX (CUPY_COMPILE_WITH_PTX). CUPY_ACCELERATORS is
# empty, so that reductions do not compile CUB for each type, which takes longer than all else; the tests of it choose
# it themselves.
#
# What is known not to run is named below, with the reason; anything else that fails, and a file that does not end in
# 300 s, ends the script with exit status 1. The last lines are a table.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "${1:-/tmp/softcuda-cupy}" && cd "${1:-/tmp/softcuda-cupy}" && pwd)
[ $# -eq 0 ] || shift
source=https://files.pythonhosted.org/packages/dc/10/059a92d40b161ea24607c9e41a75098812ca7021f2b565524f87beba15c9
sum=cfed725e612178cfbdbf62f4a3a598b60edecbbca718c0d4580c21a16ae4a62c

files="
    core_tests/test_raw.py
    core_tests/test_elementwise.py
    core_tests/test_userkernel.py
    core_tests/test_core.py
    core_tests/test_scan.py
    core_tests/test_ndarray_get.py
    core_tests/test_ndarray_math.py
    core_tests/test_ndarray_scatter.py
    core_tests/test_reduction.py
    core_tests/test_cub_reduction.py
    sorting_tests/test_count.py
    sorting_tests/test_sort.py
    binary_tests
    cuda_tests/test_texture.py
    cuda_tests/test_stream.py
    cuda_tests/test_graph.py
    cuda_tests/test_memory.py
    cuda_tests/test_memory_hook.py
    cuda_tests/test_pinned_memory.py
    cuda_tests/test_device.py
    cuda_tests/test_driver.py
    cuda_tests/test_runtime.py
    cuda_tests/test_compiler.py
    cuda_tests/test_nvrtc.py"
[ $# -eq 0 ] || files=$*

# Extended regular expressions of names of tests, behind the reason in a comment.
cat > "$folder/known.txt" <<'END'
# They have nvcc compile to a cubin, or load one.
test_raw.py::.*\[NVCC
test_raw.py::TestRaw::test_load_cubin
test_raw.py::TestRawPicklable::
# Kernels that start kernels need NVIDIA's device runtime.
test_raw.py::TestRaw::test_dynamical_parallelism
# They need cuFFT, cuBLAS, cuSOLVER or cuSPARSE, whose device code is cubins.
test_graph.py::TestGraph::test_capture_run_on_
test_graph.py::TestGraph::test_stream_capture_failure_cu(blas|solver|sparse)
test_ndarray_get.py::.*test_non_contiguous_array
test_device.py::TestDeviceHandles::
test_sort.py::TestLexsort::test_F_order
END
grep -v '^#' "$folder/known.txt" > "$folder/known.patterns"

cd "$root"
cargo build -p softcuda
mkdir -p "$folder/lib" "$folder/logs"
ln -sf "${CARGO_TARGET_DIR:-$root/target}/debug/libsoftcuda.so" "$folder/lib/libcuda.so.1"

[ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check cupy-cuda13x==14.2.0 numpy==2.4.6 scipy==1.17.1 \
    pytest==9.2.0 pytest-timeout==2.4.0 nvidia-cuda-nvrtc==13.0.88 nvidia-cuda-runtime==13.0.96 \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85 \
    nvidia-curand==10.4.0.35
# pip would build the source package to download it, which needs all of CUDA.
if [ ! -d "$folder/cupy-14.2.0" ]; then
    "$python" - "$source/cupy-14.2.0.tar.gz" "$sum" "$folder" <<'END'
import hashlib, io, sys, tarfile, urllib.request
address, wanted, folder = sys.argv[1:]
packed = urllib.request.urlopen(address).read()
assert hashlib.sha256(packed).hexdigest() == wanted, address
with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
    # Not the package itself, which would stand in the way of the wheel.
    archive.extractall(folder, [m for m in archive.getmembers() if m.name.startswith("cupy-14.2.0/tests/")])
    archive.extract("cupy-14.2.0/setup.cfg", folder)
    archive.extract("cupy-14.2.0/pyproject.toml", folder)
END
fi
nvidia=$("$python" -c 'import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])')
export LD_LIBRARY_PATH="$folder/lib:$nvidia/lib" CUDA_PATH="$nvidia" PATH="$nvidia/bin:$PATH"
export SOFTCUDA_DEVICE="softcuda,12.1,2,8G" CUPY_COMPILE_WITH_PTX=1 CUPY_ACCELERATORS= CUPY_CACHE_DIR="$folder/cache"

cd "$folder/cupy-14.2.0/tests"
failed=0
: > "$folder/table.txt"
for file in $files; do
    log="$folder/logs/$(echo "$file" | tr / .).log"
    status=0
    timeout 300 "$python" -m pytest -q -rfE -p no:cacheprovider --timeout 120 --tb=short \
        -m "not slow and not multi_gpu" "cupy_tests/$file" > "$log" 2>&1 || status=$?
    echo "$file: $(tail -n 1 "$log" | cut -c1-100)" | tee -a "$folder/table.txt"
    # 0: all passed, 1: some failed, 5: none was run.
    case $status in
    0 | 1 | 5) ;;
    *) echo "not expected to end with status $status: $file"; failed=1 ;;
    esac
    sed -n 's/^\(FAILED\|ERROR\) \(cupy_tests.*\)/\2/p' "$log" | sed 's/ - .*//' \
        | grep -vEf "$folder/known.patterns" > "$folder/unexpected.txt" || true
    if [ -s "$folder/unexpected.txt" ]; then
        sed 's/^/not expected to fail: /' "$folder/unexpected.txt"
        failed=1
    fi
done
echo "file: result"
cat "$folder/table.txt"
exit "$failed"
