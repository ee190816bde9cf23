/* A program that saves itself, for the tests of libgpucr.so. The first argument says how. */

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <gpucr.h>

#define WORDS 4096
#define THREADS 4

typedef int (*cu)();

static void *driver;
static unsigned long long context, memory, stream;
static pthread_barrier_t barrier;

static int call(const char *name, long a, long b, long c, long d)
{
    cu function = (cu)dlsym(driver, name);
    if (!function) {
        printf("no %s\n", name);
        exit(2);
    }
    return function(a, b, c, d);
}

static void must(const char *name, long a, long b, long c, long d)
{
    int code = call(name, a, b, c, d);
    if (code) {
        printf("%s: %d\n", name, code);
        exit(2);
    }
}

static void said(void *data) { printf("%s\n", (const char *)data); }

/* What the device has is what was put there. */
static void step(unsigned number)
{
    static unsigned host[WORDS];
    must("cuMemcpyDtoH_v2", (long)host, memory, sizeof host, 0);
    for (int i = 0; i < WORDS; i++)
        if (host[i] != number)
            printf("word %d is %u\n", i, host[i]);
    printf("step %u\n", number);
    must("cuMemsetD32_v2", memory, number + 1, WORDS, 0);
    usleep(20000);
}

/* Saves itself in the middle, and ends as if it had failed if it was not restored then. */
static void again(void)
{
    int lives = 0;
    for (unsigned i = 0; i < 8; i++) {
        if (i == 3) {
            int code = gpucr_checkpoint("step-3");
            printf("checkpoint %d %s\n", code, gpucr_reason());
            lives += code == GPUCR_RESTORED;
        }
        if (i == 6 && !lives)
            kill(getpid(), SIGKILL);
        step(i);
    }
}

static void *one_of_several(void *name)
{
    pthread_barrier_wait(&barrier);
    return (void *)(long)gpucr_checkpoint(name);
}

/* Several threads at the same time, and then one that was not restored is ended. */
static void threads(void)
{
    pthread_t all[THREADS];
    long codes[THREADS];
    int restored = 0;
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (int i = 0; i < THREADS; i++)
        pthread_create(&all[i], NULL, one_of_several, NULL);
    for (int i = 0; i < THREADS; i++) {
        pthread_join(all[i], (void **)&codes[i]);
        restored += codes[i] == GPUCR_RESTORED;
    }
    printf("checkpoints %ld %ld %ld %ld\n", codes[0], codes[1], codes[2], codes[3]);
    if (!restored)
        kill(getpid(), SIGKILL);
    step(0);
}

/* In a capture it is refused, and after it done. */
static void capture(void)
{
    void *graph;
    must("cuStreamBeginCapture_v2", stream, 2, 0, 0);
    int code = gpucr_checkpoint(NULL);
    printf("checkpoint %d %s\n", code, gpucr_reason());
    must("cuStreamEndCapture", stream, (long)&graph, 0, 0);
    printf("checkpoint %d\n", gpucr_checkpoint(NULL));
}

static void names(void)
{
    static char longest[300];
    memset(longest, 'n', sizeof longest - 1);
    const char *all[] = {"../outside", "/tmp/outside", ".hidden", "a/b", "\xff", longest, "good", "good"};
    for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
        int code = gpucr_checkpoint(all[i]);
        printf("checkpoint %d %s\n", code, gpucr_reason());
    }
}

static void nested(void *data)
{
    (void)data;
    printf("nested %d\n", gpucr_checkpoint(NULL));
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *how = count > 1 ? arguments[1] : "";
    gpucr_before_dump(said, "before 1");
    gpucr_before_dump(said, "before 2");
    gpucr_after_dump(said, "after dump");
    gpucr_after_restore(said, "after restore 1");
    gpucr_after_restore(said, "after restore 2");
    if (gpucr_before_dump(NULL, NULL) != GPUCR_ERROR_CALLBACK)
        return 3;
    if (!strcmp(how, "early")) {
        printf("checkpoint %d\n", gpucr_checkpoint(NULL));
        return 0;
    }
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver)
        return 2;
    must("cuInit", 0, 0, 0, 0);
    must("cuDevicePrimaryCtxRetain", (long)&context, 0, 0, 0);
    must("cuCtxSetCurrent", context, 0, 0, 0);
    must("cuMemAlloc_v2", (long)&memory, WORDS * 4, 0, 0);
    must("cuStreamCreate", (long)&stream, 1, 0, 0);
    must("cuMemsetD32_v2", memory, 0, WORDS, 0);
    if (!strcmp(how, "again"))
        again();
    else if (!strcmp(how, "threads"))
        threads();
    else if (!strcmp(how, "capture"))
        capture();
    else if (!strcmp(how, "names"))
        names();
    else if (!strcmp(how, "nested")) {
        gpucr_before_dump(nested, NULL);
        int code = gpucr_checkpoint(NULL);
        printf("checkpoint %d %s\n", code, gpucr_reason());
    }
    printf("end\n");
    return 0;
}
