// What kernels print arrives on standard output, in the order of the launches.
#include "check.h"
#include <cstring>
#include <unistd.h>

__global__ void print(int what) {
    if (threadIdx.x == 0) {
        printf("%d %s %.2f %llu %c %5x|%-4d|\n", what, "text", 1.5, 1ull << 40, 'c', 255, 7);
    }
}

__global__ void count() { printf("thread %u\n", threadIdx.x); }

int main() {
    int ends[2];
    EXPECT(pipe(ends) == 0);
    std::fflush(stdout);
    int before = dup(1);
    EXPECT(dup2(ends[1], 1) == 1);
    print<<<1, 32>>>(42);
    count<<<1, 4>>>();
    CHECK(cudaDeviceSynchronize());
    std::fflush(stdout);
    EXPECT(dup2(before, 1) == 1);
    close(ends[1]);
    char text[4096] = {};
    size_t size = 0;
    ssize_t more;
    while (size + 1 < sizeof text && (more = read(ends[0], text + size, sizeof text - 1 - size)) > 0) {
        size += static_cast<size_t>(more);
    }
    const char* first = "42 text 1.50 1099511627776 c    ff|7   |\n";
    EXPECT(std::strncmp(text, first, std::strlen(first)) == 0);
    for (int i = 0; i < 4; i++) {
        char line[32];
        std::snprintf(line, sizeof line, "thread %d\n", i);
        EXPECT(std::strstr(text, line) != nullptr);
    }
    return passed("printing");
}
