/* Kernels on parameters that lie where they did when the program was prepared. */
#ifndef MLVM_BOUND_H
#define MLVM_BOUND_H

#include "pool.h"

/* A call, and of each of its parameters where its address stands among all. */
typedef struct {
    const KernelCall *call;
    const uint32_t *places;
} BoundCall;

/* Run a call. Returns what its kernel returns. The pool has room for it. */
int run_one(Pool *pool, char *const *addresses, const BoundCall *bound);

/* Run the calls from number *next on, for about so many nanoseconds of estimated work. Afterwards
 * *next is the first that has not run, and `most` is less by the work done. Returns 0, or what the
 * kernel of call *next returns if it refuses. The pool has room for all of them. */
int run_bound(Pool *pool, char *const *addresses, const BoundCall *calls, int count, int *next,
              double *most);

#endif
