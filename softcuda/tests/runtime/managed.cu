// Managed memory and managed variables, used by host and device in turns, with advice and prefetches.
#include "check.h"

__managed__ int shared_number = 5;
__managed__ float shared_table[3] = {1, 2, 3};

__global__ void change() {
    shared_number *= 2;
    shared_table[2] += shared_table[0];
}

int main() {
    EXPECT(shared_number == 5);
    shared_number = 21;
    change<<<1, 1>>>();
    CHECK(cudaDeviceSynchronize());
    EXPECT(shared_number == 42 && shared_table[2] == 4);

    const int count = 10000;
    int* values;
    CHECK(cudaMallocManaged(&values, count * sizeof(int)));
    for (int i = 0; i < count; i++) {
        values[i] = i;
    }
#if CUDART_VERSION >= 13000
    cudaMemLocation device = {}, host = {};
    device.type = cudaMemLocationTypeDevice;
    host.type = cudaMemLocationTypeHost;
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetPreferredLocation, device));
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), device, 0, 0));
    add_to_all<<<(count + 127) / 128, 128>>>(values, count, 7);
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), host, 0, 0));
#else
    CHECK(cudaMemAdvise(values, count * sizeof(int), cudaMemAdviseSetPreferredLocation, 0));
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), 0, 0));
    add_to_all<<<(count + 127) / 128, 128>>>(values, count, 7);
    CHECK(cudaMemPrefetchAsync(values, count * sizeof(int), cudaCpuDeviceId, 0));
#endif
    CHECK(cudaDeviceSynchronize());
    for (int i = 0; i < count; i++) {
        EXPECT(values[i] == i + 7);
    }
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, values));
    EXPECT(attributes.type == cudaMemoryTypeManaged);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamAttachMemAsync(stream, values, 0, cudaMemAttachGlobal));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaFree(values));
    return passed("managed");
}
