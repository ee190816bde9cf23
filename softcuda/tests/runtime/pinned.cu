// Pinned host memory: made, mapped, registered, used by kernels, and what is told of pointers.
#include "check.h"
#include <cstdint>
#include <vector>

int main() {
    int *pinned, *mapped, *on_device;
    CHECK(cudaMallocHost(&pinned, 1024 * sizeof(int)));
    CHECK(cudaHostAlloc(&mapped, 1024 * sizeof(int), cudaHostAllocMapped | cudaHostAllocPortable));
    unsigned flags = 0;
    CHECK(cudaHostGetFlags(&flags, mapped));
    // All pinned memory is portable, so nothing is told of who said so.
    EXPECT((flags & cudaHostAllocPortable) == 0);
    for (int i = 0; i < 1024; i++) {
        mapped[i] = i;
    }
    CHECK(cudaHostGetDevicePointer(&on_device, mapped, 0));
    add_to_all<<<4, 256>>>(on_device, 1024, 100);
    CHECK(cudaDeviceSynchronize());
    EXPECT(mapped[0] == 100 && mapped[1023] == 1123);

    int* device;
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMalloc(&device, 1024 * sizeof(int)));
    CHECK(cudaMemcpyAsync(device, mapped, 1024 * sizeof(int), cudaMemcpyHostToDevice, stream));
    add_to_all<<<4, 256, 0, stream>>>(device, 1024, 1);
    CHECK(cudaMemcpyAsync(pinned, device, 1024 * sizeof(int), cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(pinned[1023] == 1124);

    void* pages = nullptr;
    EXPECT(posix_memalign(&pages, 4096, 8192) == 0);
    CHECK(cudaHostRegister(pages, 8192, cudaHostRegisterMapped));
    CHECK(cudaHostGetDevicePointer(&on_device, pages, 0));
    static_cast<int*>(pages)[5] = 1;
    add_to_all<<<1, 32>>>(on_device, 32, 6);
    CHECK(cudaDeviceSynchronize());
    EXPECT(static_cast<int*>(pages)[5] == 7);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, pages));
    EXPECT(attributes.type == cudaMemoryTypeHost);
    CHECK(cudaHostUnregister(pages));
    CHECK(cudaPointerGetAttributes(&attributes, pages));
    EXPECT(attributes.type == cudaMemoryTypeUnregistered);
    GIVES(cudaHostUnregister(pages), cudaErrorHostMemoryNotRegistered);
    (void)cudaGetLastError();
    free(pages);
    CHECK(cudaFreeHost(pinned));
    CHECK(cudaFreeHost(mapped));
    return passed("pinned");
}
