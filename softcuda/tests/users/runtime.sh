#!/bin/sh
# Builds the programs in softcuda/tests/runtime with nvcc, for the CUDA runtime 13.0, 13.4 and 12, each with the static
# and the shared library, and runs them on softcuda.
#
#   softcuda/tests/users/runtime.sh [FOLDER [PROGRAM...]]
#
# The programs are all if none is named. RUNNER, if it is set, is a command that starts each program (`gpucr run
# --device soft --`, for instance) instead of softcuda's library in LD_LIBRARY_PATH. See begin.sh for FOLDER and what is
# needed; a C++ compiler besides.
#
# PyPI has no nvcc 12, so nvcc 13 compiles for both: with the headers of runtime 12 for that, but for those of the
# compiler itself (crt/). So it does for runtime 13.4, as code of a newer nvcc is newer than driver 580. A program's
# first lines say what it needs besides: `// flags:` for nvcc, `// with:` a second file, `// environment:` for its run.
#
# Two programs are built and run at a time. The last lines are a table. The exit status is 1 if any program did not
# pass.
. "$(dirname "$0")/begin.sh"
sources="$root/softcuda/tests/runtime"
own="$folder/runtime"
rm -rf "$own/built"
mkdir -p "$own/built"

# Runtimes besides that of begin.sh: the packages are those behind the folder's name.
others() {
    [ -d "$own/$1/packages" ] || "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$own/$1/packages" "$2" "$3"
}
others 12 nvidia-cuda-runtime-cu12==12.9.79 nvidia-cuda-cccl-cu12==12.9.27
# These headers can be told not to compare their version with the compiler's.
others 13.4 nvidia-cuda-runtime==13.4.92 nvidia-cuda-cccl==13.3.5.0.6

# What nvcc is to find of each version: headers, and libraries by the names that it links them by.
mkdir -p "$own/12/include" "$own/12/lib" "$own/13/lib" "$own/13.4/include" "$own/13.4/lib"
ln -sf "$own"/12/packages/nvidia/cuda_runtime/include/* "$own/12/include/"
ln -sf "$own"/12/packages/nvidia/cuda_runtime/lib/* "$own/12/lib/"
ln -sf libcudart.so.12 "$own/12/lib/libcudart.so"
ln -sf "$nvidia"/lib/libcud* "$own/13/lib/"
ln -sf libcudart.so.13 "$own/13/lib/libcudart.so"
ln -sf "$own"/13.4/packages/nvidia/cu13/include/* "$own/13.4/include/"
ln -sf "$own"/13.4/packages/nvidia/cu13/lib/libcudart* "$own/13.4/lib/"
# Device code for separate compilation, which nvlink takes in its own version only.
ln -sf "$nvidia/lib/libcudadevrt.a" "$own/13.4/lib/"
ln -sf libcudart.so.13 "$own/13.4/lib/libcudart.so"
for version in 12 13.4; do
    rm -rf "$own/$version/include/crt"
    ln -sfn "$nvidia/include/crt" "$own/$version/include/crt"
done
# Those of 13.4 name functions that the compiler of 13.0 has not.
ln -sf "$nvidia"/include/sm_*_intrinsics.h* "$own/13.4/include/"

# What stands behind a word in the first lines of a program.
said() { sed -n "1,6s|^// $1: ||p" "$sources/$2.cu"; }

# Compiles a program once for a version, and links it twice. $4 and further: options of a variant.
build() {
    version=$1 program=$2 name=$3
    shift 3
    case $version in
        13) headers= ;;
        # The compiler's version is not that of the headers.
        13.4) headers="-I$own/13.4/include -I$own/13.4/include/cccl -DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK" ;;
        *) headers="-I$own/12/include -I$own/12/packages/nvidia/cuda_cccl/include" ;;
    esac
    objects=
    for part in "$program.cu" $(said with "$program"); do
        objects="$objects $own/built/$name-$version-$part.o"
        # shellcheck disable=SC2046,SC2086 # several options
        nvcc -std=c++17 $headers $(said flags "$program") "$@" -c -o "$own/built/$name-$version-$part.o" \
            "$sources/$part" || return 1
    done
    for linkage in static shared; do
        # shellcheck disable=SC2046,SC2086
        nvcc $headers $(said flags "$program") "$@" -cudart $linkage -L"$own/$version/lib" \
            -Xlinker -rpath,"$own/$version/lib" -o "$own/built/$name-$version-$linkage" $objects || return 1
    done
}

# Runs a program; the last line of what it printed is the reason if it fails.
run() {
    name=$1 program=$2 runner=${RUNNER:-}
    [ -n "$runner" ] || runner="env LD_LIBRARY_PATH=$folder/lib"
    # shellcheck disable=SC2046,SC2086
    env -u LD_LIBRARY_PATH $(said environment "$program") $3 timeout 120 $runner "$own/built/$name" \
        > "$own/built/$name.out" 2>&1
}

# Builds and runs a variant of a program with each runtime. Says of each: passed, or why not.
try() {
    program=$1 label=$2 environment=$3
    shift 3
    [ "$environment" != - ] || environment=
    for version in 13 13.4 12; do
        if ! build $version "$program" "$label" "$@" > "$own/built/$label-$version.log" 2>&1; then
            for linkage in static shared; do
                echo "$version $linkage $label: not built: $(tail -n 1 "$own/built/$label-$version.log")"
            done
            continue
        fi
        for linkage in static shared; do
            status=0
            name="$label-$version-$linkage"
            run "$name" "$program" "$environment" || status=$?
            if [ $status -eq 0 ] && grep -q ': passed$' "$own/built/$name.out"; then
                echo "$version $linkage $label: passed"
            else
                echo "$version $linkage $label: status $status: $(tail -n 1 "$own/built/$name.out")"
            fi
        done
    done
}

# The variants: program, name, environment, options of nvcc.
if [ $# -gt 0 ]; then
    for program in "$@"; do echo "$program $program -"; done
else
    for file in "$sources"/*.cu; do
        program=$(basename "$file" .cu)
        ! grep -q 'int main' "$file" || echo "$program $program -"
    done
    # Fat binaries of other kinds: several entries, all compressions, code that is for other devices besides.
    echo "launch launch-several - -gencode arch=compute_75,code=[sm_75,compute_75]" \
        "-gencode arch=compute_80,code=compute_80 -gencode arch=compute_90,code=[sm_90,compute_90]"
    for mode in none size speed balance; do
        echo "symbols symbols-$mode - -compress-mode=$mode"
    done
    echo "separate separate-several - -gencode arch=compute_75,code=[sm_75,compute_75]" \
        "-gencode arch=compute_80,code=[sm_80,compute_80]"
    # All code at the beginning instead of each kernel at its first use.
    echo "symbols symbols-eager CUDA_MODULE_LOADING=EAGER"
    echo "launch launch-per-thread - --default-stream per-thread"
fi > "$own/variants.txt"

for half in 0 1; do
    awk "NR % 2 == $half" "$own/variants.txt" | while read -r program label environment options; do
        # shellcheck disable=SC2086
        try "$program" "$label" "$environment" $options < /dev/null
    done > "$own/said-$half.txt" &
done
wait

sort "$own/said-0.txt" "$own/said-1.txt" > "$own/said.txt"
good=$(grep -c ': passed$' "$own/said.txt" || true)
total=$(($(wc -l < "$own/variants.txt") * 6))
echo "runtime, linkage: passed"
for version in 13 13.4 12; do
    for linkage in static shared; do
        echo "$version $linkage: $(grep -c "^$version $linkage .*: passed\$" "$own/said.txt" || true)"
    done
done
echo "$good of $total passed"
grep -v ': passed$' "$own/said.txt" || true
row "$total" "$good" 0 0 $((total - good))
[ "$good" -eq "$total" ]
