// Attention with one query for each thread and 32 keys at a time in shared memory, the maximum and the sum of a row carried along.
//
//     nvcc --ptx --generate-code arch=compute_80,code=compute_80 -o rewrite/benches/attention.ptx rewrite/benches/attention.cu

constexpr int WIDTH = 32, TILE = 32;

extern "C" __global__ void attention(const float *q, const float *k, const float *v, float *out, int keys) {
    __shared__ float tile_k[TILE][WIDTH], tile_v[TILE][WIDTH];
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    float query[WIDTH], sums[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        query[i] = q[row * WIDTH + i] * 0.17677669f;
        sums[i] = 0;
    }
    float most = -1e30f, sum = 0;
    for (int first = 0; first < keys; first += TILE) {
        for (int i = threadIdx.x; i < TILE * WIDTH; i += blockDim.x) {
            (&tile_k[0][0])[i] = k[first * WIDTH + i];
            (&tile_v[0][0])[i] = v[first * WIDTH + i];
        }
        __syncthreads();
        for (int key = 0; key < TILE; key++) {
            float score = 0;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) score += query[i] * tile_k[key][i];
            float next = fmaxf(most, score), before = __expf(most - next), weight = __expf(score - next);
            most = next;
            sum = sum * before + weight;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) sums[i] = sums[i] * before + weight * tile_v[key][i];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < WIDTH; i++) out[row * WIDTH + i] = sums[i] / sum;
}
