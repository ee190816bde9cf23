// What is known of kernels, and what can be set.
#include "check.h"
#include <cstring>

__global__ void __launch_bounds__(256) bounded(int* out, double factor, char flag) {
    __shared__ int part[100];
    part[threadIdx.x % 100] = static_cast<int>(factor) + flag;
    __syncthreads();
    out[threadIdx.x] = part[0];
}

extern "C" __global__ void named(int* out) {
    extern __shared__ int dynamic[];
    dynamic[threadIdx.x] = static_cast<int>(threadIdx.x);
    __syncthreads();
    out[threadIdx.x] = dynamic[blockDim.x - 1 - threadIdx.x];
}

int main() {
    cudaFuncAttributes attributes;
    CHECK(cudaFuncGetAttributes(&attributes, bounded));
    EXPECT(attributes.sharedSizeBytes == 400 && attributes.maxThreadsPerBlock == 256);
    EXPECT(attributes.numRegs > 0 && attributes.ptxVersion >= 50 && attributes.binaryVersion >= 50);
    CHECK(cudaFuncGetAttributes(&attributes, named));
    EXPECT(attributes.maxThreadsPerBlock == 1024 && attributes.sharedSizeBytes == 0);
    int* out;
    CHECK(cudaMalloc(&out, 1024 * sizeof(int)));
    named<<<1, 1024, 60000>>>(out);
    GIVES(cudaGetLastError(), cudaErrorInvalidValue);
    CHECK(cudaFuncSetAttribute(named, cudaFuncAttributeMaxDynamicSharedMemorySize, 60000));
    CHECK(cudaFuncGetAttributes(&attributes, named));
    EXPECT(attributes.maxDynamicSharedSizeBytes == 60000);
    named<<<1, 1024, 60000>>>(out);
    CHECK(cudaDeviceSynchronize());
    int host[1024];
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 1023 && host[1023] == 0);
    CHECK(cudaFuncSetCacheConfig(named, cudaFuncCachePreferShared));
    CHECK(cudaFuncSetAttribute(named, cudaFuncAttributePreferredSharedMemoryCarveout, 50));
    const char* name;
    CHECK(cudaFuncGetName(&name, reinterpret_cast<void*>(named)));
    EXPECT(std::strcmp(name, "named") == 0);
    size_t offset, size;
    CHECK(cudaFuncGetParamInfo(reinterpret_cast<void*>(bounded), 1, &offset, &size));
    EXPECT(offset == 8 && size == 8);
    cudaFunction_t function;
    CHECK(cudaGetFuncBySymbol(&function, reinterpret_cast<void*>(named)));
    EXPECT(function != nullptr);
    EXPECT(cudaFuncGetAttributes(&attributes, static_cast<const void*>(&out)) != cudaSuccess);
    return passed("function_attributes");
}
