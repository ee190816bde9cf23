// Local memory: arrays that do not fit in registers, and recursion.
#include "common.cuh"

#define LOCAL_WORDS 512

// Recursion that the compiler cannot turn into a loop: both results are needed.
__device__ __noinline__ u32 tree(u32 seed, u32 depth) {
    if (depth == 0) return mix(seed);
    u32 left = tree(seed * 2 + 1, depth - 1);
    u32 right = tree(seed * 2 + 2 + (left & 1u), depth - 1);
    return (left << 1) ^ (right >> 1) ^ depth;
}

extern "C" __global__ void stack_tree(u32 *out, u32 n, u32 depth, u32 step) {
    u32 i = global_index();
    if (i < n) out[i] = tree(out[i] + step, depth);
}

// Fills a local array, walks it in an order that depends on the data, folds it.
extern "C" __global__ void stack_array(u32 *out, u32 n, u32 rounds) {
    u32 i = global_index();
    if (i >= n) return;
    u32 local[LOCAL_WORDS];
    u32 x = out[i];
    for (u32 k = 0; k < LOCAL_WORDS; k++) {
        x = x * 1664525u + 1013904223u;
        local[k] = x;
    }
    u32 at = x % LOCAL_WORDS;
    for (u32 r = 0; r < rounds; r++) {
        u32 v = local[at];
        local[at] = v * 5u + r;
        at = (v >> 7) % LOCAL_WORDS;
        x ^= v;
    }
    out[i] = x + local[x % LOCAL_WORDS];
}
