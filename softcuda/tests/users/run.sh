#!/bin/sh
# Runs what others wrote for NVIDIA's driver on softcuda, unchanged: the driver tests and examples of
# the crate cudarc, a program on NVIDIA's cuda-bindings, and the driver tests of numba-cuda.
#
#   softcuda/tests/users/run.sh [FOLDER]
#
# FOLDER (/tmp/softcuda-users if none is named) takes a Python environment and the builds.
# Needs cargo, Python 3.10 or newer with venv, and the network (crates.io, PyPI).
# What is known not to run is named below, with the reason; anything else that fails ends the script
# with exit status 1.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "${1:-/tmp/softcuda-users}" && cd "${1:-/tmp/softcuda-users}" && pwd)
cudarc=$(sed -n '/^name = "cudarc"/{n;s/version = "\(.*\)"/\1/p}' "$root/Cargo.lock")

cd "$root"
cargo build -p softcuda
mkdir -p "$folder/lib"
ln -sf "${CARGO_TARGET_DIR:-$root/target}/debug/libsoftcuda.so" "$folder/lib/libcuda.so.1"

[ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet cuda-bindings==13.5.0 cuda-core==1.2.2 numba==0.68.1 numba-cuda==0.30.4 \
    numpy==2.4.6 scipy psutil cffi filecheck ml_dtypes pytest \
    nvidia-cuda-runtime==13.0.96 nvidia-nvvm==13.0.88 nvidia-cuda-nvrtc==13.0.88 \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85
nvidia=$("$python" -c 'import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])')
export LD_LIBRARY_PATH="$folder/lib:$nvidia/lib"

echo "== cuda-bindings"
"$python" "$here/bindings.py"

echo "== cudarc $cudarc"
cd "$folder"
cargo fetch --manifest-path "$root/Cargo.toml" --quiet
if [ ! -d cudarc ]; then
    cp -r "$(find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -maxdepth 2 -name "cudarc-$cudarc")" cudarc
    chmod -R u+w cudarc
fi
cd cudarc
features=std,driver,nvrtc,f16,cuda-13000,fallback-dynamic-loading
run_cudarc() {
    command=$1
    shift
    CARGO_TARGET_DIR="$folder/target" cargo "$command" --no-default-features --features "$features" "$@"
}
# Three tests compare the speeds of pinned and plain memory, or of one stream and two; one asks NVRTC
# for sm_53, which version 13 does not know.
run_cudarc test --lib -- --test-threads 1 \
    --skip test_pinned_copy_is_faster \
    --skip test_default_pinned_host_reads_are_faster_than_write_combined \
    --skip test_par_launch \
    --skip test_launch_with_half
# The others need CUPTI or cuFile.
for example in 01-allocate 02-copy 03-launch-kernel 04-streams 05-device-repr 06-threading \
    09-constant-memory 10-function-attributes 12-context-config 13-copy-multi-gpu matmul-kernel \
    nvrtc-compile; do
    echo "example $example"
    SOFTCUDA_DEVICES=2 run_cudarc run --quiet --example "$example" > /dev/null
done

echo "== numba-cuda"
cd "$folder"
# Numbers of registers are estimates, which a limit given to the linker does not lower; CuPy needs cudart.
known='test_set_registers_38 test_set_registers_57 test_set_registers_eager
    test_kernel_with_buffer test_kernel_with_strided_memory_view'
"$python" -W ignore -m numba.runtests -v numba.cuda.tests.cudadrv > numba.log 2>&1 || true
tail -n 3 numba.log
grep -q '^Ran ' numba.log
failed=0
for test in $(sed -n 's/^\(FAIL\|ERROR\): \([A-Za-z0-9_]*\) .*/\2/p' numba.log | sort -u); do
    case " $(echo $known) " in
    *" $test "*) ;;
    *) echo "not expected to fail: $test"; failed=1 ;;
    esac
done
exit "$failed"
