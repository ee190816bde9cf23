// Code of the device that calls by pointer, recursively, and through virtual functions.
#include "check.h"

struct Shape {
    __device__ virtual float area() const = 0;
};
struct Square : Shape {
    float side;
    __device__ explicit Square(float s) : side(s) {}
    __device__ float area() const override { return side * side; }
};
struct Twice : Square {
    __device__ explicit Twice(float s) : Square(s) {}
    __device__ float area() const override { return 2 * side * side; }
};

__device__ __noinline__ int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }
__device__ __noinline__ int triple(int n) { return 3 * n; }
__device__ __noinline__ int negate(int n) { return -n; }
__device__ int (*functions[2])(int) = {triple, negate};

__global__ void run(float* out, int which) {
    Square square(3);
    Twice twice(3);
    const Shape* shape = which == 0 ? static_cast<const Shape*>(&square) : &twice;
    out[0] = shape->area();
    out[1] = static_cast<float>(fibonacci(10));
    out[2] = static_cast<float>(functions[which](14));
}

int main() {
    float *out, host[3];
    CHECK(cudaMalloc(&out, sizeof host));
    run<<<1, 1>>>(out, 0);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 9 && host[1] == 55 && host[2] == 42);
    run<<<1, 1>>>(out, 1);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 18 && host[2] == -14);
    return passed("indirect");
}
