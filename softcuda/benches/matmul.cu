// Tiled matrix product; n is a multiple of the tile.
const unsigned tile = 16;

extern "C" __global__ void matmul(const float *a, const float *b, float *c, unsigned n)
{
    __shared__ float left[tile][tile], right[tile][tile];
    unsigned x = threadIdx.x, y = threadIdx.y;
    unsigned row = blockIdx.y * tile + y, column = blockIdx.x * tile + x;
    float sum = 0;
    for (unsigned start = 0; start < n; start += tile) {
        left[y][x] = a[row * n + start + x];
        right[y][x] = b[(start + y) * n + column];
        __syncthreads();
        for (unsigned k = 0; k < tile; k++)
            sum += left[y][k] * right[k][x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
