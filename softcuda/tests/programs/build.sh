#!/bin/sh
# Rebuilds programs.ptx, which is kept in the repository so that testing needs no CUDA toolkit.
#
#   NVCC=/path/to/nvcc softcuda/tests/programs/build.sh
#
# nvcc 13.0.x. Extra options (an include folder, say) go into NVCC_FLAGS. Without contraction every
# operation is one of IEEE 754, so that results are the same bit for bit wherever no approximate
# function takes part.
set -eu
cd "$(dirname "$0")"
: "${NVCC:?set NVCC to the nvcc to use (13.0.x)}"
# shellcheck disable=SC2086 # several options may be given
"$NVCC" -ptx -arch=sm_80 -O3 -fmad=false ${NVCC_FLAGS:-} -o programs.ptx programs.cu
