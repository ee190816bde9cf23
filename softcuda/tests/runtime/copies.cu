// Copies and fills of all shapes.
#include "check.h"
#include <cstring>

int main() {
    char host[8][16], back[8][16];
    for (int i = 0; i < 128; i++) {
        host[i / 16][i % 16] = static_cast<char>(i);
    }
    char* pitched;
    size_t pitch;
    CHECK(cudaMallocPitch(&pitched, &pitch, 16, 8));
    EXPECT(pitch >= 16);
    CHECK(cudaMemset2D(pitched, pitch, 0, 16, 8));
    CHECK(cudaMemcpy2D(pitched + 4, pitch, host[1] + 2, 16, 10, 5, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2D(back, 16, pitched, pitch, 16, 8, cudaMemcpyDeviceToHost));
    EXPECT(back[0][4] == 18 && back[4][13] == 64 + 16 + 11 && back[5][4] == 0 && back[0][3] == 0);

    cudaPitchedPtr box;
    CHECK(cudaMalloc3D(&box, make_cudaExtent(16, 4, 2)));
    CHECK(cudaMemset3D(box, 7, make_cudaExtent(16, 4, 2)));
    cudaMemcpy3DParms copy = {};
    copy.srcPtr = make_cudaPitchedPtr(host, 16, 16, 4);
    copy.dstPtr = box;
    copy.dstPos = make_cudaPos(8, 1, 1);
    copy.extent = make_cudaExtent(8, 2, 1);
    copy.kind = cudaMemcpyHostToDevice;
    CHECK(cudaMemcpy3D(&copy));
    copy = {};
    copy.srcPtr = box;
    copy.dstPtr = make_cudaPitchedPtr(back, 16, 16, 4);
    copy.extent = make_cudaExtent(16, 4, 2);
    copy.kind = cudaMemcpyDeviceToHost;
    CHECK(cudaMemcpy3D(&copy));
    EXPECT(back[4][0] == 7 && back[5][8] == 0 && back[6][15] == 23 && back[7][8] == 7);

    char *one, *two;
    CHECK(cudaMalloc(&one, 128));
    CHECK(cudaMalloc(&two, 128));
    CHECK(cudaMemcpy(one, host, 128, cudaMemcpyDefault));
    CHECK(cudaMemcpy(two, one, 128, cudaMemcpyDeviceToDevice));
    CHECK(cudaMemset(one, 9, 64));
    CHECK(cudaMemcpyAsync(two, one, 32, cudaMemcpyDefault, 0));
    std::memset(back, 0, sizeof back);
    CHECK(cudaMemcpy(back, two, 128, cudaMemcpyDefault));
    EXPECT(back[0][31 % 16] == 9 && back[2][0] == 32 && back[7][15] == 127);

    cudaArray_t array;
    cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
    CHECK(cudaMallocArray(&array, &format, 8, 4));
    float numbers[4][8], read[4][8];
    for (int i = 0; i < 32; i++) {
        numbers[i / 8][i % 8] = i * 0.5f;
    }
    CHECK(cudaMemcpy2DToArray(array, 0, 0, numbers, 32, 32, 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy2DFromArray(read, 32, array, 0, 0, 32, 4, cudaMemcpyDeviceToHost));
    EXPECT(std::memcmp(numbers, read, sizeof read) == 0);
    CHECK(cudaFreeArray(array));
    return passed("copies");
}
