/* Helpers for all files that use Python's limited API. */
#include "limited_api.h"

PyObject *object_of(PyTypeObject *type)
{
    return PyType_GenericAlloc(type, 0);
}

void free_object(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type && PyModule_AddObjectRef(module, name, type))
        Py_CLEAR(type);
    return (PyTypeObject *)type; /* the module is never unloaded */
}

int clear_nonfatal_error(void)
{
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return 1;
    PyErr_Clear();
    return 0;
}

PyObject *take_exception(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

int address_of(PyObject *array, char **address, int *constant)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES))
        return -1;
    int packed = PyBuffer_IsContiguous(&buffer, 'C');
    *address = buffer.buf;
    if (constant)
        *constant = buffer.readonly;
    PyBuffer_Release(&buffer); /* the memory is valid as long as the array */
    if (!packed) {
        PyErr_SetString(PyExc_ValueError, "expected a packed array");
        return -1;
    }
    return 0;
}
