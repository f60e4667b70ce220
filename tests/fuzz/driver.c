/* main() of a fuzz target where libFuzzer is not: every file named, or in a folder named, then changed copies of them
 * for a while.
 *
 *     fuzz_TARGET [-seconds=N] [-seed=N] FILE|FOLDER... */
#define _POSIX_C_SOURCE 200809L
#include "fuzz/fuzz.h"

#include <dirent.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

enum { INPUTS = 512, LONGEST = 4096 };

typedef struct input {
    uint8_t bytes[LONGEST];
    size_t size;
} input;

static input inputs[INPUTS];
static size_t count;
static uint64_t state = 1;

static uint64_t bits(void)
{
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static void add_file(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL || count == INPUTS) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(2);
    }
    inputs[count].size = fread(inputs[count].bytes, 1, LONGEST, file);
    count++;
    fclose(file);
}

static void add(const char *path)
{
    struct stat info;
    DIR *listing;
    if (stat(path, &info) != 0 || !S_ISDIR(info.st_mode)) {
        add_file(path);
        return;
    }
    listing = opendir(path);
    for (struct dirent *entry = listing == NULL ? NULL : readdir(listing); entry != NULL; entry = readdir(listing)) {
        char name[1024];
        snprintf(name, sizeof name, "%s/%s", path, entry->d_name);
        if (entry->d_name[0] != '.')
            add_file(name);
    }
    if (listing != NULL)
        closedir(listing);
}

/* A byte, a bit, a run, a cut, a part of another input. */
static void change(input *x)
{
    const size_t at = x->size == 0 ? 0 : bits() % x->size;
    switch (bits() % 6) {
    case 0:
        x->bytes[at] = (uint8_t)bits();
        break;
    case 1:
        x->bytes[at] ^= (uint8_t)(1u << bits() % 8);
        break;
    case 2:
        x->size = at;
        break;
    case 3: {
        const input *other = &inputs[bits() % count];
        const size_t n = other->size == 0 ? 0 : bits() % other->size;
        const size_t room = LONGEST - at;
        memcpy(x->bytes + at, other->bytes, n < room ? n : room);
        x->size = at + (n < room ? n : room);
        break;
    }
    case 4:
        for (size_t i = at; i < x->size && i < at + 8; i++)
            x->bytes[i] = (uint8_t)(bits() % 2 ? 0xFF : 0);
        break;
    default:
        if (x->size + 4 < LONGEST)
            for (int i = 0; i < 4; i++)
                x->bytes[x->size++] = (uint8_t)bits();
    }
}

int main(int argc, char **argv)
{
    struct timespec start, now;
    long runs = 0, seconds = 1;
    for (int i = 1; i < argc; i++) {
        if (strncmp(argv[i], "-seconds=", 9) == 0)
            seconds = strtol(argv[i] + 9, NULL, 10);
        else if (strncmp(argv[i], "-seed=", 6) == 0)
            state = strtoull(argv[i] + 6, NULL, 10);
        else
            add(argv[i]);
    }
    if (count == 0) {
        fprintf(stderr, "no inputs\n");
        return 2;
    }
    printf("# seed %llu\n", (unsigned long long)state);
    for (size_t i = 0; i < count; i++, runs++)
        LLVMFuzzerTestOneInput(inputs[i].bytes, inputs[i].size);
    clock_gettime(CLOCK_MONOTONIC, &start);
    do {
        input *x = malloc(sizeof *x);
        if (x == NULL)
            return 1;
        *x = inputs[bits() % count];
        for (uint64_t n = 1 + bits() % 6; n > 0; n--)
            change(x);
        LLVMFuzzerTestOneInput(x->bytes, x->size);
        free(x);
        runs++;
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - start.tv_sec < seconds);
    printf("%ld passed, 0 failed\n", runs);
    return 0;
}
