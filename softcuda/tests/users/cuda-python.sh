#!/bin/sh
# Runs our own programs on NVIDIA's Python packages cuda-bindings (bindings.py) and cuda-core (test_cuda_core.py) on
# softcuda. The packages on PyPI have no tests of their own.
#
#   softcuda/tests/users/cuda-python.sh [FOLDER]
#
# See begin.sh for FOLDER and what is needed. The exit status is 1 if any did not pass.
. "$(dirname "$0")/begin.sh"
mkdir -p "$folder/cuda-python"
cd "$folder/cuda-python"
: > known.txt
export PYTHONDONTWRITEBYTECODE=1
tested cuda-python known.txt --rootdir "$here" --timeout 120 "$here/test_bindings.py" "$here/test_cuda_core.py"
exit "$failed"
