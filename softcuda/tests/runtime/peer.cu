// Two devices: copies between them, access of one to the memory of the other, streams and events of both.
// environment: SOFTCUDA_DEVICES=2
#include "check.h"

int main() {
    int devices = 0, can = 0;
    CHECK(cudaGetDeviceCount(&devices));
    EXPECT(devices == 2);
    CHECK(cudaDeviceCanAccessPeer(&can, 0, 1));
    EXPECT(can == 1);
    int *first, *second, host[256];
    CHECK(cudaMalloc(&first, sizeof host));
    CHECK(cudaMemset(first, 0, sizeof host));
    CHECK(cudaSetDevice(1));
    CHECK(cudaMalloc(&second, sizeof host));
    CHECK(cudaMemset(second, 0, sizeof host));
    add_to_all<<<1, 256>>>(second, 256, 4);
    CHECK(cudaMemcpyPeer(first, 0, second, 1, sizeof host));
    CHECK(cudaMemcpy(host, first, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[255] == 4);

    CHECK(cudaDeviceEnablePeerAccess(0, 0));
    GIVES(cudaDeviceEnablePeerAccess(0, 0), cudaErrorPeerAccessAlreadyEnabled);
    (void)cudaGetLastError();
    add_to_all<<<1, 256>>>(first, 256, 10);
    cudaStream_t stream;
    cudaEvent_t event;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaMemcpyPeerAsync(second, 1, first, 0, sizeof host, stream));
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    CHECK(cudaEventRecord(event, stream));
    CHECK(cudaSetDevice(0));
    CHECK(cudaStreamWaitEvent(0, event, 0));
    CHECK(cudaMemcpy(host, second, sizeof host, cudaMemcpyDefault));
    EXPECT(host[0] == 14);
    cudaPointerAttributes attributes;
    CHECK(cudaPointerGetAttributes(&attributes, second));
    EXPECT(attributes.device == 1 && attributes.type == cudaMemoryTypeDevice);
    int current;
    CHECK(cudaGetDevice(&current));
    EXPECT(current == 0);
    GIVES(cudaSetDevice(7), cudaErrorInvalidDevice);
    (void)cudaGetLastError();
    CHECK(cudaSetDevice(1));
    CHECK(cudaDeviceDisablePeerAccess(0));
    return passed("peer");
}
