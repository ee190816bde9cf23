// Events: times, queries, flags, and an event recorded again.
#include "check.h"

__global__ void take_time(int* out) {
    int sum = 0;
    for (int i = 0; i < 50000; i++) {
        sum = sum * 3 + i;
    }
    *out = sum;
}

int main() {
    cudaEvent_t start, end, untimed;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming | cudaEventBlockingSync));
    int* out;
    CHECK(cudaMalloc(&out, sizeof(int)));
    float milliseconds = -1;
    GIVES(cudaEventElapsedTime(&milliseconds, start, end), cudaErrorInvalidResourceHandle);
    CHECK(cudaEventRecord(start));
    take_time<<<1, 32>>>(out);
    CHECK(cudaEventRecord(end));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventQuery(end));
    CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    EXPECT(milliseconds > 0);
    float first = milliseconds;
    take_time<<<1, 32>>>(out);
    take_time<<<1, 32>>>(out);
    CHECK(cudaEventRecordWithFlags(end, 0, cudaEventRecordDefault));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventElapsedTime(&milliseconds, start, end));
    EXPECT(milliseconds > first);
    CHECK(cudaEventRecord(untimed));
    CHECK(cudaEventSynchronize(untimed));
    GIVES(cudaEventElapsedTime(&milliseconds, start, untimed), cudaErrorInvalidResourceHandle);
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    CHECK(cudaEventDestroy(untimed));
    return passed("events");
}
