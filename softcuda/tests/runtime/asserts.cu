// An assertion of a kernel fails: the error stays, and names it.
#include "check.h"
#undef NDEBUG
#include <cassert>

__global__ void assert_less(int value, int limit) { assert(value < limit); }

int main() {
    assert_less<<<1, 1>>>(1, 2);
    CHECK(cudaDeviceSynchronize());
    assert_less<<<1, 1>>>(2, 2);
    GIVES(cudaDeviceSynchronize(), cudaErrorAssert);
    GIVES(cudaGetLastError(), cudaErrorAssert);
    return passed("asserts");
}
