// Launches: grids of one to three dimensions, arguments of all kinds, templates, and what is refused.
#include "check.h"

struct Packed {
    char letter;
    double factor;
    int offsets[5];
};

__global__ void places(int* out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int i = block * blockDim.x * blockDim.y * blockDim.z + thread;
    out[i] = i * 3 + 1;
}

__global__ void mixed(char a, short b, Packed packed, double* out, bool flag, float4 vector) {
    out[0] = a + b + packed.letter + packed.factor + packed.offsets[4] + (flag ? 0.5 : 0) + vector.w;
}

template <typename T, int N> __global__ void templated(T* out) { out[threadIdx.x] = T(threadIdx.x * N); }

__global__ void nothing() {}

int main() {
    const int count = 2 * 3 * 4 * 5 * 6 * 7;
    int* device;
    CHECK(cudaMalloc(&device, count * sizeof(int)));
    places<<<dim3(2, 3, 4), dim3(5, 6, 7)>>>(device);
    CHECK(cudaGetLastError());
    static int host[count];
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    for (int i = 0; i < count; i++) {
        EXPECT(host[i] == i * 3 + 1);
    }

    double* number;
    CHECK(cudaMalloc(&number, sizeof(double)));
    mixed<<<1, 1>>>(1, 20, Packed{3, 0.25, {0, 0, 0, 0, 4000}}, number, true, make_float4(0, 0, 0, 100));
    double back;
    CHECK(cudaMemcpy(&back, number, sizeof back, cudaMemcpyDeviceToHost));
    EXPECT(back == 1 + 20 + 3 + 0.25 + 4000 + 0.5 + 100);

    templated<int, 7><<<1, 64>>>(device);
    CHECK(cudaMemcpy(host, device, 64 * sizeof(int), cudaMemcpyDeviceToHost));
    EXPECT(host[63] == 63 * 7);
    templated<float, 2><<<1, 64>>>(reinterpret_cast<float*>(device));
    float numbers[64];
    CHECK(cudaMemcpy(numbers, device, sizeof numbers, cudaMemcpyDeviceToHost));
    EXPECT(numbers[63] == 126.0f);

    int four = 4;
    void* arguments[] = {&device, const_cast<int*>(&count), &four};
    CHECK(cudaMemset(device, 0, count * sizeof(int)));
    CHECK(cudaLaunchKernel(add_to_all<int>, dim3((count + 255) / 256), dim3(256), arguments, 0, nullptr));
    CHECK(cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 4 && host[count - 1] == 4);

    // Which error that is differs from runtime to runtime.
    nothing<<<0, 1>>>();
    EXPECT(cudaGetLastError() != cudaSuccess);
    nothing<<<1, 2048>>>();
    EXPECT(cudaGetLastError() != cudaSuccess);
    nothing<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaFree(device));
    CHECK(cudaFree(number));
    return passed("launch");
}
