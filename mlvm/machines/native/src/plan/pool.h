/* Pool of threads that divide the units of a call. */
#ifndef MLVM_POOL_H
#define MLVM_POOL_H

#include "plan.h"

typedef struct Pool Pool;

/* Create a pool of that many threads, including the caller's; NULL if memory is exhausted. The other
 * threads start with the first call of at least `worth_sharing` nanoseconds of work. `pinned`:
 * thread i stays on the i-th processor available to the process. */
Pool *pool_new(int threads, int pinned, double worth_sharing);

/* Stop the threads. No call may be running. */
void pool_free(Pool *pool);

int pool_threads(const Pool *pool);

/* Return the generation of this process, which each fork increments. In a forked process, the work
 * of the parent's other threads is abandoned. */
int process_number(void);

/* Reserve scratch memory for calls before the first of them runs. Return 0, or -1. */
int pool_reserve(Pool *pool, int64_t scratch, int64_t shared);

/* Run all units in the calling thread with separate memory, while a different caller uses the pool.
 * Return the kernel's result, or -1 without memory. */
int run_alone(const KernelCall *call, char **p);

/* Run all units of the call. `p` has space for one address more than the call has parameters.
 * Return the kernel's result. Only one caller at a time. */
int pool_run(Pool *pool, const KernelCall *call, char **p);

#endif
