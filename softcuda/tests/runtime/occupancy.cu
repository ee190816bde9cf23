// How many blocks fit a multiprocessor, and which size of blocks to choose.
#include "check.h"

__global__ void plain(float* out) { out[threadIdx.x] = 1; }

__global__ void heavy(float* out) {
    __shared__ float much[10000];
    much[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = much[(threadIdx.x + 1) % blockDim.x];
}

int main() {
    int some = 0, few = 0, grid = 0, block = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&some, plain, 128, 0));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&few, heavy, 128, 0));
    EXPECT(some > few && few >= 1);
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&some, plain, 1024, 0, cudaOccupancyDisableCachingOverride));
    EXPECT(some >= 1 && some <= 2);
    CHECK(cudaOccupancyMaxPotentialBlockSize(&grid, &block, plain, 0, 0));
    EXPECT(grid >= 1 && block >= 32 && block <= 1024);
    size_t bytes = 0;
    CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, plain, 2, 128));
    EXPECT(bytes > 0 && bytes <= 48 << 10);
    // One alone has no more either, unless the kernel asks for it.
    CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, plain, 1, 128));
    EXPECT(bytes == 48 << 10);
    CHECK(cudaFuncSetAttribute(plain, cudaFuncAttributeMaxDynamicSharedMemorySize, 64 << 10));
    CHECK(cudaOccupancyAvailableDynamicSMemPerBlock(&bytes, plain, 1, 128));
    EXPECT(bytes == 64 << 10);
    return passed("occupancy");
}
