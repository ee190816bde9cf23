// Sums of memory that several devices have behind one multicast address.
#include "common.cuh"

// Word i of each device becomes the sum of the words i of all of them, for `count` words from `first` on.
extern "C" __global__ void multicast_reduce(u32 *team, u32 first, u32 count) {
    u32 i = global_index();
    if (i >= count) return;
    u32 *word = team + first + i, sum;
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add.u32 %0, [%1];" : "=r"(sum) : "l"(word) : "memory");
    asm volatile("multimem.st.relaxed.sys.global.u32 [%0], %1;" : : "l"(word), "r"(sum) : "memory");
}

// Adds to a word of each device.
extern "C" __global__ void multicast_add(u32 *team, u32 place, u32 value) {
    asm volatile("multimem.red.relaxed.sys.global.add.u32 [%0], %1;" : : "l"(team + place), "r"(value) : "memory");
}
