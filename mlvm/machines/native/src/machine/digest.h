/* Accumulators of a tensor's digest, for Python. */
#ifndef MLVM_DIGEST_H
#define MLVM_DIGEST_H

#include "../limited_api.h"

/* Register this file in the module. Return 0, or -1 with an exception set. */
int digest_init(PyObject *module);

#endif
