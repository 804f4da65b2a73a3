/* Integers of kernel calls as formulas of lengths. */
#ifndef MLVM_FORMULAS_H
#define MLVM_FORMULAS_H

#include "../limited_api.h"

/* Add what this file has to the module. Returns 0, or -1 with an exception set. */
int formulas_init(PyObject *module);

#endif
