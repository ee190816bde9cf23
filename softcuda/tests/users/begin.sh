# What the scripts of this folder begin with; `. "$(dirname "$0")/begin.sh"` reads it.
#
# The first argument of a script, /tmp/softcuda-users if there is none, is a folder that takes all that is made: the
# Python environment with the packages, the driver, compiled kernels, logs. The arguments behind it are left to the
# script. softcuda is the release build.
#
# Needs cargo, a C linker, Python 3.11 or newer with venv, and the network (crates.io, PyPI).
set -eu
begun=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "${1:-/tmp/softcuda-users}" && cd "${1:-/tmp/softcuda-users}" && pwd)
[ $# -eq 0 ] || shift
failed=0

mkdir -p "$folder/lib" "$folder/logs" "$folder/rows"
# cudarc is built anew whenever these two change, and they are set below, for the scripts that run.sh starts too.
(cd "$root" && env -u CUDA_HOME -u CUDA_PATH cargo build --quiet --release -p softcuda)
ln -sf "${CARGO_TARGET_DIR:-$root/target}/release/libsoftcuda.so" "$folder/lib/libcuda.so.1"

# cuda-bindings is the newest with which numba-cuda's tests of IPC run: later ones have no CUipcMemHandle.reserved.
python="$folder/venv/bin/python"
[ -x "$python" ] || python3 -m venv "$folder/venv"
"$python" -m pip install --quiet --disable-pip-version-check \
    cuda-bindings==13.3.1 cuda-core==1.2.2 numba==0.68.1 numba-cuda==0.30.4 cupy-cuda13x==14.2.0 warp-lang==1.19.0 \
    numpy==2.4.6 scipy==1.17.1 psutil==7.2.2 cffi==2.1.1 filecheck==1.0.6 ml_dtypes==0.6.0 \
    pytest==9.2.0 pytest-benchmark==5.3.1 pytest-timeout==2.4.0 pytest-xdist==3.8.0 \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-nvrtc==13.0.88 \
    nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96 nvidia-curand==10.4.0.35
nvidia=$("$python" -c 'import nvidia.cu13; print(list(nvidia.cu13.__path__)[0])')
export LD_LIBRARY_PATH="$folder/lib:$nvidia/lib" CUDA_HOME="$nvidia" CUDA_PATH="$nvidia" PATH="$nvidia/bin:$PATH"

# row RUN PASSED SKIPPED KNOWN FAILED: what is said of this script in the table of run.sh, behind it the seconds that it
# has taken and those of processors, of all children that have ended.
row() {
    times > "$folder/times.txt"
    processors=$(awk 'NR == 2 { split($1, user, /[ms]/); split($2, kernel, /[ms]/)
        printf "%.0f", 60 * (user[1] + kernel[1]) + user[2] + kernel[2] }' "$folder/times.txt")
    script=$(basename "$0" .sh)
    echo "$script $* $(($(date +%s) - begun)) $processors" > "$folder/rows/$script"
}

# judge NAME KNOWN: prints a table of the JUnit file of that name, and says what fails though no line of KNOWN, extended
# regular expressions behind comments that give the reason, names it.
judge() {
    counts=$("$python" "$here/table.py" "$folder/logs/$1.xml" "$2" "$folder/logs/$1.md") || failed=1
    cat "$folder/logs/$1.md"
    # shellcheck disable=SC2086 # five numbers
    row $counts
}

# tested NAME KNOWN ARGUMENT...: runs pytest in two processes, and judges what comes of it.
tested() {
    name=$1 known=$2
    shift 2
    rm -f "$folder/logs/$name.xml"
    status=0
    timeout "${LIMIT:-1500}" "$python" -W ignore -m pytest -q -rfE --tb short -p no:cacheprovider \
        -n 2 --max-worker-restart 50 --junit-xml "$folder/logs/$name.xml" "$@" \
        > "$folder/logs/$name.log" 2>&1 || status=$?
    tail -n 1 "$folder/logs/$name.log"
    # 0: all passed, 1: some failed. Anything else is not the end of a run.
    if [ "$status" -gt 1 ]; then
        echo "$name: pytest ended with status $status"
        failed=1
    fi
    judge "$name" "$known"
}
