// A two-layer perceptron with its training steps. Weight matrices are [n_in + 1][n_out]; the last
// row is the bias.
#include "common.cuh"

// A batch of inputs and of the targets that belong to them.
extern "C" __global__ void mlp_batch(float *x, float *y, u32 rows, u32 n_in, u32 n_out, u32 seed) {
    u32 i = global_index();
    if (i < rows * n_in) x[i] = unit(mix(seed + i));
    if (i < rows * n_out) {
        u32 row = i / n_out, o = i % n_out;
        u32 base = seed + row * n_in;
        float a = unit(mix(base + o % n_in));
        float b = unit(mix(base + (o + 1) % n_in));
        float c = unit(mix(base + (o + 2) % n_in));
        y[i] = __fsub_rn(fabsf(a), __fmul_rn(b, c));
    }
}

extern "C" __global__ void mlp_forward(const float *in, const float *w, float *out, u32 rows,
                                       u32 n_in, u32 n_out, u32 relu) {
    u32 i = global_index();
    if (i >= rows * n_out) return;
    u32 row = i / n_out, o = i % n_out;
    float sum = w[n_in * n_out + o];
    for (u32 k = 0; k < n_in; k++) sum = __fmaf_rn(in[row * n_in + k], w[k * n_out + o], sum);
    out[i] = (relu && sum < 0.0f) ? 0.0f : sum;
}

// Mean squared error (one block of 256 threads, fixed order of addition) and its gradient.
extern "C" __global__ void mlp_loss(const float *out, const float *y, float *d_out, float *losses,
                                    u32 step, u32 n, float scale) {
    __shared__ float part[256];
    float sum = 0.0f;
    for (u32 i = threadIdx.x; i < n; i += 256) {
        float d = __fsub_rn(out[i], y[i]);
        d_out[i] = __fmul_rn(__fmul_rn(2.0f, d), scale);
        sum = __fmaf_rn(d, d, sum);
    }
    part[threadIdx.x] = sum;
    __syncthreads();
    for (u32 half = 128; half > 0; half >>= 1) {
        if (threadIdx.x < half) {
            part[threadIdx.x] = __fadd_rn(part[threadIdx.x], part[threadIdx.x + half]);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) losses[step] = __fmul_rn(part[0], scale);
}

extern "C" __global__ void mlp_grad_weights(const float *in, const float *d_out, float *grad,
                                            u32 rows, u32 n_in, u32 n_out) {
    u32 i = global_index();
    if (i >= (n_in + 1) * n_out) return;
    u32 k = i / n_out, o = i % n_out;
    float sum = 0.0f;
    for (u32 row = 0; row < rows; row++) {
        float a = k < n_in ? in[row * n_in + k] : 1.0f;
        sum = __fmaf_rn(a, d_out[row * n_out + o], sum);
    }
    grad[i] = sum;
}

// Gradient of the layer's input; `act` is that input after its ReLU.
extern "C" __global__ void mlp_grad_input(const float *d_out, const float *w, const float *act,
                                          float *d_in, u32 rows, u32 n_in, u32 n_out) {
    u32 i = global_index();
    if (i >= rows * n_in) return;
    u32 row = i / n_in, k = i % n_in;
    float sum = 0.0f;
    for (u32 o = 0; o < n_out; o++) {
        sum = __fmaf_rn(d_out[row * n_out + o], w[k * n_out + o], sum);
    }
    d_in[i] = act[i] > 0.0f ? sum : 0.0f;
}

extern "C" __global__ void sgd_update(float *w, const float *grad, float *velocity, u32 n, float lr,
                                      float momentum) {
    u32 i = global_index();
    if (i >= n) return;
    float v = __fmaf_rn(momentum, velocity[i], grad[i]);
    velocity[i] = v;
    w[i] = __fmaf_rn(-lr, v, w[i]);
}

struct AdamW {
    float lr, beta1, beta2, epsilon, decay;
    float correction1, correction2; // 1 - beta^t
};

extern "C" __global__ void adamw_update(float *w, const float *grad, float *m, float *v, u32 n,
                                        AdamW p) {
    u32 i = global_index();
    if (i >= n) return;
    float g = grad[i];
    float m1 = __fmaf_rn(p.beta1, m[i], __fmul_rn(__fsub_rn(1.0f, p.beta1), g));
    float v1 = __fmaf_rn(p.beta2, v[i], __fmul_rn(__fsub_rn(1.0f, p.beta2), __fmul_rn(g, g)));
    m[i] = m1;
    v[i] = v1;
    float m_hat = __fdiv_rn(m1, p.correction1);
    float v_hat = __fdiv_rn(v1, p.correction2);
    float update = __fdiv_rn(m_hat, __fadd_rn(__fsqrt_rn(v_hat), p.epsilon));
    update = __fmaf_rn(p.decay, w[i], update);
    w[i] = __fmaf_rn(-p.lr, update, w[i]);
}
