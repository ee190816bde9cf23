// BLAKE3 of pieces of device memory, equal to that of the same bytes on the host.
//
// A span of at most 2 MiB has up to 2048 leaves of 1 KiB. Eight thread blocks of 256 threads hash it: a thread
// one leaf, a block a part of 256 leaves, whose tree it joins in shared memory. The block that ends last joins
// the tops of the parts. So a few spans keep a whole device busy: while this runs, nothing else does.
//
// On the way it adds up the words of each leaf, each times a random number, and then the leaves, each times
// another one: a sum (see sum.rs) that the host can repeat at little cost for the bytes that a copy has brought.
// It is one of the very words that are hashed: each is read once, as others may write to them meanwhile.
//
// Algorithm: the BLAKE3 paper, https://github.com/BLAKE3-team/BLAKE3-specs. The PTX next to this file
// is made from it by build.py.

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

#define THREADS 256
#define PARTS 8
#define LEAF 1024
#define BLOCK 64

#define CHUNK_START 1u
#define CHUNK_END 2u
#define PARENT 4u
#define ROOT 8u

#define IV0 0x6A09E667u
#define IV1 0xBB67AE85u
#define IV2 0x3C6EF372u
#define IV3 0xA54FF53Au
#define IV4 0x510E527Fu
#define IV5 0x9B05688Cu
#define IV6 0x1F83D9ABu
#define IV7 0x5BE0CD19u

struct Span {
    u64 address; // a multiple of 16
    u64 len;     // at most PARTS * THREADS * LEAF
};

// What sums are made with.
struct Key {
    uint4 words[LEAF / 16]; // by which the words of a leaf are multiplied
    u64 seed;               // of that by which leaves are
};

__device__ __forceinline__ u32 rotate(u32 x, u32 n) { return __funnelshift_r(x, x, n); }

#define MIX(a, b, c, d, x, y)         \
    a = a + b + (x);                  \
    d = rotate(d ^ a, 16);            \
    c = c + d;                        \
    b = rotate(b ^ c, 12);            \
    a = a + b + (y);                  \
    d = rotate(d ^ a, 8);             \
    c = c + d;                        \
    b = rotate(b ^ c, 7);

// The seven orders in which the rounds take the words of a block.
__device__ constexpr u8 ORDER[7][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
    {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
    {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1},
    {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
    {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4},
    {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
    {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13},
};

// cv becomes the chaining value after a block of `len` bytes.
__device__ __forceinline__ void compress(u32 cv[8], const u32 m[16], u32 counter, u32 len, u32 flags) {
    u32 s0 = cv[0], s1 = cv[1], s2 = cv[2], s3 = cv[3];
    u32 s4 = cv[4], s5 = cv[5], s6 = cv[6], s7 = cv[7];
    u32 s8 = IV0, s9 = IV1, s10 = IV2, s11 = IV3;
    u32 s12 = counter, s13 = 0, s14 = len, s15 = flags;
#pragma unroll
    for (int r = 0; r < 7; r++) {
        MIX(s0, s4, s8, s12, m[ORDER[r][0]], m[ORDER[r][1]])
        MIX(s1, s5, s9, s13, m[ORDER[r][2]], m[ORDER[r][3]])
        MIX(s2, s6, s10, s14, m[ORDER[r][4]], m[ORDER[r][5]])
        MIX(s3, s7, s11, s15, m[ORDER[r][6]], m[ORDER[r][7]])
        MIX(s0, s5, s10, s15, m[ORDER[r][8]], m[ORDER[r][9]])
        MIX(s1, s6, s11, s12, m[ORDER[r][10]], m[ORDER[r][11]])
        MIX(s2, s7, s8, s13, m[ORDER[r][12]], m[ORDER[r][13]])
        MIX(s3, s4, s9, s14, m[ORDER[r][14]], m[ORDER[r][15]])
    }
    cv[0] = s0 ^ s8;
    cv[1] = s1 ^ s9;
    cv[2] = s2 ^ s10;
    cv[3] = s3 ^ s11;
    cv[4] = s4 ^ s12;
    cv[5] = s5 ^ s13;
    cv[6] = s6 ^ s14;
    cv[7] = s7 ^ s15;
}

__device__ __forceinline__ void start(u32 cv[8]) {
    cv[0] = IV0; cv[1] = IV1; cv[2] = IV2; cv[3] = IV3;
    cv[4] = IV4; cv[5] = IV5; cv[6] = IV6; cv[7] = IV7;
}

// The words of a block of up to 64 bytes, filled up with zeros.
__device__ __forceinline__ void load(u32 m[16], const u8* from, u32 len) {
    if (len == BLOCK) {
        const uint4* words = (const uint4*)from;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint4 v = words[i];
            m[4 * i] = v.x; m[4 * i + 1] = v.y; m[4 * i + 2] = v.z; m[4 * i + 3] = v.w;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            u32 word = 0;
            for (u32 b = 0; b < 4; b++) {
                u32 at = 4 * i + b;
                if (at < len) word |= (u32)from[at] << (8 * b);
            }
            m[i] = word;
        }
    }
}

// By what leaf `number` is multiplied: an odd number.
__device__ __forceinline__ u64 multiplier(u64 seed, u32 number) {
    u64 z = seed + number * 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (z ^ (z >> 31)) | 1;
}

// The chaining value of leaf `number`; with `root` the hash of a span that has no other. And its sum.
__device__ void leaf(u32 cv[8], u64& sum, const Key* key, const u8* from, u64 len, u32 number, u32 root) {
    start(cv);
    sum = 0;
    u32 m[16];
    u32 blocks = len == 0 ? 1 : (u32)((len + BLOCK - 1) / BLOCK);
    for (u32 i = 0; i < blocks; i++) {
        u32 rest = (u32)len - i * BLOCK;
        u32 size = rest < BLOCK ? rest : BLOCK;
        load(m, from + i * BLOCK, size);
#pragma unroll
        for (int w = 0; w < 4; w++) {
            uint4 k = key->words[4 * i + w];
            sum += (u64)m[4 * w] * k.x + (u64)m[4 * w + 1] * k.y;
            sum += (u64)m[4 * w + 2] * k.z + (u64)m[4 * w + 3] * k.w;
        }
        u32 flags = (i == 0 ? CHUNK_START : 0) | (i + 1 == blocks ? CHUNK_END | root : 0);
        compress(cv, m, number, size, flags);
    }
    sum *= multiplier(key->seed, number);
}

// left becomes the chaining value of the node above left and right.
__device__ __forceinline__ void join(u32 left[8], const u32 right[8], u32 root) {
    u32 m[16];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        m[i] = left[i];
        m[i + 8] = right[i];
    }
    start(left);
    compress(left, m, 0, BLOCK, PARENT | root);
}

// What the blocks of a span tell each other. All zero before the first launch, and after each.
struct Shared {
    u32 tops[PARTS][8];
    u64 sums[PARTS];
    u32 ended; // blocks
    u32 padding[15];
};

// Joins `nodes` chaining values, at most as many as there are threads, to one. Levels of a tree join
// neighbours; where their number is odd, the last goes up as it is. That gives the tree of the
// specification, in which every left subtree is complete. With `root` what is on top is the hash.
__device__ void join_all(u32 tops[][8], u32 nodes, u32 root) {
    u32 own = threadIdx.x;
    while (nodes > 1) {
        u32 above = (nodes + 1) / 2;
        u32 cv[8], right[8];
        bool mine = own < above;
        if (mine) {
#pragma unroll
            for (int w = 0; w < 8; w++) cv[w] = tops[2 * own][w];
            if (2 * own + 1 < nodes) {
#pragma unroll
                for (int w = 0; w < 8; w++) right[w] = tops[2 * own + 1][w];
                join(cv, right, nodes == 2 ? root : 0);
            }
        }
        __syncthreads();
        if (mine) {
#pragma unroll
            for (int w = 0; w < 8; w++) tops[own][w] = cv[w];
        }
        __syncthreads();
        nodes = above;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
gpucr_blake3(const Span* spans, u8* hashes, u64* sums, Shared* shared, const Key* key) {
    __shared__ u32 tops[THREADS][8];
    __shared__ u64 total;
    __shared__ bool last;
    u32 number = blockIdx.x / PARTS, part = blockIdx.x % PARTS;
    const u8* from = (const u8*)spans[number].address;
    u64 len = spans[number].len;
    u32 leaves = len == 0 ? 1 : (u32)((len + LEAF - 1) / LEAF);
    u32 parts = (leaves + THREADS - 1) / THREADS;
    u32 own = threadIdx.x;
    if (part >= parts) return;
    if (own == 0) total = 0;
    __syncthreads();

    u32 first = part * THREADS;
    u32 nodes = leaves - first < THREADS ? leaves - first : THREADS;
    if (own < nodes) {
        u64 at = (u64)(first + own) * LEAF;
        u64 rest = len - at;
        u32 cv[8];
        u64 sum;
        leaf(cv, sum, key, from + at, rest < LEAF ? rest : LEAF, first + own, leaves == 1 ? ROOT : 0);
#pragma unroll
        for (int w = 0; w < 8; w++) tops[own][w] = cv[w];
        atomicAdd(&total, sum);
    }
    __syncthreads();
    join_all(tops, nodes, parts == 1 ? ROOT : 0);

    // One thread says what this block has found, and then that it has ended; a thread that is told by the last one
    // sees what all of them have said.
    Shared* of_span = &shared[number];
    if (own == 0) {
#pragma unroll
        for (int w = 0; w < 8; w++) of_span->tops[part][w] = tops[0][w];
        of_span->sums[part] = total;
        __threadfence();
        last = atomicAdd(&of_span->ended, 1) + 1 == parts;
        __threadfence();
    }
    __syncthreads();
    if (!last) return;
    if (own < parts) {
#pragma unroll
        for (int w = 0; w < 8; w++) tops[own][w] = ((volatile u32*)of_span->tops[own])[w];
    }
    __syncthreads();
    join_all(tops, parts, ROOT);
    if (own == 0) {
        u64 sum = 0;
        for (u32 i = 0; i < parts; i++) sum += ((volatile u64*)of_span->sums)[i];
        sums[number] = sum;
        of_span->ended = 0;
    }
    if (own < 8) {
        u32 word = tops[0][own];
        u8* to = hashes + (u64)number * 32 + own * 4;
        to[0] = word; to[1] = word >> 8; to[2] = word >> 16; to[3] = word >> 24;
    }
}
