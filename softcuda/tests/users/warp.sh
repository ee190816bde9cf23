#!/bin/sh
# Runs NVIDIA Warp's tests, which its wheel has (warp.tests), on softcuda, unchanged.
#
#   softcuda/tests/users/warp.sh [FOLDER [MODULE...]]
#
# MODULE is a module below warp.tests; all of the list below if none is named. Of a module those tests run that have
# `cuda` in their names: each test is there once for every device, and those on the processor never call the driver.
# See begin.sh for FOLDER and what is needed.
#
# Warp 1.19 is built with CUDA 13.4, whose NVRTC, part of Warp, writes PTX 9.4: the driver is one that takes it.
# Warp's own kernels (CUB's scans and sorts, NanoVDB) are there as PTX; those of the tests are compiled to PTX.
#
# What is known not to run is named below, with the reason; anything else that fails ends the script with exit status
# 1. Each test has 120 s.
. "$(dirname "$0")/begin.sh"
export SOFTCUDA_DRIVER=13.4 WARP_CACHE_PATH="$folder/warp/cache"
mkdir -p "$folder/warp"
cd "$folder/warp"
MODULES
