#!/bin/sh
# Runs what others wrote for NVIDIA's driver on softcuda, unchanged, and programs of the CUDA runtime: all other scripts
# of this folder, one after the other. The last lines are a table.
#
#   softcuda/tests/users/run.sh [FOLDER]
#
# See begin.sh for FOLDER and what is needed. In the table, "failed, known" are tests that a script expects to fail and
# gives the reason for; CPU is the time of processors, in seconds, of all processes of a script. The exit status is 1
# if a script's was not 0.
. "$(dirname "$0")/begin.sh"
rm -f "$folder"/rows/*
row 0 0 0 0 0
for script in runtime cudarc cuda-python numba cupy warp; do
    echo "== $script"
    "$here/$script.sh" "$folder" || failed=1
    [ -s "$folder/rows/$script" ] || echo "$script 0 0 0 0 0 0 0" > "$folder/rows/$script"
done
"$python" - "$folder/rows" <<'END_OF_FILE'
import pathlib, sys
rows = [file.read_text().rsplit(maxsplit=7) for file in sorted(pathlib.Path(sys.argv[1]).iterdir())]
print("| users | run | passed | skipped | failed, known | failed | seconds | CPU |\n|---|---|---|---|---|---|---|---|")
for name, *numbers in rows:
    print("|", " | ".join([name, *numbers]), "|")
print("|", " | ".join(["all", *(str(sum(map(int, column))) for column in list(zip(*rows))[1:])]), "|")
END_OF_FILE
exit "$failed"
