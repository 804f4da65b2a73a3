/* Search for offsets of buffers, for Python. */
#ifndef MLVM_SEARCH_OF_OFFSETS_H
#define MLVM_SEARCH_OF_OFFSETS_H

#include "../limited_api.h"

/* Register this file in the module. Return 0, or -1 with an exception set. */
int offsets_init(PyObject *module);

#endif
