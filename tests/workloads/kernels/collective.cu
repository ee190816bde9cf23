// Collective operations of processes that have memory of each other, as NCCL has them: a kernel in each of them, and none
// ends before all are launched, except where a process has ended.
//
// A window has 64 words for signs, of which word 63 says who was lost, and then places for data: two times as many as
// there are ranks, `capacity` words each. Those of an operation are used again by the one after the next: who begins that
// has seen that all have ended this one.
#include "common.cuh"

#define RANKS 8 // the most there are; a block has a sign of each
#define STATUS 63
#define DATA 64
#define SUM 0
#define GATHER 1
#define BROADCAST 2 // and the root

// Operation `number`, counted from 1. Each block works on a part of its own, and waits for the blocks of the same number.
// `lost` has a bit for each process that has ended, `members` for each that takes part.
extern "C" __global__ void collective(u32 *const *windows, const volatile u32 *lost, u32 members, u32 rank, u32 ranks,
                                      u32 capacity, const u32 *in, u32 *out, u32 count, u32 number, u32 kind) {
    __shared__ u32 missing;
    u32 part = (count + gridDim.x - 1) / gridDim.x, first = blockIdx.x * part;
    u32 end = first + part < count ? first + part : count;
    volatile u32 *own = windows[rank];
    u32 places = DATA + number % 2 * ranks * capacity;
    if (kind < BROADCAST || kind - BROADCAST == rank) {
        for (u32 peer = 0; peer < ranks; peer++) {
            volatile u32 *place = windows[peer] + places + rank * capacity;
            for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) place[i] = in[i];
        }
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32 signs = blockIdx.x * RANKS;
        missing = 0;
        for (u32 peer = 0; peer < ranks; peer++) *(volatile u32 *)(windows[peer] + signs + rank) = number;
        for (u32 peer = 0; peer < ranks && !missing; peer++) {
            while (own[signs + peer] < number && !missing) missing = *lost & members;
        }
        if (missing) own[STATUS] = missing;
        __threadfence_system();
    }
    __syncthreads();
    if (missing) return;
    for (u32 i = first + threadIdx.x; i < end; i += blockDim.x) {
        volatile u32 *place = own + places + i;
        if (kind >= BROADCAST) {
            out[i] = place[(kind - BROADCAST) * capacity];
            continue;
        }
        u32 sum = 0;
        for (u32 peer = 0; peer < ranks; peer++) {
            if (kind == GATHER) out[peer * count + i] = place[peer * capacity];
            else sum += place[peer * capacity];
        }
        if (kind == SUM) out[i] = sum;
    }
}
