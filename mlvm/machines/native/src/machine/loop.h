/* The machine's loop: see loop.c. */
#ifndef MLVM_PROGRAM_H
#define MLVM_PROGRAM_H

#include "../limited_api.h"

#include "call.h"

int loop_init(PyObject *module);

/* Return whether the object is a Program that consists of kernel calls with known addresses. */
int program_is_straight(PyObject *object);

/* Run such a program once, as part of another. Return 0; 1 if the reference loop must raise the
 * error; or -1 with an exception set. */
int program_run_straight(PyObject *program, PoolObject *pool);

/* Return whether the object is a Program that consists of such calls and of jumps. */
int program_is_closed(PyObject *object);

/* Run a program, with the Python callbacks `helper`, for at most `left` instructions, or without a limit
 * (-1). Return None or the list of values on the stack; a tuple, the state from which the reference loop
 * continues; or NULL with an exception set if there is no memory. */
PyObject *program_launch(PyObject *program, PoolObject *pool, PyObject *helper, PyObject *operands,
                         int64_t left);

#endif
