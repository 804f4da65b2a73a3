/* What page.html calls: a step in memory of its own. */
#include "step.h"

#include <stdlib.h>

#define CALLED(name) __attribute__((export_name(#name)))

static struct step step;
static float image[64], rate;
static int64_t label;

/* Begin, or begin again with the weights as they were. */
CALLED(begin) int begin(void)
{
    static void *memory;
    if (!memory)
        memory = aligned_alloc(64, (step_memory() + 63) / 64 * 64);
    return memory ? step_init(&step, memory, NULL, 0) : -1;
}

/* Where the image goes: 64 numbers from -1 to 1. */
CALLED(image) float *where_the_image_is(void)
{
    return image;
}

/* What the image is taken for: 10 probabilities, or NULL. At a rate above 0 it learns the label. */
CALLED(see) const float *see(int to_learn, float how_fast)
{
    struct step_outputs out;
    label = to_learn;
    rate = how_fast;
    return step_run(&step, &(struct step_inputs){image, &label, &rate}, &out) ? NULL : out.output0;
}
