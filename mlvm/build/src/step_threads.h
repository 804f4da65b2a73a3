/* Threads for a step on systems with pthreads. */
#ifndef MLVM_STEP_THREADS_H
#define MLVM_STEP_THREADS_H

#include "step.h"

/* So many threads, the caller's among them, for step_use_threads. They end with the process. Returns
 * NULL if the system has none to give. */
const struct step_threads *step_threads(int count);

#endif
