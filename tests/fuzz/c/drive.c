/* What stands for libFuzzer where a compiler has none: drive SECONDS SEED_FILE ... calls the target with
 * random bytes, and with seeds of which some bytes are others. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MOST = 1 << 16 };
static uint64_t state = 88172645463325252u;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

int main(int argc, char **argv)
{
    static uint8_t data[MOST];
    long units = 0;
    for (time_t end = time(NULL) + atoi(argv[1]); time(NULL) < end; units++) {
        size_t size = draw() % 400;
        int seeded = argc > 2 && draw() % 8;
        FILE *file = seeded ? fopen(argv[2 + draw() % (uint64_t)(argc - 2)], "rb") : NULL;
        if (file) {
            size = fread(data, 1, MOST, file);
            fclose(file);
            for (uint64_t n = draw() % 6; size && n; n--)
                data[draw() % (draw() % 2 && size > 128 ? 128 : size)] = (uint8_t)draw();
            size -= size && !(draw() % 8) ? draw() % size : 0;
        } else
            for (size_t i = 0; i < size; i++)
                data[i] = (uint8_t)draw();
        uint8_t *exact = malloc(size ? size : 1); /* what lies behind it is not to be read */
        memcpy(exact, data, size);
        LLVMFuzzerTestOneInput(exact, size);
        free(exact);
    }
    fprintf(stderr, "executed_units: %ld\n", units);
    return 0;
}
