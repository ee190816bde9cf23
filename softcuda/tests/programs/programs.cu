// Programs as they are commonly written in CUDA, for the tests of softcuda. programs.ptx is made of
// this file by build.sh.

#include <cfloat>

#define TILE 16

// C = A * B, n a multiple of TILE.
extern "C" __global__ void matmul(const float *a, const float *b, float *c, unsigned n) {
    __shared__ float ta[TILE][TILE], tb[TILE][TILE];
    unsigned tx = threadIdx.x % TILE, ty = threadIdx.x / TILE;
    unsigned tiles = n / TILE;
    unsigned row = blockIdx.x / tiles * TILE + ty, column = blockIdx.x % tiles * TILE + tx;
    float sum = 0;
    for (unsigned t = 0; t < tiles; t++) {
        ta[ty][tx] = a[row * n + t * TILE + tx];
        tb[ty][tx] = b[(t * TILE + ty) * n + column];
        __syncthreads();
        for (unsigned k = 0; k < TILE; k++) sum = fmaf(ta[ty][k], tb[k][tx], sum);
        __syncthreads();
    }
    c[row * n + column] = sum;
}

__device__ float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

__device__ float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// One sum for each block of 256 threads.
extern "C" __global__ void reduce(const float *in, float *sums, unsigned n) {
    __shared__ float part[8];
    float x = 0;
    for (unsigned i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) x += in[i];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        x = warp_sum(threadIdx.x < 8 ? part[threadIdx.x] : 0);
        if (threadIdx.x == 0) sums[blockIdx.x] = x;
    }
}

extern "C" __global__ void reduce_integers(const unsigned *in, unsigned *result, unsigned n) {
    unsigned sum = 0, most = 0;
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        sum += in[i];
        most = max(most, in[i]);
    }
    sum = __reduce_add_sync(~0u, sum);
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) {
        atomicAdd(&result[0], sum);
        atomicMax(&result[1], most);
    }
}

// Inclusive sums of blocks of 512 elements, and each block's total.
extern "C" __global__ void scan_blocks(const unsigned *in, unsigned *out, unsigned *totals) {
    __shared__ unsigned a[512];
    unsigned t = threadIdx.x, i = blockIdx.x * 512 + t;
    a[t] = in[i];
    for (unsigned step = 1; step < 512; step *= 2) {
        __syncthreads();
        unsigned x = t >= step ? a[t - step] : 0;
        __syncthreads();
        a[t] += x;
    }
    out[i] = a[t];
    if (t == 511) totals[blockIdx.x] = a[t];
}

extern "C" __global__ void scan_add(unsigned *out, const unsigned *totals) {
    unsigned before = 0;
    for (unsigned block = 0; block < blockIdx.x; block++) before += totals[block];
    out[blockIdx.x * 512 + threadIdx.x] += before;
}

// One step of a bitonic sort.
extern "C" __global__ void bitonic(int *data, unsigned size, unsigned step) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, j = i ^ step;
    if (j > i) {
        int x = data[i], y = data[j];
        if ((x > y) == ((i & size) == 0)) {
            data[i] = y;
            data[j] = x;
        }
    }
}

// Rows of 128 elements, a block of 32 threads for each.
extern "C" __global__ void softmax(const float *in, float *out) {
    const float *row = in + blockIdx.x * 128;
    float most = -FLT_MAX, sum = 0;
    for (int i = threadIdx.x; i < 128; i += 32) most = fmaxf(most, row[i]);
    most = warp_max(most);
    for (int i = threadIdx.x; i < 128; i += 32) sum += expf(row[i] - most);
    sum = warp_sum(sum);
    for (int i = threadIdx.x; i < 128; i += 32) out[blockIdx.x * 128 + i] = expf(row[i] - most) / sum;
}

extern "C" __global__ void layer_norm(const float *in, const float *scale, const float *shift, float *out) {
    const float *row = in + blockIdx.x * 128;
    float sum = 0, squares = 0;
    for (int i = threadIdx.x; i < 128; i += 32) sum += row[i];
    float mean = warp_sum(sum) / 128;
    for (int i = threadIdx.x; i < 128; i += 32) squares += (row[i] - mean) * (row[i] - mean);
    float rate = rsqrtf(warp_sum(squares) / 128 + 1e-5f);
    for (int i = threadIdx.x; i < 128; i += 32)
        out[blockIdx.x * 128 + i] = (row[i] - mean) * rate * scale[i] + shift[i];
}

// One head: 64 queries, keys and values of 32 elements; a block for each query.
extern "C" __global__ void attention(const float *q, const float *k, const float *v, float *out) {
    __shared__ float weights[64];
    unsigned row = blockIdx.x, t = threadIdx.x;
    float score = 0;
    for (int i = 0; i < 32; i++) score += q[row * 32 + i] * k[t * 32 + i];
    weights[t] = score * 0.17677669f;
    __syncthreads();
    float most = -FLT_MAX, sum = 0;
    for (int i = 0; i < 64; i++) most = fmaxf(most, weights[i]);
    float weight = expf(weights[t] - most);
    __syncthreads();
    weights[t] = weight;
    __syncthreads();
    for (int i = 0; i < 64; i++) sum += weights[i];
    if (t < 32) {
        float x = 0;
        for (int i = 0; i < 64; i++) x += weights[i] * v[i * 32 + t];
        out[row * 32 + t] = x / sum;
    }
}

__constant__ float kernel5[25] = {1, 4, 6, 4, 1, 4, 16, 24, 16, 4, 6, 24, 36, 24, 6, 4, 16, 24, 16, 4, 1, 4, 6, 4, 1};

// 5 by 5 over 64 by 64, zeros outside.
extern "C" __global__ void convolution(const float *in, float *out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, x = i % 64, y = i / 64;
    float sum = 0;
    for (int dy = -2; dy <= 2; dy++)
        for (int dx = -2; dx <= 2; dx++) {
            int u = x + dx, v = y + dy;
            if (u >= 0 && u < 64 && v >= 0 && v < 64)
                sum += kernel5[(dy + 2) * 5 + dx + 2] * in[v * 64 + u];
        }
    out[i] = sum / 256;
}

extern "C" __global__ void sgd(float *weights, const float *gradients, float *momentum, float rate) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    momentum[i] = 0.9f * momentum[i] + gradients[i];
    weights[i] -= rate * momentum[i];
}

extern "C" __global__ void adam(float *weights, const float *gradients, float *m, float *v, unsigned step, float rate) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float g = gradients[i];
    m[i] = 0.9f * m[i] + 0.1f * g;
    v[i] = 0.999f * v[i] + 0.001f * g * g;
    float b1 = 1, b2 = 1;
    for (unsigned s = 0; s < step; s++) {
        b1 *= 0.9f;
        b2 *= 0.999f;
    }
    weights[i] -= rate * (m[i] / (1 - b1)) / (sqrtf(v[i] / (1 - b2)) + 1e-8f);
}

// Philox 4x32-10.
extern "C" __global__ void philox(unsigned *out, unsigned seed) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned c0 = i, c1 = 0, c2 = 0x1234, c3 = 0, k0 = seed, k1 = ~seed;
    for (int round = 0; round < 10; round++) {
        unsigned h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
        unsigned h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
        c0 = h1 ^ c1 ^ k0;
        c1 = l1;
        c2 = h0 ^ c3 ^ k1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    reinterpret_cast<uint4 *>(out)[i] = make_uint4(c0, c1, c2, c3);
}

extern "C" __global__ void histogram(const unsigned char *in, unsigned *bins, unsigned n) {
    __shared__ unsigned own[256];
    own[threadIdx.x] = 0;
    __syncthreads();
    for (unsigned i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) atomicAdd(&own[in[i]], 1);
    __syncthreads();
    atomicAdd(&bins[threadIdx.x], own[threadIdx.x]);
}

// Accelerations of n bodies (x, y, z, mass), n a multiple of 128.
extern "C" __global__ void n_body(const float4 *bodies, float4 *out, unsigned n) {
    __shared__ float4 tile[128];
    unsigned i = blockIdx.x * 128 + threadIdx.x;
    float4 self = bodies[i];
    float ax = 0, ay = 0, az = 0;
    for (unsigned start = 0; start < n; start += 128) {
        tile[threadIdx.x] = bodies[start + threadIdx.x];
        __syncthreads();
        for (int j = 0; j < 128; j++) {
            float dx = tile[j].x - self.x, dy = tile[j].y - self.y, dz = tile[j].z - self.z;
            float inverse = rsqrtf(dx * dx + dy * dy + dz * dz + 0.01f);
            float force = tile[j].w * inverse * inverse * inverse;
            ax += dx * force;
            ay += dy * force;
            az += dz * force;
        }
        __syncthreads();
    }
    out[i] = make_float4(ax, ay, az, 0);
}

__device__ float normal(float d) { return 0.5f * erfcf(-d * 0.70710678f); }

// Prices of calls and puts from (price, strike, years).
extern "C" __global__ void black_scholes(const float *options, float *out) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    float s = options[3 * i], x = options[3 * i + 1], t = options[3 * i + 2];
    const float r = 0.02f, v = 0.30f;
    float root = sqrtf(t);
    float d1 = (logf(s / x) + (r + 0.5f * v * v) * t) / (v * root), d2 = d1 - v * root;
    float discount = expf(-r * t);
    out[2 * i] = s * normal(d1) - x * discount * normal(d2);
    out[2 * i + 1] = x * discount * normal(-d2) - s * normal(-d1);
}

// y = A x, A in compressed rows.
extern "C" __global__ void spmv(const unsigned *rows, const unsigned *columns, const float *values, const float *x, float *y, unsigned n) {
    unsigned row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n) return;
    float sum = 0;
    for (unsigned i = rows[row]; i < rows[row + 1]; i++) sum += values[i] * x[columns[i]];
    y[row] = sum;
}

// One level of a search through a graph in compressed rows; unknown distances are all ones.
extern "C" __global__ void bfs(const unsigned *rows, const unsigned *edges, unsigned *distances, unsigned level, unsigned n) {
    unsigned node = blockIdx.x * blockDim.x + threadIdx.x;
    if (node >= n || distances[node] != level) return;
    for (unsigned i = rows[node]; i < rows[node + 1]; i++)
        atomicMin(&distances[edges[i]], level + 1);
}

// A sum through double precision and a recursive function.
__device__ __noinline__ unsigned ackermann(unsigned m, unsigned n) {
    if (m == 0) return n + 1;
    return n == 0 ? ackermann(m - 1, 1) : ackermann(m - 1, ackermann(m, n - 1));
}

extern "C" __global__ void recursion(unsigned *out) {
    out[threadIdx.x] = ackermann(threadIdx.x % 3, threadIdx.x / 3);
}
