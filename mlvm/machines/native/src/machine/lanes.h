/* Lanes: see lanes.c. */
#ifndef MLVM_LANES_H
#define MLVM_LANES_H

#include "../limited_api.h"

int lanes_init(PyObject *module);

#endif
