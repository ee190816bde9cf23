// A program with --default-stream per-thread: each thread's default stream is its own, and a stream that captures in
// one does not disturb another.
// flags: --default-stream per-thread
#include "check.h"
#include <thread>
#include <vector>

static void work(int index, int* out) {
    int *values, host[256];
    CHECK(cudaMalloc(&values, sizeof host));
    CHECK(cudaMemsetAsync(values, 0, sizeof host, cudaStreamPerThread));
    for (int round = 0; round < 10; round++) {
        add_to_all<<<1, 256>>>(values, 256, index);
    }
    CHECK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaStreamSynchronize(0));
    *out = host[255];
    CHECK(cudaFree(values));
}

int main() {
    std::vector<std::thread> threads;
    int results[4];
    for (int i = 0; i < 4; i++) {
        threads.emplace_back(work, i + 1, &results[i]);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (int i = 0; i < 4; i++) {
        EXPECT(results[i] == 10 * (i + 1));
    }
    // The default stream can be captured if it is the thread's.
    int *value, host;
    CHECK(cudaMalloc(&value, sizeof(int)));
    CHECK(cudaMemset(value, 0, sizeof(int)));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(0, cudaStreamCaptureModeGlobal));
    add_to_all<<<1, 1>>>(value, 1, 3);
    CHECK(cudaStreamEndCapture(0, &graph));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaMemcpy(&host, value, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host == 6);
    return passed("per_thread");
}
