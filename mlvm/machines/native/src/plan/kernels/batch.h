/* What calls of matrix products say: of a batch, and of what follows a product. */
#ifndef MLVM_BATCH_H
#define MLVM_BATCH_H

#include "../plan.h"

/* Of each axis of the batch its length, and the strides of x and y, follow. */
enum { linalg_integers(NAME) AXIS };

/* Where the operands of one product of the batch begin. */
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

/* What is done with rows of a product while they are in the cache. */
typedef struct {
    const KernelCall *child;
    char **p;          /* its parameters */
    char **product;    /* the one among them that a strip takes the place of */
    char *scratch, *strip;
    int64_t row_bytes;
    int64_t first_row; /* of the present product, among the rows of all */
} Next;

/* Where a product begins of which the strip from `row` on is wanted. */
static inline void *begin_rows(Next *next, void *out, int64_t row)
{
    if (!next->strip)
        return out;
    *next->product = next->strip - (next->first_row + row) * next->row_bytes;
    return next->strip - row * next->row_bytes;
}

static inline int end_rows(const Next *next, int64_t row, int64_t rows)
{
    int64_t first = next->first_row + row;
    return next->child->kernel->run(next->child, next->p, first, first + rows, next->scratch);
}

#endif
