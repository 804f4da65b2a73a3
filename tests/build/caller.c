/* Calls a built step in its own memory, with errors. */
#define _GNU_SOURCE
#include "step.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int allocated;
void *__real_malloc(size_t), *__real_calloc(size_t, size_t), *__real_realloc(void *, size_t);
void *__wrap_malloc(size_t n)
{
    allocated++;
    return __real_malloc(n);
}
void *__wrap_calloc(size_t n, size_t m)
{
    allocated++;
    return __real_calloc(n, m);
}
void *__wrap_realloc(void *p, size_t n)
{
    allocated++;
    return __real_realloc(p, n);
}

static float x[8] = {1, 2, 3, 4, 5, 6, 7, 8};
static int64_t good = 1, bad = 9;

static int next(void *context, struct step_inputs *inputs)
{
    *inputs = (struct step_inputs){x, &good};
    return (*(int *)context)--;
}

int main(void)
{
    static _Alignas(64) unsigned char memory[2][1 << 20], state[1 << 16], guard;
    struct step a, b;
    struct step_outputs seen, again;
    const struct step_inputs right = {x, &good}, wrong = {x, &bad}, none = {NULL, &good};
    int left = 3;
    if (step_memory() > sizeof *memory || step_state() > sizeof state)
        return 9;
    printf("%d %s\n", step_init(&a, memory[0] + 8, NULL, 0), step_error(&a));
    printf("%d %s\n", step_init(&a, memory[0], state, step_state()), step_error(&a));
    printf("%d %s\n", step_init_for(&a, memory[0], NULL, 0, "mmx"), step_error(&a));
    memset(memory[0] + step_memory(), 77, 64);
    if (step_init(&a, memory[0], NULL, 0) || step_init(&b, memory[1], NULL, 0))
        return 8;
    allocated = 0;
    for (int i = 0; i < 3; i++)
        if (step_run(&a, &right, &seen))
            return 7;
    printf("%ld runs, %d allocations\n", step_feed(&b, next, NULL, &left), allocated);
    if (step_save(&a, state, step_state()) || step_save(&b, state, step_state() - 1) != -1 ||
        step_save(&a, NULL, step_state()) != -1)
        return 6;
    step_run(&b, &right, &again);
    if (step_init(&a, memory[0], state, step_state()) || step_run(&a, &right, &seen))
        return 5;
    printf("%s\n", memcmp(seen.output0, again.output0, 4) ? "differ" : "the same");
    printf("%d %s\n", step_run(&a, &wrong, &seen), step_error(&a));
    printf("%d %s\n", step_run(&a, &none, &seen), step_error(&a));
    printf("%d %s\n", step_run(&a, &right, &seen), step_error(&a));
    for (int i = 0; i < 64; i++)
        guard |= memory[0][step_memory() + i] ^ 77;
    return guard;
}
