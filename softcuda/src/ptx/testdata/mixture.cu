// Kernels of the interpreter's tests. Compile with:
//   nvcc -ptx -arch=sm_80 mixture.cu -o mixture.ptx
//   nvcc -ptx -arch=sm_80 -std=c++17 library.cu -o library.ptx
#include <cassert>
#include <cstdio>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void vecadd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}

__device__ __noinline__ float helper(float x, int n) {
    float a[8];
    for (int i = 0; i < 8; i++) a[i] = x * i;
    return a[n & 7] + expf(x) + sinf(x);
}
extern "C" __global__ void calls(float *o, int n) {
    int i = threadIdx.x;
    o[i] = helper(o[i], n);
    printf("hi %d %f\n", i, o[i]);
    assert(o[i] != 3.0f);
}
extern "C" __global__ void asserts(int n) { assert(n == 3); }
extern "C" __global__ void prints(int n, const char *text) {
    printf("[%5d|%-5d|%05d|%x|%c|%s|%%|%8.3f|%g|%e|%llu]\n", n, n, n, n, 65 + n, text, n / 8.0,
           n / 8.0, n * 1000.0, 1ull << 40);
}

__device__ float plus_one(float x) { return x + 1; }
__device__ float twice(float x) { return x * 2; }
typedef float (*Function)(float);
__device__ Function table[2] = {plus_one, twice};
__constant__ float factors[4] = {1, 2, 3, 4};
__device__ int counter;
__device__ int *pointer = &counter;
extern "C" __global__ void ind(float *o) {
    int i = threadIdx.x;
    o[i] = table[i & 1](o[i]) * factors[i & 3];
    atomicAdd(pointer, 1);
}

struct Structure {
    float a;
    double b;
    int c[3];
};
extern "C" __global__ void structure(Structure s, double *o) {
    extern __shared__ double shared[];
    int i = threadIdx.x;
    shared[i] = s.b * i;
    __syncthreads();
    o[i] = shared[blockDim.x - 1 - i] + s.a + s.c[i % 3];
}

extern "C" __global__ void hh(__half2 *a, __half *b, __nv_bfloat16 *c, __nv_bfloat162 *d) {
    int i = threadIdx.x;
    a[i] = __hfma2(a[i], a[i], a[i]);
    b[i] = __hadd(b[i], b[i]) * hexp(b[i]);
    c[i] = __hmul(c[i], c[i]);
    d[i] = __hmax2(d[i], d[i]);
}

extern "C" __global__ void red(const float *in, float *out, int n) {
    __shared__ float sums[32];
    float v = 0;
    for (int i = threadIdx.x; i < n; i += blockDim.x) v += in[i];
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(~0u, v, o);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < 32) {
        v = threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0;
        for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
        if (threadIdx.x == 0) atomicAdd(out, v);
    }
}
