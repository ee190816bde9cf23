// Kernels of several processes that wait for each other: none of them ends before all have been launched.
//
// A box has 64 words: 0 is how many meetings the process before has come to, 1 a value that the meetings change, and
// from 32 on are the values that the process before has left, of the last 32 meetings.
#include "common.cuh"

// Meeting `step`, counted from 1: leaves the own value in the next one's box, and waits for the one before.
extern "C" __global__ void meet(volatile u32 *own, volatile u32 *next, u32 step) {
    if (global_index() != 0) return;
    u32 value = own[1];
    next[32 + step % 32] = value;
    __threadfence_system();
    next[0] = step;
    while (own[0] < step) {
    }
    __threadfence_system();
    own[1] = mix(value + step) ^ own[32 + step % 32];
}
