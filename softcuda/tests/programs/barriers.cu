// Barriers and pipelines of libcu++, for the tests of softcuda. See build.sh and
// ../instructions/barriers.rs.

#include <cooperative_groups.h>
#include <cuda/barrier>
#include <cuda/pipeline>

namespace cg = cooperative_groups;
using barrier = cuda::barrier<cuda::thread_scope_block>;

// Each thread reads what another wrote in the same phase.
extern "C" __global__ void phases(int *out, int rounds)
{
    __shared__ barrier bar;
    __shared__ int cells[128];
    if (threadIdx.x == 0) {
        init(&bar, blockDim.x);
    }
    __syncthreads();
    int sum = 0;
    for (int round = 0; round < rounds; round++) {
        cells[threadIdx.x] = round * 1000 + threadIdx.x;
        bar.wait(bar.arrive());
        sum += cells[(threadIdx.x + 37 + round) % blockDim.x];
        bar.arrive_and_wait();
    }
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Doubles tiles of 256 numbers, each turned around, while the next one is copied.
extern "C" __global__ void pipeline(const int *in, int *out, int tiles)
{
    __shared__ alignas(16) int stage[2][256];
    __shared__ cuda::pipeline_shared_state<cuda::thread_scope_block, 2> state;
    auto group = cg::this_thread_block();
    auto pipe = cuda::make_pipeline(group, &state);
    auto fetch = [&](int tile) {
        pipe.producer_acquire();
        cuda::memcpy_async(group, stage[tile & 1], in + 256 * tile, cuda::aligned_size_t<16>(1024), pipe);
        pipe.producer_commit();
    };
    fetch(0);
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) {
            fetch(tile + 1);
        }
        pipe.consumer_wait();
        for (int i = threadIdx.x; i < 256; i += blockDim.x) {
            out[tile * 256 + i] = 2 * stage[tile & 1][255 - i];
        }
        pipe.consumer_release();
    }
}

// A copy that a barrier waits for.
extern "C" __global__ void copy(const int *in, int *out)
{
    __shared__ barrier bar;
    __shared__ alignas(16) int stage[256];
    if (threadIdx.x == 0) {
        init(&bar, blockDim.x);
    }
    __syncthreads();
    cuda::memcpy_async(cg::this_thread_block(), stage, in + 256 * blockIdx.x, cuda::aligned_size_t<16>(1024), bar);
    bar.arrive_and_wait();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
        out[256 * blockIdx.x + i] = stage[255 - i] + 1;
    }
}

// A bulk copy in, which a barrier counts in bytes, and a bulk copy out.
extern "C" __global__ void bulk(const int *in, int *out)
{
#if __CUDA_ARCH__ >= 900
    __shared__ barrier bar;
    __shared__ alignas(128) int stage[256];
    if (threadIdx.x == 0) {
        init(&bar, blockDim.x);
        cuda::device::experimental::fence_proxy_async_shared_cta();
    }
    __syncthreads();
    barrier::arrival_token token;
    if (threadIdx.x == 0) {
        cuda::device::memcpy_async_tx(stage, in + 256 * blockIdx.x, cuda::aligned_size_t<16>(1024), bar);
        token = cuda::device::barrier_arrive_tx(bar, 1, 1024);
    } else {
        token = bar.arrive();
    }
    bar.wait(std::move(token));
    for (int i = threadIdx.x; i < 256; i += blockDim.x) {
        stage[i] = 3 * stage[i] + i;
    }
    cuda::device::experimental::fence_proxy_async_shared_cta();
    __syncthreads();
    if (threadIdx.x == 0) {
        cuda::device::experimental::cp_async_bulk_shared_to_global(out + 256 * blockIdx.x, stage, 1024);
        cuda::device::experimental::cp_async_bulk_commit_group();
        cuda::device::experimental::cp_async_bulk_wait_group_read<0>();
    }
#endif
}

// What a cluster of one block can do with itself.
extern "C" __global__ void cluster(int *out)
{
#if __CUDA_ARCH__ >= 900
    __shared__ int cells[128];
    auto cluster = cg::this_cluster();
    cells[threadIdx.x] = threadIdx.x * 3 + cluster.num_blocks();
    cluster.sync();
    int *mapped = cluster.map_shared_rank(cells, cluster.block_rank());
    int value = mapped[blockDim.x - 1 - threadIdx.x] + 1000 * cluster.query_shared_rank(mapped);
    auto token = cluster.barrier_arrive();
    cluster.barrier_wait(std::move(token));
    cells[threadIdx.x] = value + cluster.thread_rank();
    cluster.sync();
    out[blockIdx.x * blockDim.x + threadIdx.x] = cells[threadIdx.x ^ 1];
#endif
}
