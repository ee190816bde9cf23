// What the kernels share. The host side repeats these functions bit for bit (`numbers.rs`), so
// floating point is written with explicit rounding intrinsics wherever the host checks exactly.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// A 32-bit bijection that scatters its input; the source of all "random" data.
__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x85ebca6bu;
    x ^= x >> 13;
    x *= 0xc2b2ae35u;
    x ^= x >> 16;
    return x;
}

// A number in [-1, 1): 24 bits of the hash, so every operation is exact.
__device__ __forceinline__ float unit(u32 h) {
    return __fsub_rn(__fmul_rn((float)(h >> 8), 1.0f / 8388608.0f), 1.0f);
}

__device__ __forceinline__ u32 global_index() { return blockIdx.x * blockDim.x + threadIdx.x; }
