// Library functions and language features whose code exercises many instructions.
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void maths(const double *x, double *d, const float *y, float *f) {
    int i = threadIdx.x, n = blockDim.x;
    double a = x[i];
    d[i] = sin(a);
    d[i + n] = cos(a);
    d[i + 2 * n] = log(a);
    d[i + 3 * n] = exp(a);
    d[i + 4 * n] = pow(a, 1.7);
    d[i + 5 * n] = tanh(a);
    d[i + 6 * n] = 1.0 / a;
    d[i + 7 * n] = sqrt(a);
    d[i + 8 * n] = fmod(a, 0.3);
    d[i + 9 * n] = cbrt(a);
    d[i + 10 * n] = atan2(a, 2.0);
    float b = y[i];
    f[i] = sinf(b);
    f[i + n] = cosf(b);
    f[i + 2 * n] = logf(b);
    f[i + 3 * n] = expf(b);
    f[i + 4 * n] = powf(b, 1.7f);
    f[i + 5 * n] = tanhf(b);
    f[i + 6 * n] = 1.0f / b;
    f[i + 7 * n] = sqrtf(b);
    f[i + 8 * n] = fmodf(b, 0.3f);
    f[i + 9 * n] = cbrtf(b);
    f[i + 10 * n] = atan2f(b, 2.0f);
}

struct Base {
    int a;
    __device__ virtual int value(int x) { return x + 1; }
};
struct Derived : Base {
    __device__ int value(int x) override { return x * a; }
};
extern "C" __global__ void virtuals(int *o, int k) {
    Base base;
    Derived derived;
    derived.a = k;
    Base *chosen = (threadIdx.x + k) & 1 ? &base : &derived;
    o[threadIdx.x] = chosen->value(threadIdx.x);
}

extern "C" __global__ void groups(int *o) {
    auto tile = cg::tiled_partition<8>(cg::this_thread_block());
    int sum = cg::reduce(tile, (int)threadIdx.x, cg::plus<int>());
    atomicAdd(o, 1);
    cg::this_grid().sync();
    o[1 + blockIdx.x * blockDim.x + threadIdx.x] = sum + 1000 * o[0];
}

// 64-bit and 8-bit integer arithmetic, and a sort that diverges.
extern "C" __global__ void integers(unsigned long long *q, signed char *c, int n) {
    int i = threadIdx.x;
    unsigned long long v = q[i];
    q[i] = v / 7 + v % 1000003 + __umul64hi(v, v) + (unsigned long long)(-(long long)v / 13);
    c[i] = (c[i] >> 1) * 3 - c[i] / 5;
    __syncthreads();
    if (i == 0) {
        for (int a = 1; a < n; a++) {
            signed char key = c[a];
            int b = a - 1;
            while (b >= 0 && c[b] > key) {
                c[b + 1] = c[b];
                b--;
            }
            c[b + 1] = key;
        }
    }
}
