// A kernel for the tests of fat binaries. How its binaries are made is in README.md.

extern "C" __global__ void scale(unsigned *data, unsigned factor)
{
    data[threadIdx.x] *= factor;
}
