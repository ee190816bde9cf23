// Kernels whose writes are hard to tell from their arguments.
#include "common.cuh"

#define MASK 0x9d39247e33776d41ull
#define CHUNK_WORDS (1u << 18) // 2 MiB

// Changes 32 words of a pool that follow each other, somewhere; 32 threads.
__device__ __forceinline__ void touch(u64 *pool, u32 words, u32 step, u32 seed) {
    u32 t = threadIdx.x;
    u64 *word = pool + mix(seed ^ mix(step)) % (words / 32) * 32 + t;
    *word = *word * 3 + step + t;
}

// The plain one, for graphs and streams.
extern "C" __global__ void adversary_write(u64 *pool, u32 words, u32 step, u32 seed) {
    touch(pool, words, step, seed);
}

// The pointer comes as two numbers, neither of which is a half of it.
extern "C" __global__ void adversary_halves(u32 a, u32 b, u32 words, u32 step, u32 seed) {
    u32 low = a ^ mix(step);
    u32 high = b ^ mix(low);
    touch((u64 *)((u64)high << 32 | low), words, step, seed);
}

// Rotates a table of pointers in place, then writes through its first entry.
extern "C" __global__ void adversary_permute(u64 **table, u32 count, u32 words, u32 step, u32 seed) {
    u32 t = threadIdx.x;
    u32 by = 1 + mix(step) % (count - 1);
    u64 *entry = t < count ? table[(t + by) % count] : 0;
    __syncthreads();
    if (t < count) table[t] = entry;
    __syncthreads();
    touch(table[0], words, step, seed);
}

extern "C" __global__ void adversary_hide(u64 *const *pools, u64 *masked, u32 count) {
    u32 i = global_index();
    if (i < count) masked[i] = (u64)pools[i] ^ MASK;
}

// Every launch has the same arguments, and writes elsewhere: where, it counts in device memory.
extern "C" __global__ void adversary_shift(u32 *cursor, const u64 *masked, u32 count, u32 words, u32 seed) {
    u32 step = *cursor;
    touch((u64 *)(masked[mix(step) % count] ^ MASK), words, step, seed);
    __syncthreads();
    if (threadIdx.x == 0) *cursor = step + 1;
}

// The name (with its types, as this one is mangled) promises that the pool is only read.
__global__ void adversary_const(const u64 *pool, u32 words, u32 step, u32 seed) {
    touch((u64 *)pool, words, step, seed);
}

// One word of every chunk of every pool.
extern "C" __global__ void adversary_everywhere(const u64 *masked, u32 count, u32 words, u32 step) {
    u32 chunks = words / CHUNK_WORDS, i = global_index();
    if (i >= count * chunks) return;
    u64 *pool = (u64 *)(masked[i / chunks] ^ MASK);
    u64 *word = pool + i % chunks * CHUNK_WORDS + mix(step + i) % CHUNK_WORDS;
    *word = *word * 3 + step;
}

// Writes without pause until the host raises the flag; only then do the words get the values that
// they keep. 32 threads.
extern "C" __global__ void adversary_long(u64 *pool, u32 words, volatile u32 *flag, u32 step) {
    u32 t = threadIdx.x;
    for (u32 i = 0; *flag != step + 1; i++) pool[(i * 32 + t) % words] = i;
    for (u32 i = t; i < words; i += 32) pool[i] = (u64)mix(step ^ mix(i)) << 32 | i;
}

// Takes words of a pool into a state of 32 words; 32 threads.
extern "C" __global__ void adversary_read(u64 *state, const u64 *pool, u32 words, u32 step) {
    u32 t = threadIdx.x;
    state[t] = state[t] * 31 + pool[mix(step ^ mix(t)) % words];
}

// Writes to a word what is there, through a pointer that no argument shows. One thread.
extern "C" __global__ void adversary_stamp(const u64 *masked, u32 pool, u32 words, u32 step) {
    volatile u64 *word = (volatile u64 *)(masked[pool] ^ MASK) + mix(step) % words;
    *word = *word;
}
