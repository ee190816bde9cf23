// Variables of the device: with and without initial values, constants, copies to and from them, their addresses.
#include "check.h"

__device__ int counter = 41;
__device__ float table[4] = {1.5f, 2.5f, 3.5f, 4.5f};
__device__ int* pointer;
__constant__ int factors[8];
__constant__ double half = 0.5;
static __device__ unsigned long long hidden = 1ull << 40;

struct Node {
    int value;
    const char* name;
};
__device__ const char text[] = "text";
__device__ Node node = {7, text};

__global__ void use(double* out) {
    out[0] = counter + table[3];
    out[1] = factors[7] * half;
    out[2] = static_cast<double>(hidden);
    out[3] = node.value + node.name[1];
    out[4] = *pointer;
    counter += 1;
}

int main() {
    double *out, host[5];
    int* number;
    CHECK(cudaMalloc(&out, sizeof host));
    CHECK(cudaMalloc(&number, sizeof(int)));
    int nine = 9;
    CHECK(cudaMemcpy(number, &nine, sizeof nine, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpyToSymbol(pointer, &number, sizeof number));
    int values[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    CHECK(cudaMemcpyToSymbol(factors, values, sizeof values));
    use<<<1, 1>>>(out);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 45.5 && host[1] == 4.0 && host[2] == double(1ull << 40));
    EXPECT(host[3] == 7 + 'e' && host[4] == 9);

    int after;
    CHECK(cudaMemcpyFromSymbol(&after, counter, sizeof after));
    EXPECT(after == 42);
    cudaStream_t stream;
    CHECK(cudaStreamCreate(&stream));
    int hundred = 100;
    CHECK(cudaMemcpyToSymbolAsync(factors, &hundred, sizeof hundred, 7 * sizeof(int), cudaMemcpyHostToDevice, stream));
    use<<<1, 1, 0, stream>>>(out);
    CHECK(cudaMemcpyFromSymbolAsync(&after, counter, sizeof after, 0, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[1] == 50.0 && after == 43);

    void* address;
    size_t size;
    CHECK(cudaGetSymbolAddress(&address, table));
    CHECK(cudaGetSymbolSize(&size, table));
    EXPECT(size == sizeof table);
    float two = 2.0f;
    CHECK(cudaMemcpy(static_cast<float*>(address) + 3, &two, sizeof two, cudaMemcpyHostToDevice));
    use<<<1, 1>>>(out);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 45.0);
    GIVES(cudaMemcpyToSymbol(counter, values, sizeof values), cudaErrorInvalidValue);
    int local = 0;
    GIVES(cudaGetSymbolAddress(&address, local), cudaErrorInvalidSymbol);
    return passed("symbols");
}
