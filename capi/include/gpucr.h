/* gpucr: a program that saves itself.
 *
 * Link with -lgpucr. Start the program with `gpucr run --store DIR`, which makes the image and can restore it. Without
 * that gpucr_checkpoint returns GPUCR_ERROR_NOT_WATCHED and does nothing else, so a program that calls it runs
 * everywhere. All functions may be called from any thread.
 */
#ifndef GPUCR_H
#define GPUCR_H

#ifdef __cplusplus
extern "C" {
#endif

/* There is an image, and the program continues. */
#define GPUCR_SAVED 0
/* The program was restored, from an image that was made during the call. */
#define GPUCR_RESTORED 1
/* It was not started by `gpucr run --store DIR`, or that has ended. */
#define GPUCR_ERROR_NOT_WATCHED (-1)
/* The process has not called cuInit yet, or has no gpucr between itself and the driver. */
#define GPUCR_ERROR_NO_CUDA (-2)
/* The calling thread has a stream capture under way. */
#define GPUCR_ERROR_CAPTURING (-3)
/* The name is not valid: a name has 1 to 200 bytes of UTF-8, does not begin with a dot, and has no slash. */
#define GPUCR_ERROR_BAD_NAME (-4)
/* The store has an image of that name. */
#define GPUCR_ERROR_TAKEN (-5)
/* Too many images were asked for at the same time. */
#define GPUCR_ERROR_BUSY (-6)
/* The dump has failed, and the program continues; gpucr run has said why on its standard error. */
#define GPUCR_ERROR_NOT_SAVED (-7)
/* gpucr run was asked to end: nothing is saved any more. */
#define GPUCR_ERROR_ENDING (-8)
/* There is no memory for a callback, or the callback is null; or gpucr_checkpoint was called by a callback. */
#define GPUCR_ERROR_CALLBACK (-9)

/* Saves the whole program, of which the caller may be one process, and lets it continue. Returns when the image is
 * complete, with GPUCR_SAVED; and once more in each program that is restored from the image, with GPUCR_RESTORED. `name`
 * is the name of the image in the store; with NULL or "" gpucr chooses one. Threads and processes that ask for the same
 * name, or for none, before the program is stopped share an image.
 *
 * This function calls the registered callbacks, in the calling thread and in the order in which they were registered. It
 * calls those for before the dump first, unless it is already known that there will be no dump (not watched, no CUDA,
 * capturing); in that case it calls none. Afterwards it calls those for after a restore, if the program was restored, or
 * else, even after a failure, those for after the dump. If several threads are in this function at the same time, the
 * first of them calls the callbacks before, and the last of them those after. Dumps that others ask for, such as those of
 * `gpucr dump` or `--every`, call none. A callback must not call this function. */
int gpucr_checkpoint(const char *name);

/* Register a callback, which is called with `data`. 0, or GPUCR_ERROR_CALLBACK. */
int gpucr_before_dump(void (*callback)(void *data), void *data);
int gpucr_after_dump(void (*callback)(void *data), void *data);
int gpucr_after_restore(void (*callback)(void *data), void *data);

/* The reason of the last failure of gpucr_checkpoint in this thread, or "". Good until the next call in this thread. */
const char *gpucr_reason(void);

#ifdef __cplusplus
}
#endif

#endif
