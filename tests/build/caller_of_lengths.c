/* Calls a built step at several lengths. */
#include "step.h"
#include <stdio.h>
#include <string.h>

static _Alignas(64) unsigned char memory[2][1 << 20];
static float x[36];

static void shape(const struct step *step, int result)
{
    int64_t shape[2];
    int ndim = step_output_shape(step, 1, shape);
    printf("%d %d: %d %d\n", result, ndim, (int)shape[0], (int)shape[1]);
}

int main(void)
{
    struct step a, b;
    struct step_inputs in = {x};
    struct step_outputs out, other;
    if (step_memory() + 64 > sizeof memory[0])
        return 9;
    for (int i = 0; i < 36; i++)
        x[i] = (float)i / 20;
    memset(memory, 77, sizeof memory);
    if (step_init(&a, memory[0], NULL, 0) || step_init(&b, memory[1], NULL, 0))
        return 8;
    shape(&a, 0);
    for (int n = 10; n >= 0; n -= 10)
        printf("%d %s\n", step_set_lengths(&a, &(struct step_lengths){n}), step_error(&a));
    printf("%d %s\n", step_set_lengths(&a, NULL), step_error(&a));
    printf("%d %d\n", step_output_shape(&a, 2, NULL), step_output_shape(&a, -1, NULL));
    shape(&a, step_run(&a, &in, &out));
    step_run(&b, &in, &other);
    int result = step_set_lengths(&a, &(struct step_lengths){9});
    shape(&a, result | step_run(&a, &in, &out));
    step_set_lengths(&b, &(struct step_lengths){9});
    step_run(&b, &in, &other);
    puts(memcmp(out.output1, other.output1, 27 * sizeof(float)) ? "differ" : "the same");
    for (int i = 0; i < 64; i++)
        if (memory[0][step_memory() + i] != 77)
            return 7;
    return 0;
}
