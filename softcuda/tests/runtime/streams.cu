// Streams: kinds, priorities, order, callbacks, waits for events, and the default stream's order with others.
#include "check.h"

__global__ void spin_then(int* out, int what) {
    for (int i = 0; i < 20000; i++) {
        *reinterpret_cast<volatile int*>(out) = 0;
    }
    *out = what;
}

static void CUDART_CB called(cudaStream_t, cudaError_t status, void* data) {
    if (status == cudaSuccess) {
        *static_cast<int*>(data) = 5;
    }
}

int main() {
    int least, greatest, priority;
    unsigned flags;
    CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t plain, free_standing, urgent;
    CHECK(cudaStreamCreate(&plain));
    CHECK(cudaStreamCreateWithFlags(&free_standing, cudaStreamNonBlocking));
    CHECK(cudaStreamCreateWithPriority(&urgent, cudaStreamNonBlocking, greatest));
    CHECK(cudaStreamGetFlags(free_standing, &flags));
    EXPECT(flags == cudaStreamNonBlocking);
    CHECK(cudaStreamGetPriority(urgent, &priority));
    EXPECT(priority == greatest && greatest <= least);
    unsigned long long one, two;
    CHECK(cudaStreamGetId(plain, &one));
    CHECK(cudaStreamGetId(urgent, &two));
    EXPECT(one != two);

    int *value, host = 0;
    CHECK(cudaMalloc(&value, 2 * sizeof(int)));
    spin_then<<<1, 1, 0, plain>>>(value, 1);
    add_to_all<<<1, 1, 0, plain>>>(value, 1, 10);
    CHECK(cudaMemcpyAsync(&host, value, sizeof host, cudaMemcpyDeviceToHost, plain));
    CHECK(cudaStreamSynchronize(plain));
    EXPECT(host == 11);

    // The default stream waits for plain ones, and they for it.
    spin_then<<<1, 1, 0, plain>>>(value, 2);
    add_to_all<<<1, 1>>>(value, 1, 20);
    add_to_all<<<1, 1, 0, plain>>>(value, 1, 100);
    CHECK(cudaMemcpy(&host, value, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host == 122);

    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    spin_then<<<1, 1, 0, free_standing>>>(value, 3);
    CHECK(cudaEventRecord(event, free_standing));
    CHECK(cudaStreamWaitEvent(urgent, event, 0));
    add_to_all<<<1, 1, 0, urgent>>>(value, 1, 30);
    CHECK(cudaStreamSynchronize(urgent));
    CHECK(cudaStreamQuery(urgent));
    CHECK(cudaMemcpy(&host, value, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host == 33);

    int five = 0;
    CHECK(cudaStreamAddCallback(plain, called, &five, 0));
    CHECK(cudaStreamSynchronize(plain));
    EXPECT(five == 5);
    cudaStreamAttrValue attribute = {};
    (void)attribute;
    int device = -1;
#if CUDART_VERSION >= 12080
    CHECK(cudaStreamGetDevice(plain, &device));
    EXPECT(device == 0);
#endif
    (void)device;
    CHECK(cudaStreamDestroy(plain));
    CHECK(cudaStreamDestroy(free_standing));
    CHECK(cudaStreamDestroy(urgent));
    return passed("streams");
}
