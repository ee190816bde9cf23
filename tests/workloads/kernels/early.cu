// The module that is there from the start. Its state lives in a variable of the module.
#include "common.cuh"

__device__ u64 early_total = 5;
__device__ u32 early_ring[64];

extern "C" __global__ void early_step(u32 *words, u32 n, u32 step) {
    u32 i = global_index();
    if (i >= n) return;
    words[i] = mix(words[i] ^ step);
    atomicAdd(&early_total, (u64)words[i]);
    atomicXor(&early_ring[i % 64], words[i]);
}
