// Devices, their properties, limits and settings; versions.
#include "check.h"
#include <cstring>

int main() {
    int devices = 0, runtime = 0, driver = 0, value = 0;
    CHECK(cudaRuntimeGetVersion(&runtime));
    CHECK(cudaDriverGetVersion(&driver));
    // A driver serves all runtimes of its major version.
    EXPECT(runtime == CUDART_VERSION && driver / 1000 >= runtime / 1000);
    CHECK(cudaGetDeviceCount(&devices));
    EXPECT(devices >= 1);
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    EXPECT(std::strlen(properties.name) > 0 && properties.major == 8 && properties.minor == 0);
    EXPECT(properties.warpSize == 32 && properties.maxThreadsPerBlock == 1024 && properties.multiProcessorCount > 0);
    EXPECT(properties.totalGlobalMem > 0 && properties.sharedMemPerBlock == 48 << 10);
    EXPECT(properties.managedMemory == 1 && properties.unifiedAddressing == 1);
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrComputeCapabilityMajor, 0));
    EXPECT(value == properties.major);
    CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    EXPECT(value == properties.multiProcessorCount);
    char id[32];
    CHECK(cudaDeviceGetPCIBusId(id, sizeof id, 0));
    CHECK(cudaDeviceGetByPCIBusId(&value, id));
    EXPECT(value == 0);
    CHECK(cudaChooseDevice(&value, &properties));
    EXPECT(value == 0);

    size_t size = 0, all = 0;
    CHECK(cudaDeviceSetLimit(cudaLimitStackSize, 4096));
    CHECK(cudaDeviceGetLimit(&size, cudaLimitStackSize));
    EXPECT(size == 4096);
    CHECK(cudaDeviceSetLimit(cudaLimitPrintfFifoSize, 2 << 20));
    CHECK(cudaDeviceGetLimit(&size, cudaLimitPrintfFifoSize));
    EXPECT(size == 2 << 20);
    CHECK(cudaMemGetInfo(&size, &all));
    EXPECT(size <= all && all == properties.totalGlobalMem);
    CHECK(cudaDeviceSetCacheConfig(cudaFuncCachePreferL1));
    cudaFuncCache config;
    CHECK(cudaDeviceGetCacheConfig(&config));
    EXPECT(config == cudaFuncCachePreferL1);
    unsigned flags = 0;
    CHECK(cudaSetDeviceFlags(cudaDeviceScheduleBlockingSync));
    CHECK(cudaGetDeviceFlags(&flags));
    EXPECT((flags & cudaDeviceScheduleMask) == cudaDeviceScheduleBlockingSync);
    CHECK(cudaInitDevice(0, 0, 0));
    EXPECT(std::strcmp(cudaGetErrorName(cudaErrorInvalidValue), "cudaErrorInvalidValue") == 0);
    EXPECT(std::strlen(cudaGetErrorString(cudaErrorMemoryAllocation)) > 0);
    return passed("properties");
}
