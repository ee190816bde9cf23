// Stream-ordered memory: the default pool, pools of one's own, their attributes, and reuse.
#include "check.h"
#include <cstdint>

int main() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int *values, host[1000];
    CHECK(cudaMallocAsync(&values, sizeof host, stream));
    CHECK(cudaMemsetAsync(values, 0, sizeof host, stream));
    add_to_all<<<4, 256, 0, stream>>>(values, 1000, 12);
    CHECK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(values, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(host[0] == 12 && host[999] == 12);

    cudaMemPool_t standard, own, current;
    CHECK(cudaDeviceGetDefaultMemPool(&standard, 0));
    uint64_t keep = UINT64_MAX, read = 0;
    CHECK(cudaMemPoolSetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &keep));
    CHECK(cudaMemPoolGetAttribute(standard, cudaMemPoolAttrReleaseThreshold, &read));
    EXPECT(read == keep);
    cudaMemPoolProps properties = {};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    properties.location.id = 0;
    CHECK(cudaMemPoolCreate(&own, &properties));
    CHECK(cudaMallocFromPoolAsync(&values, 1 << 20, own, stream));
    CHECK(cudaMemPoolGetAttribute(own, cudaMemPoolAttrUsedMemCurrent, &read));
    EXPECT(read >= 1 << 20);
    add_to_all<<<1, 1, 0, stream>>>(values, 1, 1);
    CHECK(cudaFreeAsync(values, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemPoolTrimTo(own, 0));
    CHECK(cudaMemPoolGetAttribute(own, cudaMemPoolAttrUsedMemCurrent, &read));
    EXPECT(read == 0);
    CHECK(cudaDeviceSetMemPool(0, own));
    CHECK(cudaDeviceGetMemPool(&current, 0));
    EXPECT(current == own);
    CHECK(cudaMallocAsync(&values, 4096, stream));
    CHECK(cudaFree(values));
    CHECK(cudaDeviceSetMemPool(0, standard));
    CHECK(cudaMemPoolDestroy(own));
    cudaMemAccessDesc access = {{cudaMemLocationTypeDevice, {0}}, cudaMemAccessFlagsProtReadWrite};
    CHECK(cudaMemPoolSetAccess(standard, &access, 1));
    return passed("pools");
}
