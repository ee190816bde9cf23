// Launches with attributes.
#include "check.h"
#include <cooperative_groups.h>

__global__ void sums(int* a, int* b) {
    cooperative_groups::grid_group grid = cooperative_groups::this_grid();
    int i = static_cast<int>(grid.thread_rank());
    a[i] = i;
    grid.sync();
    b[i] = a[static_cast<int>(grid.size()) - 1 - i];
}

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *a, *b, host[64];
    CHECK(cudaMalloc(&a, sizeof host));
    CHECK(cudaMalloc(&b, sizeof host));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(2);
    config.blockDim = dim3(32);
    config.stream = stream;
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeCooperative;
    attributes[0].val.cooperative = 1;
    attributes[1].id = cudaLaunchAttributePriority;
    attributes[1].val.priority = 0;
    config.attrs = attributes;
    config.numAttrs = 2;
    CHECK(cudaLaunchKernelEx(&config, sums, a, b));
    CHECK(cudaMemcpyAsync(host, b, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(host[0] == 63 && host[63] == 0);

    config.numAttrs = 0;
    int count = 64, seven = 7;
    void* arguments[] = {&a, &count, &seven};
    CHECK(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(add_to_all<int>), arguments));
    CHECK(cudaMemcpyAsync(host, a, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(host[0] == 7 && host[63] == 70);
    return passed("launch_ex");
}
