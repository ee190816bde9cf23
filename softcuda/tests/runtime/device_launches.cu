// Kernels that launch kernels: parameters, streams, events, the end of a kernel, copies and fills, errors and their texts, and limits.
// flags: -rdc=true
#include "check.h"

struct alignas(16) Pair {
    long long first, second;
};

/// Puts numbers of a launch where its parameters say.
__global__ void put(long long* to, Pair pair, char addend) {
    to[blockIdx.x * blockDim.x + threadIdx.x] = pair.first * 1000 + pair.second + addend;
}

/// Each thread launches a kernel of its own.
__global__ void each(long long* to) {
    unsigned me = blockIdx.x * blockDim.x + threadIdx.x;
    put<<<2, 3>>>(to + 6 * me, Pair{me, 7}, static_cast<char>(me % 3));
}

/// Multiplies and adds, so that the order of calls shows.
__global__ void step(int* value, int factor, int addend) { *value = *value * factor + addend; }

/// Steps in one stream, in another one with an event between, and at the end, which is asked for first.
__global__ void ordered(int* values) {
    step<<<1, 1, 0, cudaStreamTailLaunch>>>(values + 1, 3, 0);
    step<<<1, 1, 0, cudaStreamTailLaunch>>>(values + 1, 1, 2);
    for (int number = 1; number <= 4; number++) step<<<1, 1>>>(values, 10, number);
    cudaStream_t streams[2];
    for (auto& stream : streams) {
        if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) return;
    }
    cudaEvent_t event;
    if (cudaEventCreateWithFlags(&event, cudaEventDisableTiming) != cudaSuccess) return;
    step<<<1, 1, 0, streams[0]>>>(values + 1, 1, 5);
    cudaEventRecord(event, streams[0]);
    cudaStreamWaitEvent(streams[1], event, 0);
    step<<<1, 1, 0, streams[1]>>>(values + 1, 7, 0);
    cudaEventDestroy(event);
    for (auto stream : streams) cudaStreamDestroy(stream);
}

/// Counts the leaves of a tree of launches.
__global__ void tree(int* leaves, int depth) {
    if (depth == 0) {
        atomicAdd(leaves, 1);
    } else {
        tree<<<1, 2>>>(leaves, depth - 1);
    }
}

/// Launches itself by its end, so often.
__global__ void chain(int* count, int left) {
    *count += 1;
    if (left > 1) chain<<<1, 1, 0, cudaStreamTailLaunch>>>(count, left - 1);
}

/// Launches itself until that is refused; the last one puts the reason behind the count.
__global__ void deeper(int* count) {
    *count += 1;
    if (*count < 100) deeper<<<1, 1>>>(count);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) count[1] = error;
}

/// What launches that cannot be say.
__global__ void refused(int* errors) {
    step<<<1, 2000>>>(errors, 0, 0);
    errors[0] = cudaPeekAtLastError();
    errors[1] = cudaGetLastError();
    errors[2] = cudaGetLastError();
    step<<<0, 1>>>(errors, 0, 0);
    errors[3] = cudaGetLastError();
    step<<<1, 1, 1 << 20>>>(errors, 0, 0);
    errors[4] = cudaGetLastError();
}

/// Names and texts of errors, one letter for each word.
__global__ void texts(int* words) {
    words[0] = cudaGetErrorString(cudaErrorInvalidConfiguration)[3];
    words[1] = cudaGetErrorName(cudaErrorMemoryAllocation)[9];
    words[2] = cudaGetErrorString(cudaSuccess)[7];
}

/// A fill, a kernel and a copy in one stream; memory of the kernel's own.
__global__ void moves(int* values) {
    cudaStream_t stream;
    cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    cudaMemsetAsync(values, 1, 8, stream);
    step<<<1, 1, 0, stream>>>(values, 1, 1);
    cudaMemcpyAsync(values + 1, values, 4, cudaMemcpyDeviceToDevice, stream);
    step<<<1, 1, 0, stream>>>(values, 0, 3);
    cudaStreamDestroy(stream);
    int* own = nullptr;
    int device = -1, count = 0;
    if (cudaMalloc(&own, 64) == cudaSuccess && cudaGetDevice(&device) == cudaSuccess &&
        cudaGetDeviceCount(&count) == cudaSuccess) {
        own[3] = device + count;
        values[2] = own[3];
    }
    cudaFree(own);
}

/// Runs a kernel on words that begin with a value; gives them afterwards.
template <typename Run> static void with(int (&words)[8], int first, Run run) {
    int* on_device;
    CHECK(cudaMalloc(&on_device, sizeof words));
    for (int& word : words) word = first;
    CHECK(cudaMemcpy(on_device, words, sizeof words, cudaMemcpyHostToDevice));
    run(on_device);
    CHECK(cudaGetLastError());
    CHECK(cudaMemcpy(words, on_device, sizeof words, cudaMemcpyDeviceToHost));
    CHECK(cudaFree(on_device));
}

int main() {
    constexpr int BLOCKS = 4, THREADS = 40, EACH = 6, ALL = BLOCKS * THREADS * EACH;
    long long* numbers;
    static long long found[ALL];
    CHECK(cudaMalloc(&numbers, sizeof found));
    each<<<BLOCKS, THREADS>>>(numbers);
    // The launch is done when all is that it has launched.
    CHECK(cudaStreamSynchronize(0));
    CHECK(cudaMemcpy(found, numbers, sizeof found, cudaMemcpyDeviceToHost));
    for (int at = 0; at < ALL; at++) {
        int me = at / EACH;
        EXPECT(found[at] == me * 1000 + 7 + me % 3);
    }
    CHECK(cudaFree(numbers));

    int words[8];
    with(words, 0, [](int* values) { ordered<<<1, 1>>>(values); });
    EXPECT(words[0] == 1234);
    EXPECT(words[1] == (0 + 5) * 7 * 3 + 2);
    with(words, 0, [](int* values) { tree<<<1, 2>>>(values, 6); });
    EXPECT(words[0] == 1 << 7);
    with(words, 0, [](int* values) { chain<<<1, 1>>>(values, 100); });
    EXPECT(words[0] == 100);
    with(words, 0, [](int* values) { moves<<<1, 1>>>(values); });
    EXPECT(words[0] == 3 && words[1] == 0x01010102);
    int devices;
    CHECK(cudaGetDeviceCount(&devices));
    EXPECT(words[2] == devices);

    with(words, -1, [](int* values) { refused<<<1, 1>>>(values); });
    EXPECT(words[0] != 0 && words[1] == words[0] && words[2] == 0 && words[3] != 0 && words[4] != 0);
    with(words, 0, [](int* values) { texts<<<1, 1>>>(values); });
    EXPECT(words[0] == 'a' && words[1] == 'M' && words[2] == 'r');
    with(words, 0, [](int* values) { deeper<<<1, 1>>>(values); });
    EXPECT(words[0] >= 24 && words[0] < 100 && words[1] != 0);

    // In a graph.
    with(words, 0, [](int* values) {
        cudaStream_t stream;
        cudaGraph_t graph;
        cudaGraphExec_t executable;
        CHECK(cudaStreamCreate(&stream));
        CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
        tree<<<1, 2, 0, stream>>>(values, 3);
        step<<<1, 1, 0, stream>>>(values, 1, 100);
        CHECK(cudaStreamEndCapture(stream, &graph));
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaGraphLaunch(executable, stream));
        CHECK(cudaStreamSynchronize(stream));
        CHECK(cudaGraphExecDestroy(executable));
        CHECK(cudaGraphDestroy(graph));
        CHECK(cudaStreamDestroy(stream));
    });
    EXPECT(words[0] == 2 * (16 + 100));
    return passed("device_launches");
}
