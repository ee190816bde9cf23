// Works in steps, to be dumped and restored between any two of them: streams, a graph, events, pinned memory, variables
// of the device, memory that comes and goes. What it prints is the same in every run.
//
//   steps [--steps N] [--pace FILE]
//
// With a pace, step N ends only once FILE has more than N bytes, or is gone. Compiled with -DMANAGED one of the variables
// is managed memory.
#include "check.h"
#include <cstdint>
#include <cstring>
#include <sys/stat.h>
#include <unistd.h>

const int COUNT = 20000;

#ifdef MANAGED
__managed__ uint32_t made = 1;
#else
__device__ uint32_t made = 1;
#endif
__constant__ uint32_t factor;

__global__ void mix(uint32_t* values, uint32_t step) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < COUNT) {
        values[i] = values[i] * factor + made + step + i;
    }
}

__global__ void sum(const uint32_t* values, unsigned long long* out) {
    __shared__ unsigned long long part;
    if (threadIdx.x == 0) {
        part = 0;
    }
    __syncthreads();
    unsigned long long mine = 0;
    for (int i = threadIdx.x; i < COUNT; i += blockDim.x) {
        mine = mine * 31 + values[i];
    }
    atomicAdd(&part, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
        *out = part;
        made = made * 5 + 1;
    }
}

static void wait_for(const char* pace, int step) {
    struct stat meta;
    while (pace != nullptr && stat(pace, &meta) == 0 && meta.st_size <= step) {
        usleep(2000);
    }
}

int main(int count, char** arguments) {
    int steps = 20;
    const char* pace = nullptr;
    for (int i = 1; i + 1 < count; i += 2) {
        if (std::strcmp(arguments[i], "--steps") == 0) {
            steps = std::atoi(arguments[i + 1]);
        } else if (std::strcmp(arguments[i], "--pace") == 0) {
            pace = arguments[i + 1];
        }
    }
    uint32_t *values, thousands = 1000003;
    unsigned long long *out, *pinned, all = 0;
    CHECK(cudaMalloc(&values, COUNT * sizeof(uint32_t)));
    CHECK(cudaMemset(values, 1, COUNT * sizeof(uint32_t)));
    CHECK(cudaMalloc(&out, sizeof *out));
    CHECK(cudaMallocHost(&pinned, sizeof *pinned));
    CHECK(cudaMemcpyToSymbol(factor, &thousands, sizeof thousands));
    cudaStream_t first, second;
    CHECK(cudaStreamCreate(&first));
    CHECK(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    cudaEvent_t done;
    CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));

    cudaGraph_t graph;
    cudaGraphExec_t summing;
    CHECK(cudaStreamBeginCapture(second, cudaStreamCaptureModeGlobal));
    sum<<<1, 128, 0, second>>>(values, out);
    CHECK(cudaMemcpyAsync(pinned, out, sizeof *pinned, cudaMemcpyDeviceToHost, second));
    CHECK(cudaStreamEndCapture(second, &graph));
    CHECK(cudaGraphInstantiate(&summing, graph, 0));

    for (int step = 0; step < steps; step++) {
        uint32_t* copy;
        CHECK(cudaMalloc(&copy, COUNT * sizeof(uint32_t)));
        mix<<<(COUNT + 255) / 256, 256, 0, first>>>(values, step);
        CHECK(cudaMemcpyAsync(copy, values, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToDevice, first));
        mix<<<(COUNT + 255) / 256, 256, 0, first>>>(copy, 1);
        CHECK(cudaMemcpyAsync(values, copy, COUNT * sizeof(uint32_t), cudaMemcpyDeviceToDevice, first));
        CHECK(cudaEventRecord(done, first));
        CHECK(cudaStreamWaitEvent(second, done, 0));
        CHECK(cudaGraphLaunch(summing, second));
        CHECK(cudaStreamSynchronize(second));
        CHECK(cudaFree(copy));
        all = all * 1000003 + *pinned;
        std::printf("step %d %016llx\n", step, *pinned);
        std::fflush(stdout);
        wait_for(pace, step);
    }
    uint32_t last;
    CHECK(cudaMemcpyFromSymbol(&last, made, sizeof last));
    std::printf("result %016llx\n", all ^ last);
    return passed("steps");
}
