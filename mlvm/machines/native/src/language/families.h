/* Calls that differ from other calls only by numbers: see families.c. */
#ifndef MLVM_FAMILIES_H
#define MLVM_FAMILIES_H

#include "../limited_api.h"

int families_init(PyObject *module);

#endif
