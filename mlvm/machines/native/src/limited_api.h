/* Python's limited API, and helpers for all files that use it. */
#ifndef MLVM_LIMITED_API_H
#define MLVM_LIMITED_API_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python does not support it */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

#include <stdint.h>

/* Create an object of a type of this module with zeroed fields; NULL with an exception set. */
PyObject *object_of(PyTypeObject *type);

/* Finish the dealloc of a type, after the fields were released. */
void free_object(PyObject *object);

/* Create the type and add it to the module; NULL with an exception set. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

/* Clear the current exception, unless it is an interrupt. Return whether one is still set. */
int clear_nonfatal_error(void);

/* Get the address of a packed array's elements, and optionally whether the array is read-only.
 * Return 0, or -1 with an exception set. */
int address_of(PyObject *array, char **address, int *constant);

#endif
