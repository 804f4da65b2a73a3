/* Kernels on parameters that lie where they did when the program was prepared. */
#ifndef MLVM_BOUND_H
#define MLVM_BOUND_H

#include "pool.h"

/* A call, and its parameters as `pool_run` takes them. */
typedef struct {
    const KernelCall *call;
    char **p;
} BoundCall;

/* Run the calls from number *next on, for about so many nanoseconds of estimated work. Afterwards
 * *next is the first that has not run, and `most` is less by the work done. Returns 0, or what the
 * kernel of call *next returns if it refuses. The pool has room for all of them. */
int run_bound(Pool *pool, const BoundCall *calls, int count, int *next, double *most);

#endif
