// Heat flow on a grid with fixed edges.
#include "common.cuh"

extern "C" __global__ void heat_init(float *grid, u32 width, u32 height, u32 seed) {
    u32 x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x < width && y < height) grid[y * width + x] = unit(mix(seed + y * width + x));
}

extern "C" __global__ void heat_step(const float *from, float *to, u32 width, u32 height,
                                     float rate) {
    u32 x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= width || y >= height) return;
    u32 i = y * width + x;
    float c = from[i];
    if (x > 0 && y > 0 && x + 1 < width && y + 1 < height) {
        float around = __fadd_rn(__fadd_rn(from[i - 1], from[i + 1]),
                                 __fadd_rn(from[i - width], from[i + width]));
        c = __fmaf_rn(rate, __fmaf_rn(-4.0f, c, around), c);
    }
    to[i] = c;
}
