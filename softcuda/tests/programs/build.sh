#!/bin/sh
# Rebuilds the PTX here, which is kept in the repository so that testing needs no CUDA toolkit.
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
# Barriers are other instructions on each architecture.
for architecture in 80 90; do
    # shellcheck disable=SC2086
    "$NVCC" -ptx -arch=sm_$architecture -O3 -fmad=false -std=c++17 -diag-suppress 20054 ${NVCC_FLAGS:-} \
        -o barriers_$architecture.ptx barriers.cu
done
