// Separate compilation: functions, variables and pointers to functions across files.
// flags: -rdc=true
// with: separate_part.cu
#include "check.h"

extern __device__ int in_other_file(int value);
extern __device__ int shared_by_files;
extern __constant__ int factor_of_files;
typedef int (*Function)(int);
extern __device__ Function chosen;
void launch_other(int* out);

__global__ void here(int* out) {
    out[0] = in_other_file(5) + shared_by_files;
    out[1] = chosen(6) * factor_of_files;
}

int main() {
    int *out, host[3];
    CHECK(cudaMalloc(&out, sizeof host));
    int three = 3;
    CHECK(cudaMemcpyToSymbol(factor_of_files, &three, sizeof three));
    here<<<1, 1>>>(out);
    CHECK(cudaGetLastError());
    launch_other(out + 2);
    CHECK(cudaMemcpy(host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host[0] == 50 + 8 && host[1] == 108 && host[2] == 9);
    return passed("separate");
}
