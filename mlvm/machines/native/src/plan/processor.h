/* What the processor has. */
#ifndef MLVM_PROCESSOR_H
#define MLVM_PROCESSOR_H

/* Whether the processor has the instruction set of that name, or `avx512_vnni`, and the system lets this
 * process use it: it is asked once for the tiles of AMX. `amx_emulated`, for tests, has them in memory. */
int processor_has(const char *name);

/* Whether the processor has that set, and the system refused it. */
int processor_refused(const char *name);

/* Whether some work takes less than 0.7 of the time that other code takes for the same work: the least of
 * many turns of each, by turns. For an instruction that does the work of two: it takes 0.5 of the time where
 * it is as fast as one of these, and all of it or more where it is not. So no answer is near 0.7, a busy
 * machine delays single turns alone, and all processes on a processor get the same one. On x86 only. */
int processor_is_faster(void (*work)(void), void (*same)(void));

#endif
