// Works on data that arrives from, and leaves to, page-locked host memory.
#include "common.cuh"

extern "C" __global__ void pinned_transform(const u32 *in, u32 *out, u32 *state, u32 n, u32 step) {
    u32 i = global_index();
    if (i >= n) return;
    state[i] = state[i] * 3u + in[i];
    out[i] = mix(state[i] ^ step);
}

// Reads and writes host memory directly, through its mapping into the device.
extern "C" __global__ void pinned_mapped(u32 *mapped, const u32 *state, u32 n) {
    u32 i = global_index();
    if (i < n) mapped[i] += state[i] ^ i;
}
