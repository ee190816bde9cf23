// Clusters of several blocks: shared memory of all of them, barriers, launches with attributes and with shapes that
// kernels have.
// flags: -gencode arch=compute_90,code=compute_90
// environment: SOFTCUDA_DEVICE=softcuda,9.0,8,4G
#include "check.h"
#include <cooperative_groups.h>

namespace cg = cooperative_groups;

constexpr int BINS = 64, THREADS = 128;

/// A histogram whose bins are spread over the blocks of a cluster.
__global__ void histogram(const int* values, int count, int* bins) {
    extern __shared__ int own[];
    cg::cluster_group cluster = cg::this_cluster();
    int each = BINS / static_cast<int>(cluster.num_blocks());
    for (int i = threadIdx.x; i < each; i += THREADS) {
        own[i] = 0;
    }
    cluster.sync();
    for (int i = cg::this_grid().thread_rank(); i < count; i += THREADS * gridDim.x) {
        int* bin = cluster.map_shared_rank(own, values[i] / each) + values[i] % each;
        atomicAdd(bin, 1);
    }
    cluster.sync();
    for (int i = threadIdx.x; i < each; i += THREADS) {
        atomicAdd(&bins[cluster.block_rank() * each + i], own[i]);
    }
}

/// Each block passes a value to the next one of its cluster.
__global__ void __cluster_dims__(2, 2, 1) pass(int* got, unsigned* ranks) {
    __shared__ int from;
    cg::cluster_group cluster = cg::this_cluster();
    unsigned rank = cluster.block_rank(), next = (rank + 1) % cluster.num_blocks();
    unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    if (threadIdx.x == 0) {
        *cluster.map_shared_rank(&from, next) = static_cast<int>(block);
    }
    cg::cluster_group::arrival_token token = cluster.barrier_arrive();
    cluster.barrier_wait(static_cast<cg::cluster_group::arrival_token&&>(token));
    if (threadIdx.x == 0) {
        got[block] = from;
        ranks[block] = cluster.query_shared_rank(cluster.map_shared_rank(&from, next)) * 100 + rank;
    }
    cluster.sync();
}

static void spread(int* values, int count, int* bins, unsigned size) {
    CHECK(cudaMemset(bins, 0, BINS * sizeof(int)));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(16);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = BINS * sizeof(int);
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int most = 0, active = 0;
    CHECK(cudaOccupancyMaxPotentialClusterSize(&most, histogram, &config));
    EXPECT(most >= static_cast<int>(size));
    CHECK(cudaOccupancyMaxActiveClusters(&active, histogram, &config));
    EXPECT(active > 0);
    CHECK(cudaLaunchKernelEx(&config, histogram, static_cast<const int*>(values), count, bins));
    int host[BINS];
    CHECK(cudaMemcpy(host, bins, sizeof host, cudaMemcpyDeviceToHost));
    for (int bin = 0; bin < BINS; bin++) {
        EXPECT(host[bin] == count / BINS);
    }
}

int main() {
    constexpr int count = 100 * BINS;
    static int host[count];
    for (int i = 0; i < count; i++) {
        host[i] = i * 7 % BINS;
    }
    int device = 0, supported = 0, *values, *bins;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrClusterLaunch, device));
    EXPECT(supported == 1);
    CHECK(cudaMalloc(&values, sizeof host));
    CHECK(cudaMalloc(&bins, BINS * sizeof(int)));
    CHECK(cudaMemcpy(values, host, sizeof host, cudaMemcpyHostToDevice));
    for (unsigned size : {1, 2, 4, 8}) {
        spread(values, count, bins, size);
    }
    CHECK(cudaFuncSetAttribute(histogram, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    spread(values, count, bins, 16);

    int got[32];
    unsigned ranks[32], *seen;
    CHECK(cudaMalloc(&seen, sizeof ranks));
    pass<<<dim3(8, 4), 64>>>(bins, seen);
    CHECK(cudaMemcpy(got, bins, sizeof got, cudaMemcpyDeviceToHost));
    CHECK(cudaMemcpy(ranks, seen, sizeof ranks, cudaMemcpyDeviceToHost));
    for (unsigned block = 0; block < 32; block++) {
        unsigned x = block % 8, y = block / 8, rank = x % 2 + y % 2 * 2, before = (rank + 3) % 4;
        EXPECT(ranks[block] == (rank + 1) % 4 * 100 + rank);
        EXPECT(got[block] == static_cast<int>((y / 2 * 2 + before / 2) * 8 + x / 2 * 2 + before % 2));
    }
    pass<<<dim3(8, 3), 64>>>(bins, seen);
    GIVES(cudaGetLastError(), cudaErrorInvalidClusterSize);
    return passed("clusters");
}
