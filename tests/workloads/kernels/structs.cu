// Pointers that reach the kernel inside structs, nested ones and arrays among them.
#include "common.cuh"

struct Output {
    u32 *words;
    u32 count;
};

struct Job {
    unsigned char tag; // puts padding in front of the first pointer
    const u32 *source;
    Output out;
    short shift;
    u32 *counter;
    double weight;
};

struct Parts {
    u32 count;
    u32 *part[6];
};

// A pointer as two halves, neither of which looks like an address.
struct Split {
    u32 low;
    u32 step;
    u32 high;
};

extern "C" __global__ void structs_apply(Job job) {
    u32 i = global_index();
    if (i >= job.out.count) return;
    u32 v = mix(job.source[i] + job.tag) >> job.shift;
    job.out.words[i] = v + (u32)(job.weight * (double)(i & 1023u));
    if ((v & 1u) != 0) atomicAdd(job.counter, 1u);
}

extern "C" __global__ void structs_spread(const u32 *from, u32 n, Parts parts, u32 step) {
    u32 i = global_index();
    if (i >= n) return;
    u32 *to = parts.part[(i + step) % parts.count];
    to[i] = to[i] * 5u + from[i];
}

extern "C" __global__ void structs_split(Split split, u32 n, const u32 *from) {
    u32 i = global_index();
    if (i >= n) return;
    u32 *words = (u32 *)(((u64)split.high << 32) | split.low);
    words[i] ^= from[(i + split.step) % n];
}
