// Cooperative groups: a grid that waits for itself, tiles of warps, and launches that are too large for that.
#include "check.h"
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>

namespace cg = cooperative_groups;

// Each round every block adds what its neighbour had in the round before.
__global__ void rounds(int* a, int* b, int count) {
    cg::grid_group grid = cg::this_grid();
    int i = static_cast<int>(grid.thread_rank());
    for (int round = 0; round < count; round++) {
        int blocks = static_cast<int>(grid.size());
        b[i] = a[i] + a[(i + blockDim.x) % blocks];
        grid.sync();
        a[i] = b[i];
        grid.sync();
    }
}

__global__ void tiles(int* out) {
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<16>(block);
    int sum = cg::reduce(tile, static_cast<int>(threadIdx.x), cg::plus<int>());
    if (tile.thread_rank() == 0) {
        out[tile.meta_group_rank()] = sum;
    }
    auto active = cg::coalesced_threads();
    if (threadIdx.x == 0) {
        out[4] = static_cast<int>(active.size());
    }
}

int main() {
    int supported = 0;
    CHECK(cudaDeviceGetAttribute(&supported, cudaDevAttrCooperativeLaunch, 0));
    EXPECT(supported == 1);
    int blocks = 2, threads = 32, count = 3;
    int *a, *b, host[64];
    CHECK(cudaMalloc(&a, sizeof host));
    CHECK(cudaMalloc(&b, sizeof host));
    for (int i = 0; i < 64; i++) {
        host[i] = i / threads + 1;
    }
    CHECK(cudaMemcpy(a, host, sizeof host, cudaMemcpyHostToDevice));
    void* arguments[] = {&a, &b, &count};
    CHECK(cudaLaunchCooperativeKernel(rounds, dim3(blocks), dim3(threads), arguments, 0, nullptr));
    CHECK(cudaMemcpy(host, a, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 12 && host[63] == 12);
    GIVES(cudaLaunchCooperativeKernel(rounds, dim3(1000000), dim3(1024), arguments, 0, nullptr),
          cudaErrorCooperativeLaunchTooLarge);
    (void)cudaGetLastError();

    tiles<<<1, 64>>>(a);
    CHECK(cudaMemcpy(host, a, 5 * sizeof(int), cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 120 && host[3] == 120 + 16 * 48 && host[4] == 32);
    return passed("cooperative");
}
