/* The machine's loop: see loop.c. */
#ifndef MLVM_LOOP_H
#define MLVM_LOOP_H

#include "../limited_api.h"

int loop_init(PyObject *module);

#endif
