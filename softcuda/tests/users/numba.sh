#!/bin/sh
# Runs the whole test suite of numba-cuda, as its package on PyPI has it, on softcuda.
#
#   softcuda/tests/users/numba.sh [FOLDER [TEST...]]
#
# TEST is a file, class or name as pytest takes it (numba.cuda.tests.cudadrv, for instance); all tests if none is
# named. See begin.sh for FOLDER and what is needed. Two tests run at a time; each has 300 s.
# What is known not to run is named below, with the reason; anything else that fails ends the script
# with exit status 1.
. "$(dirname "$0")/begin.sh"
mkdir -p "$folder/numba"
cd "$folder/numba"

# What the tests expect of the settings of their own repository, which the package does not have.
cat > pytest.ini <<'END_OF_FILE'
[pytest]
consider_namespace_packages = true
END_OF_FILE
cat > numba_option.py <<'END_OF_FILE'
import pytest


@pytest.fixture(scope="class")
def initialize_from_pytest_config(request):
    request.cls._dump_failed_filechecks = False
END_OF_FILE

# CuPy is there, and compiles to PTX so; what it has of cuRAND is PTX for another device.
export CUPY_COMPILE_WITH_PTX=1 CUPY_CACHE_DIR="$folder/numba/cupy"
cat > known.txt <<'END_OF_FILE'
# It fills an array by cuRAND, which has PTX for the newest architecture only.
TestCudaArrayInterface::test_fortran_contiguous$
# What numba keeps for the processor and what it keeps for the device do not find each other; no driver takes part.
CUDAAndCPUCachingTest::test_cpu_and_cuda_(reuse|targets)$
END_OF_FILE

[ $# -gt 0 ] || set -- numba.cuda.tests
export PYTHONPATH="$folder/numba"
tested numba "$folder/numba/known.txt" --dist loadscope --timeout 300 --benchmark-disable -p numba_option --pyargs "$@"
exit "$failed"
