/* What the processor has. */
#ifndef MLVM_PROCESSOR_H
#define MLVM_PROCESSOR_H

/* Whether the processor has the instruction set of that name. */
int processor_has(const char *name);

#endif
