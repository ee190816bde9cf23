// Each stream's buffer becomes a function of itself and of its two neighbours.
#include "common.cuh"

extern "C" __global__ void ring_step(const u32 *left, const u32 *own, const u32 *right, u32 *out,
                                     u32 n, u32 step) {
    u32 i = global_index();
    if (i >= n) return;
    out[i] = mix(own[i] ^ step) + left[(i + 1) % n] * 3u + right[(i + n - 1) % n];
}
