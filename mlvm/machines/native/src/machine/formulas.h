/* Integers of kernel calls as formulas of sizes. */
#ifndef MLVM_FORMULAS_H
#define MLVM_FORMULAS_H

#include "../limited_api.h"
#include "../plan/formulas.h"
#include "call.h"

typedef struct {
    PyObject_HEAD Formula *formulas;
    Number *numbers;
    Py_ssize_t count, room, inputs;
} FormulasObject;

int is_formulas(PyObject *object);

/* Convert a Python number. Returns 0, or -1 with an exception set. */
int number_from(PyObject *object, Number *number);

/* Write the integers of a call from the values of `count` numbers. Return 0, or -1 with an
 * exception set. */
int write_call(const Number *numbers, Py_ssize_t count, KernelCallObject *call);

/* Register this file in the module. Return 0, or -1 with an exception set. */
int formulas_init(PyObject *module);

#endif
