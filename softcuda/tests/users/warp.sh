#!/bin/sh
# Runs NVIDIA Warp's tests, which its wheel has (warp.tests), on softcuda, unchanged.
#
#   softcuda/tests/users/warp.sh [FOLDER [MODULE...]]
#
# FOLDER (/tmp/softcuda-warp if none is named) takes a Python environment and compiled kernels. MODULE is a module
# below warp.tests; all of the list below if none is named. Of a module those tests run that have `cuda` in their
# names: each test is there once for every device, and those on the processor never call the driver.
# Needs cargo, Python 3.10 or newer with venv, and the network (PyPI).
#
# The version is of before CUDA runtime 13.4. Warp 1.19 has that one, which softcuda serves since; it was not tried.
# Its own kernels (CUB's scans and sorts, NanoVDB) are there as PTX; those of the tests are compiled to PTX by NVRTC,
# which is part of Warp.
#
# What is known not to run is named below, with the reason; anything else that fails, and a module that does not end in
# 300 s, ends the script with exit status 1. The last lines are a table.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
folder=$(mkdir -p "${1:-/tmp/softcuda-warp}" && cd "${1:-/tmp/softcuda-warp}" && pwd)
[ $# -eq 0 ] || shift

modules="
    cuda.test_clang_cuda
    cuda.test_mempool
    cuda.test_occupancy
    cuda.test_peer
    cuda.test_pinned
    cuda.test_texture
    cuda.test_conditional_captures
    geometry.test_bvh
    geometry.test_hash_grid
    geometry.test_marching_cubes
    geometry.test_mesh
    geometry.test_mesh_query_aabb
    matrix.test_mat_assign_copy
    matrix.test_mat_lite
    test_adam
    test_allocator
    test_array_reduce
    test_atomic
    test_atomic_bitwise
    test_bf16
    test_bool
    test_copy
    test_fp16
    test_func
    test_generics
    test_graph
    test_indexedarray
    test_intersect
    test_launch
    test_lvalue
    geometry.test_volume
    geometry.test_volume_write"
[ $# -eq 0 ] || modules=$*

# Extended regular expressions of names of tests, behind the reason in a comment.
cat > "$folder/known.txt" <<'END'
# Compares the speeds of copies from pinned and from plain memory.
test_pinned\.
END
grep -v '^#' "$folder/known.txt" > "$folder/known.patterns"

cd "$root"
cargo build -p softcuda
mkdir -p "$folder/lib" "$folder/logs"
ln -sf "${CARGO_TARGET_DIR:-$root/target}/debug/libsoftcuda.so" "$folder/lib/libcuda.so.1"

[ -x "$folder/venv/bin/python" ] || python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check warp-lang==1.13.0 numpy==2.4.6
export LD_LIBRARY_PATH="$folder/lib" WARP_CACHE_PATH="$folder/cache"

cd "$folder"
failed=0
: > "$folder/table.txt"
for module in $modules; do
    log="$folder/logs/$module.log"
    status=0
    timeout 300 "$python" -W ignore -m unittest -v -k cuda "warp.tests.$module" > "$log" 2>&1 || status=$?
    result="$(grep '^Ran [0-9]* test' "$log" || echo "did not end"), $(tail -n 1 "$log" | cut -c1-80)"
    echo "$module: $result" | tee -a "$folder/table.txt"
    # A module that did not end, or ended at once, says nothing of its tests.
    if ! grep -q '^Ran [0-9]* test' "$log"; then
        echo "not expected to end with status $status: $module"
        failed=1
    fi
    sed -n 's/^\(FAIL\|ERROR\): [A-Za-z0-9_]* (\(.*\))$/\2/p' "$log" | grep -vEf "$folder/known.patterns" \
        > "$folder/unexpected.txt" || true
    if [ -s "$folder/unexpected.txt" ]; then
        sed 's/^/not expected to fail: /' "$folder/unexpected.txt"
        failed=1
    fi
done
echo "module: result"
cat "$folder/table.txt"
exit "$failed"
