// Integer atomics, where the order of the additions cannot change the result, and a scan.
#include "common.cuh"

#define BINS 256

extern "C" __global__ void hist_keys(u32 *keys, u32 n, const u64 *state) {
    u32 i = global_index();
    // The keys depend on the previous step's checksum: an error anywhere spreads to the end.
    if (i < n) keys[i] = mix(i ^ (u32)(*state) ^ (u32)(*state >> 32));
}

// Counts keys by their top byte: shared memory first, then one addition for each bin and block.
extern "C" __global__ void hist_count(const u32 *keys, u32 n, u32 *bins) {
    __shared__ u32 local[BINS];
    local[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = global_index(); i < n; i += gridDim.x * blockDim.x) {
        atomicAdd(&local[keys[i] >> 24], 1u);
    }
    __syncthreads();
    if (local[threadIdx.x] != 0) atomicAdd(&bins[threadIdx.x], local[threadIdx.x]);
}

// Exclusive scan of the counts (one block of 256), and running totals over all steps.
extern "C" __global__ void hist_scan(const u32 *bins, u32 *offsets, u64 *totals) {
    __shared__ u32 sums[2][BINS];
    u32 t = threadIdx.x, at = 0;
    sums[0][t] = bins[t];
    __syncthreads();
    for (u32 d = 1; d < BINS; d <<= 1) {
        u32 s = sums[at][t];
        if (t >= d) s += sums[at][t - d];
        sums[at ^ 1][t] = s;
        at ^= 1;
        __syncthreads();
    }
    offsets[t] = sums[at][t] - bins[t];
    totals[t] += bins[t];
}

// A counting sort of the top bytes: equal values are the same, so their order is free.
extern "C" __global__ void hist_scatter(const u32 *keys, u32 n, u32 *offsets, u32 *sorted) {
    u32 i = global_index();
    if (i >= n) return;
    u32 bin = keys[i] >> 24;
    sorted[atomicAdd(&offsets[bin], 1u)] = bin;
}

// Checksum by position, reduced in shared memory; also the number of places out of order.
extern "C" __global__ void hist_check(const u32 *sorted, const u32 *keys, u32 n, u64 *state,
                                      u32 *unordered) {
    __shared__ u64 part[BINS];
    u32 t = threadIdx.x;
    u64 sum = 0;
    for (u32 i = global_index(); i < n; i += gridDim.x * blockDim.x) {
        sum += (u64)(i + 1) * sorted[i] + (u64)keys[i];
        if (i > 0 && sorted[i - 1] > sorted[i]) atomicAdd(unordered, 1u);
    }
    part[t] = sum;
    __syncthreads();
    for (u32 half = BINS / 2; half > 0; half >>= 1) {
        if (t < half) part[t] += part[t + half];
        __syncthreads();
    }
    if (t == 0) atomicAdd(state, part[0]);
}
