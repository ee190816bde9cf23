#!/bin/sh
# Rebuilds the PTX beside each kernel source. Needed only after a change to a .cu file: the PTX is
# kept in the repository, so that building and testing need no CUDA toolkit.
#
#   NVCC=/path/to/nvcc tests/workloads/kernels/build.sh
#
# nvcc 13.0.x: a newer one would write a PTX version that driver 580 does not accept. Extra
# options for it (an include folder, say) go into NVCC_FLAGS.
set -eu
cd "$(dirname "$0")"
: "${NVCC:?set NVCC to the nvcc to use (13.0.x)}"
for source in *.cu; do
    # Older devices have no multicast.
    case $source in multicast.cu) arch=sm_90 ;; *) arch=sm_75 ;; esac
    # shellcheck disable=SC2086 # several options may be given
    "$NVCC" -ptx -arch="$arch" -O3 ${NVCC_FLAGS:-} -o "${source%.cu}.ptx" "$source"
done
