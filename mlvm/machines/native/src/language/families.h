/* Calls that differ from others by numbers alone: see families.c. */
#ifndef MLVM_FAMILIES_H
#define MLVM_FAMILIES_H

#include "../limited_api.h"

int families_init(PyObject *module);

#endif
