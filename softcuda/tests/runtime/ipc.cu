// Memory and events of another process.
#include "check.h"
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

struct Handles {
    cudaIpcMemHandle_t memory;
    cudaIpcEventHandle_t event;
};

static int other(const char* from, const char* to) {
    Handles handles;
    EXPECT(read(std::atoi(from), &handles, sizeof handles) == sizeof handles);
    void* memory;
    cudaEvent_t event;
    CHECK(cudaIpcOpenMemHandle(&memory, handles.memory, cudaIpcMemLazyEnablePeerAccess));
    CHECK(cudaIpcOpenEventHandle(&event, handles.event));
    CHECK(cudaEventSynchronize(event));
    add_to_all<<<1, 64>>>(static_cast<int*>(memory), 64, 5);
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaIpcCloseMemHandle(memory));
    EXPECT(write(std::atoi(to), "x", 1) == 1);
    return 0;
}

int main(int count, char** arguments) {
    if (count == 3) {
        return other(arguments[1], arguments[2]);
    }
    int there[2], back[2];
    EXPECT(pipe(there) == 0 && pipe(back) == 0);
    pid_t child = fork();
    if (child == 0) {
        char from[16], to[16];
        std::snprintf(from, sizeof from, "%d", there[0]);
        std::snprintf(to, sizeof to, "%d", back[1]);
        execl("/proc/self/exe", "ipc", from, to, static_cast<char*>(nullptr));
        _exit(127);
    }
    int *values, host[64];
    Handles handles;
    CHECK(cudaMalloc(&values, sizeof host));
    CHECK(cudaMemset(values, 0, sizeof host));
    cudaEvent_t event;
    CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
    CHECK(cudaIpcGetMemHandle(&handles.memory, values));
    CHECK(cudaIpcGetEventHandle(&handles.event, event));
    add_to_all<<<1, 64>>>(values, 64, 1);
    CHECK(cudaEventRecord(event));
    EXPECT(write(there[1], &handles, sizeof handles) == sizeof handles);
    close(back[1]);
    char done = 0;
    EXPECT(read(back[0], &done, 1) == 1);
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    CHECK(cudaMemcpy(host, values, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 6 && host[63] == 6);
    return passed("ipc");
}
