/* Call that follows a matrix product. */
#ifndef MLVM_NEXT_H
#define MLVM_NEXT_H

#include "../plan.h"

/* Call that processes rows of a product while they are in the cache. */
typedef struct {
    const KernelCall *child;
    char **p;       /* parameters of the call */
    char **product; /* the parameter that is replaced by a strip */
    char *scratch, *strip;
    int64_t row_bytes;
    int64_t first_row; /* of the current product, counted over all products */
} Next;

/* Start of the product if `out` is the strip from `row` on. */
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
