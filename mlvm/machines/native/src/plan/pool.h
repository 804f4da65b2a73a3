/* Threads that share the units of a call. */
#ifndef MLVM_POOL_H
#define MLVM_POOL_H

#include "plan.h"

typedef struct Pool Pool;

/* A pool of that many threads, the caller's included; NULL if there is no memory. The others start
 * with the first work that is worth sharing, which is so many nanoseconds of it. `pinned`: thread i
 * stays on the i-th processor that the process may use. */
Pool *pool_new(int threads, int pinned, double worth_sharing);

/* End the threads. No call may be running. */
void pool_free(Pool *pool);

int pool_threads(const Pool *pool);

/* The number of this process, counted from 1 on along its forks: what its parent's other threads were
 * doing is over. */
int process_number(void);

/* Make room for calls that want so many bytes, before the first of them runs. Returns 0, or -1. */
int pool_reserve(Pool *pool, int64_t scratch, int64_t shared);

/* Do all units in the calling thread, with memory of its own: while another caller has the pool.
 * Returns what the kernel returns, or -1 if there is no memory. */
int run_alone(const KernelCall *call, char **p);

/* Do all units of the call. `p` has room for one address more than the call has parameters. Returns
 * what its kernel returns. One caller at a time. */
int pool_run(Pool *pool, const KernelCall *call, char **p);

#endif
