// What all programs here share: each checks what it computes, and exits with 1 and a line at the first thing that is
// wrong.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                            \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

#define GIVES(call, expected)                                                                      \
    do {                                                                                           \
        cudaError_t given = (call);                                                                \
        if (given != (expected)) {                                                                 \
            std::printf("%s:%d: %s gives %s\n", __FILE__, __LINE__, #call,                         \
                        cudaGetErrorName(given));                                                  \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

#define CHECK(call) GIVES(call, cudaSuccess)

// The last line of a program that found all as it should be.
inline int passed(const char* name) {
    std::printf("%s: passed\n", name);
    return 0;
}

// Adds a number to each element.
template <typename T> __global__ void add_to_all(T* values, int count, T what) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        values[i] += what;
    }
}
