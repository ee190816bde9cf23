// The device is reset and used again: memory, variables, kernels, streams; also while its context is current to
// another thread.
#include "check.h"
#include <thread>

__device__ int number = 3;

__global__ void add_number(int* out) {
    *out += number;
    number += 1;
}

static int round_of_use() {
    int *out, host = 10;
    CHECK(cudaMalloc(&out, sizeof(int)));
    CHECK(cudaMemcpy(out, &host, sizeof host, cudaMemcpyHostToDevice));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    add_number<<<1, 1, 0, stream>>>(out);
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(&host, out, sizeof host, cudaMemcpyDeviceToHost));
    return host;
}

int main() {
    CHECK(cudaDeviceReset());
    EXPECT(round_of_use() == 13);
    EXPECT(round_of_use() == 14);
    size_t free_before, free_after, all;
    CHECK(cudaMemGetInfo(&free_before, &all));
    CHECK(cudaDeviceReset());
    CHECK(cudaMemGetInfo(&free_after, &all));
    EXPECT(free_after >= free_before);
    EXPECT(round_of_use() == 13);
    std::thread([] {
        CHECK(cudaFree(nullptr));
        CHECK(cudaDeviceReset());
    }).join();
    CHECK(cudaSetDevice(0));
    EXPECT(round_of_use() == 13);
    CHECK(cudaDeviceReset());
    return passed("reset");
}
