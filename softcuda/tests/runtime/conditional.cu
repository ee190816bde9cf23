// Conditional nodes of graphs: if with two bodies, loops, a choice of several, one in another, and captured bodies.
#include "check.h"
#include <vector>

/// Sets a condition to a value in memory.
__global__ void put(cudaGraphConditionalHandle condition, const int* value) {
    cudaGraphSetConditional(condition, static_cast<unsigned>(*value));
}

/// Counts down, and sets a condition as long as there is something left.
__global__ void count_down(cudaGraphConditionalHandle condition, int* left, int* rounds) {
    if (threadIdx.x == 0) {
        *rounds += 1;
        *left -= 1;
        cudaGraphSetConditional(condition, *left > 0);
    }
}

/// Adds a kernel node of one block of 32 threads.
static cudaGraphNode_t kernel(cudaGraph_t graph, const std::vector<cudaGraphNode_t>& after, void* function,
                              void** arguments) {
    cudaKernelNodeParams launch = {};
    launch.func = function;
    launch.gridDim = dim3(1);
    launch.blockDim = dim3(32);
    launch.kernelParams = arguments;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddKernelNode(&node, graph, after.data(), after.size(), &launch));
    return node;
}

static cudaGraphNode_t add(cudaGraph_t graph, int* to, int what) {
    int count = 1;
    void* arguments[] = {&to, &count, &what};
    return kernel(graph, {}, reinterpret_cast<void*>(add_to_all<int>), arguments);
}

/// Adds a conditional node; gives its bodies.
static std::vector<cudaGraph_t> conditional(cudaGraph_t graph, const std::vector<cudaGraphNode_t>& after,
                                            cudaGraphConditionalHandle condition,
                                            cudaGraphConditionalNodeType type, unsigned size,
                                            cudaGraphNode_t* node) {
    cudaGraphNodeParams wanted = {};
    wanted.type = cudaGraphNodeTypeConditional;
    wanted.conditional.handle = condition;
    wanted.conditional.type = type;
    wanted.conditional.size = size;
#if CUDART_VERSION >= 13000
    CHECK(cudaGraphAddNode(node, graph, after.data(), nullptr, after.size(), &wanted));
#else
    CHECK(cudaGraphAddNode(node, graph, after.data(), after.size(), &wanted));
#endif
    return std::vector<cudaGraph_t>(wanted.conditional.phGraph_out, wanted.conditional.phGraph_out + size);
}

/// Launches with the first values set; gives them afterwards.
static std::vector<int> run(cudaGraphExec_t executable, int* values, std::vector<int> words) {
    size_t size = words.size() * sizeof(int);
    CHECK(cudaMemcpy(values, words.data(), size, cudaMemcpyHostToDevice));
    CHECK(cudaGraphLaunch(executable, 0));
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaMemcpy(words.data(), values, size, cudaMemcpyDeviceToHost));
    return words;
}

static void chosen(int* values) {
    for (auto type : {cudaGraphCondTypeIf, cudaGraphCondTypeSwitch}) {
        unsigned size = type == cudaGraphCondTypeIf ? 2 : 3;
        cudaGraph_t graph;
        CHECK(cudaGraphCreate(&graph, 0));
        cudaGraphConditionalHandle condition;
        CHECK(cudaGraphConditionalHandleCreate(&condition, graph));
        void* arguments[] = {&condition, &values};
        cudaGraphNode_t set = kernel(graph, {}, reinterpret_cast<void*>(put), arguments), node;
        auto bodies = conditional(graph, {set}, condition, type, size, &node);
        for (unsigned body = 0, amount = 1; body < size; body++, amount *= 10) {
            add(bodies[body], values + 1, static_cast<int>(amount));
        }
#if CUDART_VERSION >= 13000 // that of 12.9 answers cudaErrorUnknown, whatever its driver says
        cudaGraphNodeType kind;
        CHECK(cudaGraphNodeGetType(node, &kind));
        EXPECT(kind == cudaGraphNodeTypeConditional);
#endif
        cudaGraphExec_t executable;
        CHECK(cudaGraphInstantiate(&executable, graph, 0));
        const int of_if[] = {10, 1, 1, 1}, of_switch[] = {1, 10, 100, 0};
        for (int value = 0; value < 4; value++) {
            int wanted = type == cudaGraphCondTypeIf ? of_if[value] : of_switch[value];
            EXPECT(run(executable, values, {value, 0})[1] == wanted);
        }
        CHECK(cudaGraphExecDestroy(executable));
        CHECK(cudaGraphDestroy(graph));
    }
}

static void repeated(int* values) {
    cudaGraph_t graph;
    CHECK(cudaGraphCreate(&graph, 0));
    cudaGraphConditionalHandle outer, inner;
    CHECK(cudaGraphConditionalHandleCreate(&outer, graph, 1, cudaGraphCondAssignDefault));
    CHECK(cudaGraphConditionalHandleCreate(&inner, graph, 0, cudaGraphCondAssignDefault));
    cudaGraphNode_t node;
    cudaGraph_t body = conditional(graph, {}, outer, cudaGraphCondTypeWhile, 1, &node)[0];
    int *rounds = values + 1, *last = values + 2;
    void* counting[] = {&outer, &values, &rounds};
    cudaGraphNode_t counted = kernel(body, {}, reinterpret_cast<void*>(count_down), counting);
    void* arguments[] = {&inner, &values};
    cudaGraphNode_t set = kernel(body, {counted}, reinterpret_cast<void*>(put), arguments);
    auto bodies = conditional(body, {set}, inner, cudaGraphCondTypeIf, 2, &node);
    add(bodies[1], last, 7);
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    for (int round = 0; round < 2; round++) {
        EXPECT((run(executable, values, {20, 0, 0}) == std::vector<int>{0, 20, 7}));
    }
    // Nothing else may have the nodes.
    cudaGraph_t copy;
    cudaGraphExec_t other;
    EXPECT(cudaGraphClone(&copy, graph) != cudaSuccess);
    EXPECT(cudaGraphInstantiate(&other, graph, 0) != cudaSuccess);
    (void)cudaGetLastError();
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
}

static void captured(int* values) {
    cudaStream_t stream, inside;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamCreate(&inside));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    CHECK(cudaMemsetAsync(values + 2, 0, sizeof(int), stream));
    cudaStreamCaptureStatus status;
    cudaGraph_t graph;
    const cudaGraphNode_t* last;
    size_t count;
#if CUDART_VERSION >= 13000
    CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &last, nullptr, &count));
#else
    CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph, &last, &count));
#endif
    cudaGraphConditionalHandle more;
    CHECK(cudaGraphConditionalHandleCreate(&more, graph, 1, cudaGraphCondAssignDefault));
    cudaGraphNode_t node;
    cudaGraph_t body = conditional(graph, {last, last + count}, more, cudaGraphCondTypeWhile, 1, &node)[0];
#if CUDART_VERSION >= 13000
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamSetCaptureDependencies));
#else
    CHECK(cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamSetCaptureDependencies));
#endif
    CHECK(cudaStreamBeginCaptureToGraph(inside, body, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed));
    count_down<<<1, 32, 0, inside>>>(more, values, values + 1);
    add_to_all<<<1, 32, 0, inside>>>(values + 2, 1, 3);
    CHECK(cudaStreamEndCapture(inside, nullptr));
    add_to_all<<<1, 32, 0, stream>>>(values + 2, 1, 100);
    CHECK(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable;
    CHECK(cudaGraphInstantiate(&executable, graph, 0));
    EXPECT((run(executable, values, {4, 0, 50}) == std::vector<int>{0, 4, 112}));
    CHECK(cudaGraphExecDestroy(executable));
    CHECK(cudaGraphDestroy(graph));
}

int main() {
    int* values;
    CHECK(cudaMalloc(&values, 4 * sizeof(int)));
    chosen(values);
    repeated(values);
    captured(values);
    CHECK(cudaFree(values));
    return passed("conditional");
}
