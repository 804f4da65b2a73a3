/* What the processor has. */
#ifndef MLVM_PROCESSOR_H
#define MLVM_PROCESSOR_H

/* Whether the processor has the instruction set of that name, or `avx512_vnni`, and the system lets this
 * process use it: it is asked once for the tiles of AMX. `amx_emulated`, for tests, has them in memory. */
int processor_has(const char *name);

/* Whether the processor has that set, and the system refused it. */
int processor_refused(const char *name);

/* Whether the set is taken where none is asked for. Pairs of bf16 are multiplied faster than single f32
 * by AMD's Zen 5, family 26; on Intel's processors they take twice the time. Others were not measured. */
int processor_prefers(const char *name);

#endif
