// A driver library of two: the functions are those of the library that it is linked with, but for one, which
// frees what the C library has allocated for it, as drivers do.

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuDriverGetVersion(int *version)
{
    char *line = NULL;
    size_t room = 0;
    FILE *file = fopen("/proc/self/maps", "r");
    if (file == NULL || getline(&line, &room, file) < 0)
        return 999;
    fclose(file);
    free(strdup(line));
    free(line);
    *version = 13000;
    return 0;
}
