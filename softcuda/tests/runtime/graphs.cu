// Graphs: captured from streams, made of nodes, instantiated, launched, changed and asked.
#include "check.h"
#include <vector>

static void CUDART_CB note(void* data) { *static_cast<int*>(data) += 1; }

static void captured() {
    cudaStream_t stream, other;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&other));
    cudaEvent_t fork, join;
    CHECK(cudaEventCreate(&fork));
    CHECK(cudaEventCreate(&join));
    int *values, host[512], calls = 0;
    CHECK(cudaMalloc(&values, sizeof host));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    cudaStreamCaptureStatus status;
    CHECK(cudaStreamIsCapturing(stream, &status));
    EXPECT(status == cudaStreamCaptureStatusActive);
    CHECK(cudaMemsetAsync(values, 0, sizeof host, stream));
    CHECK(cudaEventRecord(fork, stream));
    CHECK(cudaStreamWaitEvent(other, fork, 0));
    add_to_all<<<1, 256, 0, stream>>>(values, 256, 1);
    add_to_all<<<1, 256, 0, other>>>(values + 256, 256, 2);
    CHECK(cudaEventRecord(join, other));
    CHECK(cudaStreamWaitEvent(stream, join, 0));
    CHECK(cudaLaunchHostFunc(stream, note, &calls));
    CHECK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0;
    CHECK(cudaGraphGetNodes(graph, nullptr, &nodes));
    EXPECT(nodes == 5);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphUpload(executable, stream));
    for (int round = 0; round < 3; round++) {
        CHECK(cudaGraphLaunch(executable, stream));
    }
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(calls == 3 && host[0] == 1 && host[511] == 2);

    cudaGraph_t copy;
    CHECK(cudaGraphClone(&copy, graph));
    cudaGraphExecUpdateResultInfo info;
    CHECK(cudaGraphExecUpdate(executable, copy, &info));
    EXPECT(info.result == cudaGraphExecUpdateSuccess);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaGraphDestroy(copy));
}

static cudaKernelNodeParams adding(void** arguments) {
    cudaKernelNodeParams kernel = {};
    kernel.func = reinterpret_cast<void*>(add_to_all<int>);
    kernel.gridDim = dim3(1);
    kernel.blockDim = dim3(64);
    kernel.kernelParams = arguments;
    return kernel;
}

static void made() {
    int *values, host[64] = {}, count = 64, what = 5, calls = 0;
    CHECK(cudaMalloc(&values, sizeof host));
    cudaGraph_t graph, child;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphNode_t fill, add, call, back, inside;
    cudaMemsetParams filling = {values, 0, 0, 4, 64, 1};
    CHECK(cudaGraphAddMemsetNode(&fill, graph, nullptr, 0, &filling));
    void* arguments[] = {&values, &count, &what};
    cudaKernelNodeParams kernel = adding(arguments);
    CHECK(cudaGraphAddKernelNode(&add, graph, &fill, 1, &kernel));
    cudaHostNodeParams noting = {note, &calls};
    CHECK(cudaGraphAddHostNode(&call, graph, &add, 1, &noting));
    CHECK(cudaGraphCreate(&child, 0));
    CHECK(cudaGraphAddMemcpyNode1D(&inside, child, nullptr, 0, host, values, sizeof host, cudaMemcpyDeviceToHost));
    CHECK(cudaGraphAddChildGraphNode(&back, graph, &add, 1, child));
    cudaGraphNodeType type;
    CHECK(cudaGraphNodeGetType(back, &type));
    EXPECT(type == cudaGraphNodeTypeGraph);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaDeviceSynchronize());
    EXPECT(host[63] == 5 && calls == 1);
    what = 8;
    CHECK(cudaGraphExecKernelNodeSetParams(executable, add, &kernel));
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaDeviceSynchronize());
    EXPECT(host[63] == 8 && calls == 2);
    cudaKernelNodeParams read = {};
    CHECK(cudaGraphKernelNodeGetParams(add, &read));
    EXPECT(read.func == kernel.func && read.blockDim.x == 64 && *static_cast<int*>(read.kernelParams[2]) == 5);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
}

static void with_memory() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int* values;
    int host[256];
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    CHECK(cudaMallocAsync(&values, sizeof host, stream));
    CHECK(cudaMemsetAsync(values, 0, sizeof host, stream));
    add_to_all<<<1, 256, 0, stream>>>(values, 256, 9);
    CHECK(cudaMemcpyAsync(host, values, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(values, stream));
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&executable, graph, cudaGraphInstantiateFlagAutoFreeOnLaunch));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(host[0] == 9 && host[255] == 9);
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
    CHECK(cudaDeviceGraphMemTrim(0));
}

static void refused() {
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int* values;
    CHECK(cudaMalloc(&values, 4));
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    GIVES(cudaStreamSynchronize(stream), cudaErrorStreamCaptureUnsupported);
    GIVES(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    (void)cudaGetLastError();
    CHECK(cudaDeviceSynchronize());
}

int main() {
    captured();
    made();
    with_memory();
    refused();
    return passed("graphs");
}
