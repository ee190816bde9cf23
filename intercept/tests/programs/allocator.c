// An allocator to be preloaded. It knows what it has given out, and ends a program that gives back anything else.

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ARENA = 1 << 30, ALIGN = 16 };

// In front of each allocation.
struct head {
    size_t size;
    size_t used;
};

static const size_t USED = 0x616c6c6f63617465;
static char *arena;
static size_t taken;

__attribute__((constructor(101))) static void begin(void)
{
    if (arena == NULL)
        arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

static void *take(size_t align, size_t size)
{
    begin();
    size_t need = sizeof(struct head) + align + size;
    char *at = arena + __atomic_fetch_add(&taken, (need + ALIGN - 1) / ALIGN * ALIGN, __ATOMIC_RELAXED);
    if (at + need > arena + ARENA)
        return NULL;
    at = (char *)(((uintptr_t)at + sizeof(struct head) + align - 1) / align * align);
    struct head *head = (struct head *)at - 1;
    head->size = size;
    head->used = USED;
    return at;
}

static struct head *head_of(void *at)
{
    struct head *head = (struct head *)at - 1;
    if ((char *)at < arena || (char *)at >= arena + ARENA || head->used != USED) {
        static const char text[] = "not an allocation of this allocator\n";
        (void)!write(2, text, sizeof text - 1);
        abort();
    }
    return head;
}

// Nothing is used again.
void free(void *at)
{
    if (at != NULL)
        head_of(at)->used = 0;
}

void *malloc(size_t size)
{
    return take(ALIGN, size);
}

// The arena is zero where nothing has been.
void *calloc(size_t count, size_t size)
{
    return take(ALIGN, count * size);
}

void *realloc(void *at, size_t size)
{
    void *to = take(ALIGN, size);
    if (at != NULL && to != NULL) {
        size_t before = head_of(at)->size;
        memcpy(to, at, before < size ? before : size);
        free(at);
    }
    return to;
}

void *memalign(size_t align, size_t size)
{
    return take(align < ALIGN ? ALIGN : align, size);
}

void *aligned_alloc(size_t align, size_t size)
{
    return memalign(align, size);
}

int posix_memalign(void **out, size_t align, size_t size)
{
    *out = memalign(align, size);
    return *out == NULL ? ENOMEM : 0;
}

size_t malloc_usable_size(void *at)
{
    return at == NULL ? 0 : head_of(at)->size;
}
