// Objects that use the runtime when they end: of threads, and of the program, after main.
#include "check.h"
#include <thread>

struct Memory {
    int* values = nullptr;
    void make() {
        CHECK(cudaMalloc(&values, 1024));
        add_to_all<<<1, 256>>>(values, 256, 1);
    }
    ~Memory() {
        if (values != nullptr) {
            cudaError_t given = cudaFree(values);
            if (given != cudaSuccess && given != cudaErrorCudartUnloading) {
                std::printf("cudaFree at the end gives %s\n", cudaGetErrorName(given));
                _Exit(1);
            }
        }
    }
};

static Memory of_program;
static thread_local Memory of_thread;

int main() {
    of_program.make();
    of_thread.make();
    std::thread([] { of_thread.make(); }).join();
    CHECK(cudaDeviceSynchronize());
    return passed("endings");
}
