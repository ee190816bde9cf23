// Pointers that exist only in device memory: linked lists across allocations, and a table of
// masked pointers.
#include "common.cuh"

struct Node {
    Node *next;
    u64 value;
    u32 id;
    u32 visits;
};

#define MASK 0x5bd1e995a5c3963bull

// Links node i (of all pools taken together) to node (i * stride + shift) % total. Runs of nodes
// then jump between the pools, which are separate allocations.
extern "C" __global__ void lists_link(Node *const *pools, u32 pool_nodes, u32 total, u32 stride,
                                      u32 shift, u32 first) {
    u32 i = global_index();
    if (i >= total) return;
    Node *node = pools[i / pool_nodes] + i % pool_nodes;
    u32 to = (u32)(((u64)i * stride + shift) % total);
    node->next = pools[to / pool_nodes] + to % pool_nodes;
    if (first) {
        node->value = mix(i);
        node->id = i;
        node->visits = 0;
    }
}

// Each walker follows the list from its own node. Walkers meet, so they add with atomics.
extern "C" __global__ void lists_walk(Node *const *pools, u32 pool_nodes, u32 walkers, u32 hops,
                                      u64 *trace) {
    u32 w = global_index();
    if (w >= walkers) return;
    Node *node = pools[w / pool_nodes] + w % pool_nodes;
    u64 path = 0;
    for (u32 h = 0; h < hops; h++) {
        path = path * 31 + node->id;
        atomicAdd(&node->visits, 1u);
        atomicAdd(&node->value, (u64)w + h);
        node = node->next;
    }
    trace[w] += path;
}

// Hides the pools' addresses: nothing in `masked` looks like a pointer.
extern "C" __global__ void table_mask(Node *const *pools, u64 *masked, u32 count) {
    u32 i = global_index();
    if (i < count) masked[i] = (u64)pools[i] ^ MASK;
}

// Updates the pools through the masked table.
extern "C" __global__ void table_touch(const u64 *masked, u32 pool_nodes, u32 total, u32 step) {
    u32 i = global_index();
    if (i >= total) return;
    Node *node = (Node *)(masked[i / pool_nodes] ^ MASK) + i % pool_nodes;
    node->value = node->value * 7 + step;
}
