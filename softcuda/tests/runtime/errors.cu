// Errors that pass, and errors that stay: after the reset the process has no device.
#include "check.h"
#include <cstring>

__global__ void write_to(int* where) { *where = 1; }

int main() {
    void* memory;
    GIVES(cudaMalloc(&memory, size_t(1) << 60), cudaErrorMemoryAllocation);
    GIVES(cudaPeekAtLastError(), cudaErrorMemoryAllocation);
    GIVES(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK(cudaGetLastError());
    int host = 0;
    GIVES(cudaMemcpy(&host, nullptr, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
    CHECK(cudaMalloc(&memory, 4));
    GIVES(cudaMemcpy(memory, &host, 4, static_cast<cudaMemcpyKind>(9)), cudaErrorInvalidMemcpyDirection);
    CHECK(cudaFree(nullptr));
    GIVES(cudaFree(&host), cudaErrorInvalidValue);
    (void)cudaGetLastError();
    write_to<<<1, 1>>>(static_cast<int*>(memory));
    CHECK(cudaDeviceSynchronize());

    // The context is spoiled from here on.
    write_to<<<1, 1>>>(reinterpret_cast<int*>(64));
    GIVES(cudaDeviceSynchronize(), cudaErrorIllegalAddress);
    GIVES(cudaGetLastError(), cudaErrorIllegalAddress);
    GIVES(cudaMalloc(&memory, 4), cudaErrorIllegalAddress);
    GIVES(cudaStreamQuery(0), cudaErrorIllegalAddress);
    (void)cudaDeviceReset();
    (void)cudaGetLastError();
    GIVES(cudaMalloc(&memory, 4), cudaErrorDevicesUnavailable);
    return passed("errors");
}
