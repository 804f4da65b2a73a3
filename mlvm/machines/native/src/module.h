/* What the files that talk to Python share. */
#ifndef MLVM_MODULE_H
#define MLVM_MODULE_H

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <structmember.h>

#include "plan.h"
#include "pool.h"

enum { MOST_PARAMETERS = 256 };

/* Nanoseconds of work from which on other Python threads may run meanwhile. */
#define WORTH_RELEASING 20000.0

typedef struct {
    PyObject_HEAD
    Plan plan;
    const char *name;
    int64_t *ints;
    double *floats;
    PyObject *parts; /* a tuple that keeps the children */
    const Plan **children;
} PlanObject;

typedef struct {
    PyObject_HEAD
    Pool *pool;
    int busy; /* the process in which a plan runs without the interpreter lock, or 0 */
} PoolObject;

int is_plan(PyObject *object);
int is_pool(PyObject *object);

/* A new object of a type of this module, its fields 0; NULL with an exception set. */
PyObject *object_of(PyTypeObject *type);

/* The end of a type's dealloc, once the fields are given up. */
void free_object(PyObject *object);

/* Forget an exception that is set, but not an interrupt. Returns whether one is still set. */
int forgive(void);

/* Make the type and add it to the module; NULL with an exception set. */
PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec);

/* The address of a packed array's elements, and if asked whether they must not be written. Returns
 * 0, or -1 with an exception set. */
int address_of(PyObject *array, char **address, int *constant);

/* Run a plan, without the interpreter lock if it takes long. Returns what the kernel returns, or -1
 * with an exception set. `p` is as `pool_run` takes it. */
int run_in_pool(PoolObject *pool, const Plan *plan, char **p);

#endif
