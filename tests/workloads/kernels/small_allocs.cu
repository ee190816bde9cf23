// Updates many small allocations that the kernel knows only through a table of their addresses.
#include "common.cuh"

// One block for each allocation of this turn: number `first`, `first + stride`, ...
extern "C" __global__ void small_update(u32 *const *table, u32 count, u32 words, u32 first,
                                        u32 stride, u32 step) {
    u32 a = first + blockIdx.x * stride;
    if (a >= count) return;
    u32 *own = table[a];
    for (u32 i = threadIdx.x; i < words; i += blockDim.x) own[i] = mix(own[i] + step) + a;
}
