/* Threads for a step on systems with pthreads. */
#ifndef MLVM_STEP_THREADS_H
#define MLVM_STEP_THREADS_H

#include "step.h"

/* Return `count` threads, including the caller's, for step_use_threads. They run until the
 * process exits. Returns NULL if the system cannot create threads. */
const struct step_threads *step_threads(int count);

#endif
