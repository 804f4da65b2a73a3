/* Views, and reads and writes of a few elements, without a launch: see views.c. */
#ifndef MLVM_VIEWS_H
#define MLVM_VIEWS_H

#include "dispatch.h"

enum { MOST_AXES = 8 };

/* Decoded tensor type. `kind`: b bool, u unsigned, i signed, f float, h half, c complex. */
typedef struct {
    PyObject *type, *dtype;
    int64_t dims[MOST_AXES], size;
    int ndim, itemsize;
    char kind;
} Layout;

int views_init(PyObject *module);

/* Decode a type. Return 1; 0 for a type with many axes, dynamic sizes, or a packed dtype. */
int layout_of(PyObject *type, Layout *layout);

/* Return the type of that dtype and shape, a new reference; NULL with no exception set if there is none. */
PyObject *type_of(PyObject *dtype, const int64_t *dims, int ndim);

/* Return a tensor with one element with the value of a Python number; NULL if Python must create it. */
Allocation *tensor_of_number(PyObject *arena, PyObject *type, PyObject *value);

/* A view of x as a different type of the same size, which no tape tracks. A new reference; NULL without an
 * exception if Python must create it. */
PyObject *view_as(Allocation *x, PyObject *type);

#endif
