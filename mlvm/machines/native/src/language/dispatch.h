/* The short way of an eager call: see dispatch.c. */
#ifndef MLVM_DISPATCH_H
#define MLVM_DISPATCH_H

#include "../limited_api.h"

int dispatch_init(PyObject *module);

#endif
