// Functions of the host in streams run in order with the work around them.
#include "check.h"

struct Seen {
    int* from;
    int values[3];
    int count;
};

static void CUDART_CB look(void* data) {
    Seen* seen = static_cast<Seen*>(data);
    seen->values[seen->count++] = *seen->from;
}

int main() {
    int *pinned, *value;
    CHECK(cudaMallocHost(&pinned, sizeof(int)));
    CHECK(cudaMalloc(&value, sizeof(int)));
    CHECK(cudaMemset(value, 0, sizeof(int)));
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    Seen seen = {pinned, {}, 0};
    for (int round = 0; round < 3; round++) {
        add_to_all<<<1, 1, 0, stream>>>(value, 1, round + 1);
        CHECK(cudaMemcpyAsync(pinned, value, sizeof(int), cudaMemcpyDeviceToHost, stream));
        CHECK(cudaLaunchHostFunc(stream, look, &seen));
    }
    CHECK(cudaStreamSynchronize(stream));
    EXPECT(seen.count == 3 && seen.values[0] == 1 && seen.values[1] == 3 && seen.values[2] == 6);
    return passed("host_functions");
}
