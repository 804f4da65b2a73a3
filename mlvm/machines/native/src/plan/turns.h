/* Turns of a loop of short calls, which run without the machine's steps. */
#ifndef MLVM_TURNS_H
#define MLVM_TURNS_H

#include "loop.h"

/* Prepare the loop that ends with the jump at `pc`; NULL if it contains other steps than kernel calls and a
 * test of a condition, if its calls are long, or without memory. `addresses` are those of the machine. */
Turns *turns_new(const Function *function, int pc, char *const *addresses);
void turns_free(Turns *turns);

/* Run turns for about TILL_CLOCK nanoseconds, until the condition is false, or until a kernel rejects
 * values. Return the pc of the next step; all steps before it have run. */
int run_turns(Machine *m, Turns *turns);

#endif
