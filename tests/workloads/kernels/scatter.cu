// One write a launch into large memory that otherwise stays unchanged, through masked pointers.
#include "common.cuh"

#define MASK 0x5bd1e995a5c3963bull

// Hides the pools' addresses: nothing in `masked` looks like a pointer.
extern "C" __global__ void scatter_hide(u64 *const *pools, u64 *masked, u32 count) {
    u32 i = global_index();
    if (i < count) masked[i] = (u64)pools[i] ^ MASK;
}

// Changes one word in one of the pools, another one each time.
extern "C" __global__ void scatter_write(const u64 *masked, u32 count, u32 words, u32 step, u32 seed) {
    if (global_index() > 0) return;
    u64 *pool = (u64 *)(masked[step % count] ^ MASK);
    u64 *word = pool + mix(seed ^ mix(step)) % words;
    *word = *word * 3 + step;
}
