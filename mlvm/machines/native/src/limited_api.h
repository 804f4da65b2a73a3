/* Python's limited API, and what all files that talk to Python use of it. */
#ifndef MLVM_LIMITED_API_H
#define MLVM_LIMITED_API_H

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED /* free-threaded Python refuses it */
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>
#include <structmember.h>

#include <stdint.h>

/* A new object of a type of this module, its fields 0; NULL with an exception set. */
PyObject *object_of(PyTypeObject *type);

/* The end of a type's dealloc, once the fields are given up. */
void free_object(PyObject *object);

/* Make the type and add it to the module; NULL with an exception set. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

/* Forget an exception that is set, but not an interrupt. Returns whether one is still set. */
int clear_nonfatal_error(void);

/* The address of a packed array's elements, and if asked whether they must not be written. Returns
 * 0, or -1 with an exception set. */
int address_of(PyObject *array, char **address, int *constant);

#endif
