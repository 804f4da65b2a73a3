/* Views, and reads and writes of a few elements, without a launch: see views.c. */
#ifndef MLVM_VIEWS_H
#define MLVM_VIEWS_H

#include "dispatch.h"

int views_init(PyObject *module);

/* Whether no thread has a recorder: only then does this file, or a template, run anything. */
int is_quiet(void);

extern PyObject *live_tapes; /* the set of tapes that may still be walked */

/* alias(call, x, type), which `alias_in_python` defines. */
PyObject *alias(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Functions of AllocationFields: x[key], x[key] = values, and x[i] of a sequence, for `reversed`. */
PyObject *subscript(PyObject *x, PyObject *key);
PyObject *sequence_item(PyObject *x, Py_ssize_t i);
int assign_subscript(PyObject *x, PyObject *key, PyObject *values);

/* A view of x as another type of the same size, which no tape tracks. A new reference; NULL without an
 * exception if Python must create it. */
PyObject *view_as(Allocation *x, PyObject *type);

#endif
