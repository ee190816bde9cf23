// What ranks do between their collective operations: layers of which each has a slice, and training of layers that each has
// whole. All of it in integers, so that the order of additions does not matter.
#include "common.cuh"

// hidden[row][j]: a slice of the first half of a layer. `weights` are [width][slice].
extern "C" __global__ void slice_hidden(const u32 *x, const u32 *weights, u32 *hidden, u32 rows, u32 width, u32 slice) {
    u32 i = global_index();
    if (i >= rows * slice) return;
    u32 row = i / slice, j = i % slice, sum = 0;
    for (u32 k = 0; k < width; k++) sum += x[row * width + k] * weights[k * slice + j];
    hidden[i] = mix(sum);
}

// part[row][c]: what a slice adds to the second half of a layer. `weights` are [slice][width].
extern "C" __global__ void slice_project(const u32 *hidden, const u32 *weights, u32 *part, u32 rows, u32 width,
                                         u32 slice) {
    u32 i = global_index();
    if (i >= rows * width) return;
    u32 row = i / width, c = i % width, sum = 0;
    for (u32 j = 0; j < slice; j++) sum += hidden[row * slice + j] * weights[j * width + c];
    part[i] = sum;
}

// The end of a layer: what all slices have added, together with what was there before.
extern "C" __global__ void slice_add(u32 *x, const u32 *sum, u32 n, u32 number) {
    u32 i = global_index();
    if (i < n) x[i] = mix(x[i] + sum[i] + number);
}

extern "C" __global__ void layer_forward(const u32 *in, const u32 *weights, u32 *out, u32 n) {
    u32 i = global_index();
    if (i < n) out[i] = mix(in[i] + weights[i]) ^ in[(i + 1) % n];
}

// The gradient of a layer's weights, and that of what it was given.
extern "C" __global__ void layer_backward(const u32 *d_out, const u32 *in, const u32 *weights, u32 *grad, u32 *d_in,
                                          u32 n) {
    u32 i = global_index();
    if (i >= n) return;
    grad[i] = d_out[i] * weights[i] + in[i];
    d_in[i] = mix(d_out[i] ^ weights[i]) + d_out[(i + 7) % n];
}

extern "C" __global__ void layer_update(u32 *weights, u32 *momentum, const u32 *grad, u32 n) {
    u32 i = global_index();
    if (i >= n) return;
    u32 m = momentum[i] * 3 + grad[i];
    momentum[i] = m;
    weights[i] ^= mix(m);
}
