/* What the processor has. */
#ifndef MLVM_PROCESSOR_H
#define MLVM_PROCESSOR_H

/* Whether the processor has the instruction set of that name, or `avx512_vnni`, and the system lets this
 * process use it: it is asked once for the tiles of AMX. `amx_emulated`, for tests, has them in memory. */
int processor_has(const char *name);

/* Whether the processor has that set, and the system refused it. */
int processor_refused(const char *name);

#endif
