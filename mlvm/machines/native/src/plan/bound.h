/* Kernel calls with fixed addresses of parameters. */
#ifndef MLVM_BOUND_H
#define MLVM_BOUND_H

#include "pool.h"

/* A call, and the index of each parameter's address. */
typedef struct {
    const KernelCall *call;
    const uint32_t *places;
} BoundCall;

/* Run a call and return the result of the kernel. The pool must have enough scratch memory. */
int run_one(Pool *pool, char *const *addresses, const BoundCall *bound);

/* Run the calls from number *next on, for about the given nanoseconds of estimated work.
 * Afterwards *next is the first call that has not run, and `most` is reduced by the work done.
 * Return 0, or the nonzero result of the kernel of call *next. The pool must have enough scratch
 * memory for all calls. */
int run_bound(Pool *pool, char *const *addresses, const BoundCall *calls, int count, int *next,
              double *most);

#endif
