// Threads of the host that use the runtime at the same time, each with its stream, on two devices.
// environment: SOFTCUDA_DEVICES=2
#include "check.h"
#include <thread>
#include <vector>

__device__ int visits;

static void work(int index) {
    CHECK(cudaSetDevice(index % 2));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *values, host[500];
    for (int round = 0; round < 20; round++) {
        CHECK(cudaMalloc(&values, sizeof host));
        CHECK(cudaMemsetAsync(values, 0, sizeof host, stream));
        add_to_all<<<2, 256, 0, stream>>>(values, 500, index * 1000 + round);
        CHECK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, stream));
        CHECK(cudaStreamSynchronize(stream));
        EXPECT(host[0] == index * 1000 + round && host[499] == host[0]);
        CHECK(cudaFree(values));
    }
    // The last error belongs to the thread.
    void* too_much;
    GIVES(cudaMalloc(&too_much, size_t(1) << 60), cudaErrorMemoryAllocation);
    CHECK(cudaStreamDestroy(stream));
}

int main() {
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; i++) {
        threads.emplace_back(work, i);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(cudaGetLastError());
    int device = -1;
    CHECK(cudaGetDevice(&device));
    EXPECT(device == 0);
    // Each device has variables of its own.
    int five = 5, read = -1;
    CHECK(cudaMemcpyToSymbol(visits, &five, sizeof five));
    CHECK(cudaSetDevice(1));
    CHECK(cudaMemcpyFromSymbol(&read, visits, sizeof read));
    EXPECT(read == 0);
    return passed("threads");
}
