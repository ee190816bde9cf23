// Small integer kernels that several workloads use to put state on the device and to test it.
#include "common.cuh"

// Word i of a buffer becomes a function of the tag and of i.
extern "C" __global__ void mixer_fill(u32 *words, u32 n, u32 tag) {
    u32 i = global_index();
    if (i < n) words[i] = mix(tag + i);
}

// One round over a buffer; each word depends on its old value.
extern "C" __global__ void mixer_round(u32 *words, u32 n, u32 round) {
    u32 i = global_index();
    if (i < n) words[i] = mix(words[i] + round) ^ i;
}

// Adds a checksum of the words to *sum (integers: the order does not matter).
extern "C" __global__ void mixer_sum(const u32 *words, u32 n, u64 *sum) {
    u64 part = 0;
    for (u32 i = global_index(); i < n; i += gridDim.x * blockDim.x) {
        part += (u64)words[i] * (2 * (u64)i + 1);
    }
    for (u32 m = 16; m > 0; m >>= 1) part += __shfl_xor_sync(0xffffffffu, part, m);
    if ((threadIdx.x & 31) == 0) atomicAdd(sum, part);
}
