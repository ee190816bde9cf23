// Shared memory, static and dynamic, with barriers and atomics.
#include "check.h"

__global__ void reverse(int* values) {
    __shared__ int part[256];
    part[threadIdx.x] = values[threadIdx.x];
    __syncthreads();
    values[threadIdx.x] = part[255 - threadIdx.x];
}

__global__ void histogram(const int* values, int count, int* bins, int n) {
    extern __shared__ int local[];
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        local[i] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        atomicAdd(&local[values[i] % n], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        bins[i] = local[i];
    }
}

__global__ void sum(const float* values, float* out) {
    float mine = values[threadIdx.x];
    for (int step = 16; step > 0; step /= 2) {
        mine += __shfl_down_sync(0xffffffff, mine, step);
    }
    if (threadIdx.x % 32 == 0) {
        atomicAdd(out, mine);
    }
}

int main() {
    int host[1000], *values, *bins;
    for (int i = 0; i < 1000; i++) {
        host[i] = i;
    }
    CHECK(cudaMalloc(&values, sizeof host));
    CHECK(cudaMalloc(&bins, sizeof host));
    CHECK(cudaMemcpy(values, host, sizeof host, cudaMemcpyHostToDevice));
    reverse<<<1, 256>>>(values);
    histogram<<<1, 128, 10 * sizeof(int)>>>(values, 1000, bins, 10);
    CHECK(cudaMemcpy(host, values, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 255 && host[255] == 0 && host[256] == 256);
    CHECK(cudaMemcpy(host, bins, 10 * sizeof(int), cudaMemcpyDeviceToHost));
    for (int i = 0; i < 10; i++) {
        EXPECT(host[i] == 100);
    }
    float *numbers, *out, result, ones[128];
    for (float& one : ones) {
        one = 0.5f;
    }
    CHECK(cudaMalloc(&numbers, sizeof ones));
    CHECK(cudaMalloc(&out, sizeof(float)));
    CHECK(cudaMemcpy(numbers, ones, sizeof ones, cudaMemcpyHostToDevice));
    CHECK(cudaMemset(out, 0, sizeof(float)));
    sum<<<1, 128>>>(numbers, out);
    CHECK(cudaMemcpy(&result, out, sizeof result, cudaMemcpyDeviceToHost));
    EXPECT(result == 64.0f);
    return passed("shared");
}
