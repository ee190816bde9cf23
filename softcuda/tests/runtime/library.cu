// Libraries: code that is loaded while the program runs.
#include "check.h"
#include <cstring>

static const char code[] = R"(
.version 7.0
.target sm_75
.address_size 64
.visible .global .align 4 .u32 base = 30;
.visible .entry add_base(.param .u64 out, .param .u32 what)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<3>;
    ld.param.u64 %rd1, [out];
    ld.param.u32 %r1, [what];
    ld.global.u32 %r2, [base];
    add.u32 %r3, %r1, %r2;
    st.global.u32 [%rd1], %r3;
    ret;
}
.visible .entry nothing() { ret; }
)";

int main() {
#if CUDART_VERSION >= 12080
    cudaLibrary_t library;
    CHECK(cudaLibraryLoadData(&library, code, nullptr, nullptr, 0, nullptr, nullptr, 0));
    cudaKernel_t kernel, kernels[2];
    CHECK(cudaLibraryGetKernel(&kernel, library, "add_base"));
    unsigned count = 0;
    CHECK(cudaLibraryGetKernelCount(&count, library));
    EXPECT(count == 2);
    CHECK(cudaLibraryEnumerateKernels(kernels, 2, library));
    EXPECT(kernels[0] == kernel || kernels[1] == kernel);
    int *out, what = 12, host = 0;
    CHECK(cudaMalloc(&out, sizeof(int)));
    void* arguments[] = {&out, &what};
    CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(1), dim3(1), arguments, 0, nullptr));
    CHECK(cudaMemcpy(&host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host == 42);
    void* base;
    size_t bytes = 0;
    CHECK(cudaLibraryGetGlobal(&base, &bytes, library, "base"));
    EXPECT(bytes == 4);
    CHECK(cudaMemcpy(base, &what, sizeof what, cudaMemcpyHostToDevice));
    CHECK(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(1), dim3(1), arguments, 0, nullptr));
    CHECK(cudaMemcpy(&host, out, sizeof host, cudaMemcpyDeviceToHost));
    EXPECT(host == 24);
    GIVES(cudaLibraryGetKernel(&kernel, library, "no_such"), cudaErrorSymbolNotFound);
    (void)cudaGetLastError();
    CHECK(cudaLibraryUnload(library));
    // Text is looked at when something of it is wanted.
    CHECK(cudaLibraryLoadData(&library, "no code", nullptr, nullptr, 0, nullptr, nullptr, 0));
    EXPECT(cudaLibraryGetKernel(&kernel, library, "add_base") != cudaSuccess);
    (void)cudaGetLastError();
    CHECK(cudaLibraryUnload(library));
#endif
    (void)code;
    return passed("library");
}
