// One decode step of a single attention layer with a KV cache. The embedding is split into heads
// of 32, so that one warp serves one head's dimension.
#include "common.cuh"

#define HEAD 32

// q, k and v of one token: three matrix-vector products; k and v go into the caches' row `t`.
extern "C" __global__ void attn_project(const float *x, const float *wq, const float *wk,
                                        const float *wv, float *q, float *k_cache, float *v_cache,
                                        u32 n, u32 t) {
    u32 i = global_index();
    if (i >= 3 * n) return;
    u32 which = i / n, o = i % n;
    const float *w = which == 0 ? wq : which == 1 ? wk : wv;
    float sum = 0.0f;
    for (u32 j = 0; j < n; j++) sum += x[(u64)t * n + j] * w[(u64)j * n + o];
    if (which == 0) q[o] = sum;
    if (which == 1) k_cache[(u64)t * n + o] = sum;
    if (which == 2) v_cache[(u64)t * n + o] = sum;
}

// One block of 128 threads for each head: scores, softmax, weighted sum of the cached values.
extern "C" __global__ void attn_attend(const float *q, const float *k_cache, const float *v_cache,
                                       float *out, u32 n, u32 t) {
    extern __shared__ float score[];
    __shared__ float warp_part[4];
    u32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    u32 base = blockIdx.x * HEAD;
    float top = -3.0e38f;
    for (u32 p = tid; p <= t; p += 128) {
        float s = 0.0f;
        for (u32 d = 0; d < HEAD; d++) s += q[base + d] * k_cache[(u64)p * n + base + d];
        s *= rsqrtf((float)HEAD);
        score[p] = s;
        top = fmaxf(top, s);
    }
    for (u32 m = 16; m > 0; m >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, m));
    if (lane == 0) warp_part[warp] = top;
    __syncthreads();
    top = fmaxf(fmaxf(warp_part[0], warp_part[1]), fmaxf(warp_part[2], warp_part[3]));
    __syncthreads();
    float sum = 0.0f;
    for (u32 p = tid; p <= t; p += 128) {
        float e = __expf(score[p] - top);
        score[p] = e;
        sum += e;
    }
    for (u32 m = 16; m > 0; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
    if (lane == 0) warp_part[warp] = sum;
    __syncthreads();
    float norm = 1.0f / (warp_part[0] + warp_part[1] + warp_part[2] + warp_part[3]);
    if (tid < HEAD) {
        float acc = 0.0f;
        for (u32 p = 0; p <= t; p++) acc += score[p] * v_cache[(u64)p * n + base + tid];
        out[base + tid] = acc * norm;
    }
}

// The next token: output projection, residual, a seeded "embedding", RMS norm (one block of 128).
extern "C" __global__ void attn_next(const float *attended, const float *wo, float *x, float *norms,
                                     u32 n, u32 t, u32 seed) {
    __shared__ float warp_part[4];
    extern __shared__ float row[];
    u32 tid = threadIdx.x;
    float squares = 0.0f;
    for (u32 o = tid; o < n; o += 128) {
        float sum = x[(u64)t * n + o] + unit(mix(seed + t * n + o));
        for (u32 j = 0; j < n; j++) sum += attended[j] * wo[(u64)j * n + o];
        row[o] = sum;
        squares += sum * sum;
    }
    for (u32 m = 16; m > 0; m >>= 1) squares += __shfl_xor_sync(0xffffffffu, squares, m);
    if ((tid & 31) == 0) warp_part[tid >> 5] = squares;
    __syncthreads();
    float mean = (warp_part[0] + warp_part[1] + warp_part[2] + warp_part[3]) / (float)n;
    float scale = rsqrtf(mean + 1.0e-6f);
    for (u32 o = tid; o < n; o += 128) x[(u64)(t + 1) * n + o] = row[o] * scale;
    if (tid == 0) norms[t] = mean;
}
