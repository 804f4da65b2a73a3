/* The kernels by name, for the best instruction set that this processor has. */
#ifndef MLVM_TABLES_H
#define MLVM_TABLES_H

#include "plan.h"

/* The instruction set in use: "amx", "avx512_bf16", "avx512", "avx2", "neon", "plain". */
const char *simd_name(void);

/* The i-th instruction set of this build, the best first, and whether the processor has it; NULL
 * behind the last. */
const char *simd_built(int i, int *here);

/* Choose an instruction set by name. Returns 0, or -1 if the library or the processor lacks it. */
int simd_choose(const char *name);

/* The entry of that name, or NULL. */
const KernelEntry *find_kernel(const char *name);
const RowEntry *find_row(const char *name);

/* All entries, one at a time from i = 0 on, then NULL; of a kernel also the file in kernels/ that it is
 * in, and the names of its integers, closed by NULL. */
const KernelEntry *nth_kernel(int i, const char **file, const char *const **names);
const RowEntry *nth_row(int i);

#endif
