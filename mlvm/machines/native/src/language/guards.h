/* Matching of calls of a captured function: see guards.c. */
#ifndef MLVM_GUARDS_H
#define MLVM_GUARDS_H

#include "../limited_api.h"

int guards_init(PyObject *module);

#endif
