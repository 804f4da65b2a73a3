/* Features of the processor. */
#ifndef MLVM_PROCESSOR_H
#define MLVM_PROCESSOR_H

/* Return whether the processor supports the instruction set of that name, or `avx512_vnni`, and the
 * system permits it; for the tiles of AMX the system is asked once. `amx_emulated`, for tests,
 * emulates them. */
int processor_has(const char *name);

/* Return whether the processor supports the set, but the system denied it. */
int processor_refused(const char *name);

#endif
