/* Kernels by name, for the best instruction set of this processor. */
#ifndef MLVM_TABLES_H
#define MLVM_TABLES_H

#include "plan.h"

/* The instruction set in use: "amx", "avx512_bf16", "avx512", "avx2", "neon", "plain". */
const char *simd_name(void);

/* The i-th instruction set of this build, the best first, and whether the processor supports it;
 * NULL after the last. */
const char *simd_built(int i, int *here);

/* Choose an instruction set by name. Return 0, or -1 if the library or the processor does not
 * support it. */
int simd_choose(const char *name);

/* Return the entry of that name, or NULL. */
const KernelEntry *find_kernel(const char *name);
const RowEntry *find_row(const char *name);

/* Return entry i, or NULL after the last. For a kernel, also return the file in kernels/, and the
 * NULL-terminated names of the integers. */
const KernelEntry *nth_kernel(int i, const char **file, const char *const **names);
const RowEntry *nth_row(int i);

#endif
