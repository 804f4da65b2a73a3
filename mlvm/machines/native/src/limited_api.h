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

/* Return the current exception as an object with its traceback, and clear it; NULL if there is none. */
PyObject *take_exception(void);

/* Object fields that are contiguous in a struct, for the garbage collector. */
static inline int visit_fields(PyObject *self, PyObject **fields, size_t count, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    for (size_t i = 0; i < count; i++)
        Py_VISIT(fields[i]);
    return 0;
}

static inline void clear_fields(PyObject **fields, size_t count)
{
    for (size_t i = 0; i < count; i++)
        Py_CLEAR(fields[i]);
}

#define COUNT_FIELDS(Struct, first, last) \
    ((offsetof(Struct, last) - offsetof(Struct, first)) / sizeof(PyObject *) + 1)

/* Define `NAME_traverse` and `NAME_clear` of a type whose object fields are those from `first` to `last`. */
#define OBJECT_FIELDS(Struct, name, first, last)                                                      \
    static int name##_traverse(Struct *self, visitproc visit, void *arg)                              \
    {                                                                                                 \
        return visit_fields((PyObject *)self, &self->first, COUNT_FIELDS(Struct, first, last), visit, \
                            arg);                                                                     \
    }                                                                                                 \
    static int name##_clear(Struct *self)                                                             \
    {                                                                                                 \
        clear_fields(&self->first, COUNT_FIELDS(Struct, first, last));                                \
        return 0;                                                                                     \
    }

#endif
