#!/bin/bash
# The workloads of tests/ on a real GPU: each runs uninterrupted, and then dumped in the middle,
# restored, and run to its end; the lines that it prints must be the same.
# usage: verify_workloads.sh GPUCR WORKLOAD OUT [NAME...]
# RESTORE_OPTIONS in the environment are given to each restore; with --json what became of them is shown.
set -u
gpucr=$(realpath "$1") workload=$(realpath "$2") out=$3
shift 3
mkdir -p "$out" || exit 1
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <("$workload" --list)
images=$(mktemp -d /dev/shm/gpucr-workloads-XXXXXX)
trap 'rm -rf "$images"' EXIT
failed=0
for name in "${names[@]}"; do
    log=$out/workload-$name.log plain=$out/workload-$name.plain
    "$gpucr" run --device cuda -- "$workload" "$name" >"$plain" 2>&1
    setsid "$gpucr" run --device cuda -- "$workload" "$name" --step-delay-ms 20 \
        >"$log" 2>&1 </dev/null &
    pid=$!
    disown
    for _ in $(seq 400); do grep -q "^step" "$log" && break; sleep 0.05; done
    sleep 0.3
    if ! "$gpucr" dump --pid "$pid" -o "$images/$name" >"$out/workload-$name.dump" 2>&1; then
        echo "$name: dump FAILED: $(head -c 600 "$out/workload-$name.dump")"
        pkill -9 -P "$pid"; kill -9 "$pid"; failed=1; continue
    fi
    while [ -e "/proc/$pid" ]; do sleep 0.01; done
    # shellcheck disable=SC2086 # several options may be given
    if ! timeout 60 "$gpucr" restore ${RESTORE_OPTIONS:-} "$images/$name" >"$out/workload-$name.restore" 2>&1; then
        echo "$name: restore FAILED: $(head -c 600 "$out/workload-$name.restore") $(tail -1 "$log")"
        failed=1; continue
    fi
    if cmp -s <(grep -E "^(step|result)" "$plain") <(grep -E "^(step|result)" "$log"); then
        echo "$name: identical; $(cut -d' ' -f2- "$out/workload-$name.dump" | head -1)"
        tr -d '\n' <"$out/workload-$name.restore" | grep -oE '"(shared|on_demand)": *\{[^}]*\}'
    else
        echo "$name: DIFFERENT"; failed=1
    fi
done
exit $failed
