/* The machine's loop: see loop.c. */
#ifndef MLVM_PROGRAM_H
#define MLVM_PROGRAM_H

#include "../limited_api.h"

#include "call.h"

int loop_init(PyObject *module);

/* Whether the object is a Program of kernels alone, on parameters whose addresses are known. */
int program_is_straight(PyObject *object);

/* Run such a program, with what Python does for the loop. Returns None, or the state in which the
 * reference loop is to go on; NULL with an exception set if there is no memory. */
PyObject *program_run_calls(PyObject *program, PoolObject *pool, PyObject *helper);

/* Run such a program once, as part of a larger one. Returns 0; 1 if the reference loop is to say why
 * not; or -1 with an exception set. */
int program_run_straight(PyObject *program, PoolObject *pool);

#endif
