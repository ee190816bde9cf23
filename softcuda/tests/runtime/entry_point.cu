// Functions of the driver by way of the runtime, called beside it.
#include "check.h"
#include <cuda.h>

static void* find(const char* name, unsigned version, unsigned long long flags = cudaEnableDefault) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    CHECK(cudaGetDriverEntryPointByVersion(name, &function, version, flags, &result));
    EXPECT((result == cudaDriverEntryPointSuccess) == (function != nullptr));
    return function;
}

int main() {
    auto allocate = reinterpret_cast<CUresult (*)(CUdeviceptr*, size_t)>(find("cuMemAlloc", 12000));
    auto fill = reinterpret_cast<CUresult (*)(CUdeviceptr, unsigned, size_t)>(find("cuMemsetD32", 12000));
    auto current = reinterpret_cast<CUresult (*)(CUcontext*)>(find("cuCtxGetCurrent", 12000));
    EXPECT(allocate && fill && current);
    CHECK(cudaFree(0));
    CUcontext context = nullptr;
    EXPECT(current(&context) == CUDA_SUCCESS && context != nullptr);
    CUdeviceptr memory;
    EXPECT(allocate(&memory, 400) == CUDA_SUCCESS);
    EXPECT(fill(memory, 3, 100) == CUDA_SUCCESS);
    add_to_all<<<1, 100>>>(reinterpret_cast<int*>(memory), 100, 4);
    int host[100];
    CHECK(cudaMemcpy(host, reinterpret_cast<void*>(memory), sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[99] == 7);
    EXPECT(find("cuLaunchKernel", 12000, cudaEnablePerThreadDefaultStream) != find("cuLaunchKernel", 12000));
    void* function = &host;
    cudaDriverEntryPointQueryResult result;
    (void)cudaGetDriverEntryPointByVersion("cuNoSuchFunction", &function, 12000, cudaEnableDefault, &result);
    EXPECT(result == cudaDriverEntryPointSymbolNotFound && function == nullptr);
    return passed("entry_point");
}
