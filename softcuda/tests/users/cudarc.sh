#!/bin/sh
# Runs the driver tests and examples of the crate cudarc, as it is on crates.io, on softcuda.
#
#   softcuda/tests/users/cudarc.sh [FOLDER]
#
# See begin.sh for FOLDER and what is needed. The version is the one that softcuda is built with. The exit status is 1
# if anything but what is named below did not pass.
. "$(dirname "$0")/begin.sh"
cudarc=$(sed -n '/^name = "cudarc"/{n;s/version = "\(.*\)"/\1/p}' "$root/Cargo.lock")
log="$folder/logs/cudarc.log"

if [ ! -d "$folder/cudarc" ]; then
    cargo fetch --manifest-path "$root/Cargo.toml" --quiet
    cp -r "$(find "${CARGO_HOME:-$HOME/.cargo}/registry/src" -maxdepth 2 -name "cudarc-$cudarc")" "$folder/cudarc"
    chmod -R u+w "$folder/cudarc"
fi
cd "$folder/cudarc"
run_cudarc() {
    command=$1
    shift
    CARGO_TARGET_DIR="$folder/target" cargo "$command" --no-default-features \
        --features std,driver,nvrtc,f16,cuda-13000,fallback-dynamic-loading "$@"
}
# Three tests compare the speeds of pinned and plain memory, or of one stream and two; one asks NVRTC
# for sm_53, which version 13 does not know.
run_cudarc test --lib -- --test-threads 1 \
    --skip test_pinned_copy_is_faster \
    --skip test_default_pinned_host_reads_are_faster_than_write_combined \
    --skip test_par_launch \
    --skip test_launch_with_half > "$log" 2>&1 || failed=1
result=$(grep '^test result: ' "$log") || { tail "$log"; exit 1; }
echo "cudarc $cudarc, library: $result"
passed=$(echo "$result" | sed 's/.* \([0-9]*\) passed.*/\1/')
wrong=$(echo "$result" | sed 's/.* \([0-9]*\) failed.*/\1/')
skipped=$(echo "$result" | sed 's/.* \([0-9]*\) filtered.*/\1/')
# The others need CUPTI or cuFile.
for example in 01-allocate 02-copy 03-launch-kernel 04-streams 05-device-repr 06-threading \
    09-constant-memory 10-function-attributes 12-context-config 13-copy-multi-gpu matmul-kernel \
    nvrtc-compile; do
    if SOFTCUDA_DEVICES=2 run_cudarc run --quiet --example "$example" >> "$log" 2>&1; then
        passed=$((passed + 1))
    else
        echo "not expected to fail: example $example"
        wrong=$((wrong + 1))
        failed=1
    fi
done
row $((passed + wrong)) "$passed" "$skipped" 0 "$wrong"
exit "$failed"
