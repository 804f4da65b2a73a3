/* Views, and reads and writes of a few elements, without a launch: see views.c. */
#ifndef MLVM_VIEWS_H
#define MLVM_VIEWS_H

#include "dispatch.h"

int views_init(PyObject *module);

/* A view of x as another type of the same size, which no tape tracks. A new reference; NULL without an
 * exception if Python must create it. */
PyObject *view_as(Allocation *x, PyObject *type);

#endif
