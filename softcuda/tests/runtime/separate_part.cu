// The other file of separate.cu.
#include "check.h"

__device__ int shared_by_files = 8;
__constant__ int factor_of_files;
__device__ int in_other_file(int value) { return value * 10; }
__device__ int six_times(int value) { return value * 6; }
typedef int (*Function)(int);
__device__ Function chosen = six_times;

__global__ void there(int* out) {
    shared_by_files += 1;
    *out = shared_by_files;
}

void launch_other(int* out) {
    there<<<1, 1>>>(out);
    CHECK(cudaGetLastError());
}
