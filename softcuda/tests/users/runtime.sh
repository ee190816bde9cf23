#!/bin/sh
# Builds the programs in softcuda/tests/runtime with nvcc, for the CUDA runtime 13.0, 13.4 and 12, each with the static
# and the shared library, and runs them on softcuda.
#
#   softcuda/tests/users/runtime.sh [FOLDER [PROGRAM...]]
#
# FOLDER (/tmp/softcuda-runtime if none is named) takes a Python environment, headers and the programs. The programs
# are all if none is named. RUNNER, if it is set, is a command that starts each program (`gpucr run --device soft --`,
# for instance) instead of softcuda's library in LD_LIBRARY_PATH.
# Needs cargo, a C++ compiler, Python 3.10 or newer with venv, and the network (PyPI).
#
# PyPI has no nvcc 12, so nvcc 13 compiles for both: with the headers of runtime 12 for that, but for those of the
# compiler itself (crt/). So it does for runtime 13.4, as code of a newer nvcc is newer than driver 580. A program's
# first lines say what it needs besides: `// flags:` for nvcc, `// with:` a second file, `// environment:` for its run.
#
# The last lines are a table. The exit status is 1 if any program did not pass.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "${1:-/tmp/softcuda-runtime}" && cd "${1:-/tmp/softcuda-runtime}" && pwd)
[ $# -eq 0 ] || shift
sources="$root/softcuda/tests/runtime"

cd "$root"
cargo build -p softcuda
mkdir -p "$folder/lib" "$folder/built"
ln -sf "${CARGO_TARGET_DIR:-$root/target}/debug/libsoftcuda.so" "$folder/lib/libcuda.so.1"

[ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check \
    nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85 \
    nvidia-cuda-runtime==13.0.96 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27
[ -d "$folder/13.4/packages" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --target "$folder/13.4/packages" nvidia-cuda-runtime==13.4.92
packages=$("$python" -c 'import nvidia; print(list(nvidia.__path__)[0])')
nvcc="$packages/cu13/bin/nvcc"

# What nvcc is to find of each version: headers, and libraries by the names that it links them by.
mkdir -p "$folder/12/include" "$folder/12/lib" "$folder/13/lib"
ln -sf "$packages"/cuda_runtime/include/* "$folder/12/include/"
rm -rf "$folder/12/include/crt"
ln -sfn "$packages/cu13/include/crt" "$folder/12/include/crt"
ln -sf "$packages"/cuda_runtime/lib/* "$folder/12/lib/"
ln -sf libcudart.so.12 "$folder/12/lib/libcudart.so"
ln -sf "$packages"/cu13/lib/libcud* "$folder/13/lib/"
ln -sf libcudart.so.13 "$folder/13/lib/libcudart.so"
mkdir -p "$folder/13.4/include" "$folder/13.4/lib"
ln -sf "$folder"/13.4/packages/nvidia/cu13/include/* "$folder/13.4/include/"
rm -rf "$folder/13.4/include/crt"
ln -sfn "$packages/cu13/include/crt" "$folder/13.4/include/crt"
ln -sf "$folder"/13.4/packages/nvidia/cu13/lib/libcudart* "$folder/13.4/lib/"
# Device code for separate compilation, which nvlink takes in its own version only.
ln -sf "$packages/cu13/lib/libcudadevrt.a" "$folder/13.4/lib/"
ln -sf libcudart.so.13 "$folder/13.4/lib/libcudart.so"

# What stands behind a word in the first lines of a program.
said() { sed -n "1,6s|^// $1: ||p" "$sources/$2.cu"; }

# Builds a program once for a version, and links it twice. $3 and further: name and options of a variant.
build() {
    version=$1 program=$2 name=$3
    shift 3
    case $version in
        13) headers= ;;
        13.4) headers="-I$folder/13.4/include" ;;
        *) headers="-I$folder/12/include -I$packages/cuda_cccl/include" ;;
    esac
    for linkage in static shared; do
        # shellcheck disable=SC2046,SC2086 # several options and files
        "$nvcc" -std=c++17 $headers $(said flags "$program") "$@" -cudart $linkage -L"$folder/$version/lib" \
            -Xlinker -rpath,"$folder/$version/lib" -o "$folder/built/$name-$version-$linkage" \
            "$sources/$program.cu" $(said with "$program" | sed "s|^|$sources/|") \
            > "$folder/built/$name-$version-$linkage.log" 2>&1 || return 1
    done
}

# Runs a program; the last line of what it printed is the reason if it fails.
run() {
    name=$1 program=$2 runner=${RUNNER:-}
    [ -n "$runner" ] || runner="env LD_LIBRARY_PATH=$folder/lib"
    # shellcheck disable=SC2046,SC2086
    env $(said environment "$program") $3 timeout 120 $runner "$folder/built/$name" > "$folder/built/$name.out" 2>&1
}

total=0 good=0
table="$folder/table.txt"
: > "$table"
try() {
    program=$1 label=$2 environment=$3
    shift 3
    for version in 13 13.4 12; do
        if ! build $version "$program" "$label" "$@"; then
            echo "$label, runtime $version: not built: $(tail -n 1 "$folder/built/$label-$version"-*.log | tail -n 1)" >> "$table"
            total=$((total + 2))
            continue
        fi
        for linkage in static shared; do
            total=$((total + 1))
            status=0
            run "$label-$version-$linkage" "$program" "$environment" || status=$?
            if [ $status -eq 0 ] && grep -q ': passed$' "$folder/built/$label-$version-$linkage.out"; then
                good=$((good + 1))
                echo "$version $linkage $label" >> "$folder/good.txt"
            else
                echo "$label, runtime $version $linkage: status $status: $(tail -n 1 "$folder/built/$label-$version-$linkage.out")" >> "$table"
            fi
        done
    done
}

: > "$folder/good.txt"
if [ $# -gt 0 ]; then
    for program in "$@"; do try "$program" "$program" ""; done
else
    for file in "$sources"/*.cu; do
        program=$(basename "$file" .cu)
        grep -q 'int main' "$file" && try "$program" "$program" ""
    done
    # Fat binaries of other kinds: several entries, all compressions, code that is for other devices besides.
    several="-gencode arch=compute_75,code=[sm_75,compute_75] -gencode arch=compute_80,code=compute_80
        -gencode arch=compute_90,code=[sm_90,compute_90]"
    # shellcheck disable=SC2086
    try launch launch-several "" $several
    for mode in none size speed balance; do
        try symbols "symbols-$mode" "" -compress-mode=$mode
    done
    try separate separate-several "" -gencode arch=compute_75,code=[sm_75,compute_75] \
        -gencode arch=compute_80,code=[sm_80,compute_80]
    # All code at the beginning instead of each kernel at its first use.
    try symbols symbols-eager CUDA_MODULE_LOADING=EAGER
    try launch launch-per-thread "" --default-stream per-thread
fi

echo "runtime, linkage: passed"
for version in 13 13.4 12; do
    for linkage in static shared; do
        echo "$version $linkage: $(grep -c "^$version $linkage " "$folder/good.txt" || true)"
    done
done
echo "$good of $total passed"
cat "$table"
[ "$good" -eq "$total" ]
