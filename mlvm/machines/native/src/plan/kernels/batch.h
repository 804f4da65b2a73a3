/* Batch axes of matrix products. */
#ifndef MLVM_BATCH_H
#define MLVM_BATCH_H

#include "../plan.h"
#include "next.h"

/* For each axis of the batch, the length and the strides of x and y follow. */
enum { linalg_integers(NAME) AXIS };

/* Compute the offsets of the operands for one product of the batch. */
static inline void offsets(const int64_t *n, int64_t product, int64_t *x, int64_t *y)
{
    *x = *y = 0;
    for (const int64_t *axis = n + AXIS + 3 * (n[AXES] - 1); axis >= n + AXIS; axis -= 3) {
        int64_t i = product % axis[0];
        product /= axis[0];
        *x += i * axis[1];
        *y += i * axis[2];
    }
}

#endif
