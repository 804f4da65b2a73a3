/* Integers of kernel calls as formulas of sizes.
 *
 * In:       inputs, constants and steps, added one by one; each has the next number. Values of inputs.
 * Out:      the values of all numbers; by these the integers of calls are written.
 * Must hold: a call does not run while its integers are written: the caller holds the VM's lock.
 * Callers:  `mlvm/eager/capture/patched.py`.
 */
#include "formulas.h"

static PyTypeObject *formulas_type;

int is_formulas(PyObject *object)
{
    return PyObject_TypeCheck(object, formulas_type);
}

static PyObject *append(FormulasObject *self, Formula formula, Number number)
{
    if (self->count == self->room) {
        Py_ssize_t room = 2 * self->room + 64;
        Formula *formulas = PyMem_Realloc(self->formulas, (size_t)room * sizeof *formulas);
        if (!formulas)
            return PyErr_NoMemory();
        self->formulas = formulas;
        Number *numbers = PyMem_Realloc(self->numbers, (size_t)room * sizeof *numbers);
        if (!numbers)
            return PyErr_NoMemory();
        self->numbers = numbers;
        self->room = room;
    }
    self->formulas[self->count] = formula;
    self->numbers[self->count] = number;
    return PyLong_FromSsize_t(self->count++);
}

int number_from(PyObject *object, Number *number)
{
    *number = (Number){INTEGRAL, 0, 0};
    if (PyFloat_Check(object)) {
        number->kind = REAL;
        number->real = PyFloat_AsDouble(object);
    } else
        number->integer = PyLong_AsLongLong(object);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *formulas_input(FormulasObject *self, PyObject *unused)
{
    (void)unused;
    if (self->inputs != self->count)
        return PyErr_Format(PyExc_TypeError, "expected inputs first, got one as number %zd", self->count);
    self->inputs++;
    return append(self, (Formula){INPUT, 0, 0}, (Number){UNDEFINED, 0, 0});
}

static PyObject *formulas_constant(FormulasObject *self, PyObject *value)
{
    Number number;
    return number_from(value, &number) ? NULL : append(self, (Formula){CONSTANT, 0, 0}, number);
}

static PyObject *formulas_step(FormulasObject *self, PyObject *args)
{
    const char *name;
    int a, b;
    if (!PyArg_ParseTuple(args, "sii", &name, &a, &b))
        return NULL;
    if (a < 0 || b < 0 || a >= self->count || b >= self->count)
        return PyErr_Format(PyExc_IndexError, "expected operands below %zd, got %d, %d", self->count, a, b);
    int operator= operator_of(name);
    if (operator>= 0)
        return append(self, (Formula){operator, a, b}, (Number){UNDEFINED, 0, 0});
    return PyErr_Format(PyExc_LookupError, "unknown operator %s", name);
}

/* formulas.evaluate(values): compute all numbers for these input values. */
static PyObject *formulas_evaluate(FormulasObject *self, PyObject *values)
{
    if (!PyList_Check(values) || PyList_Size(values) != self->inputs)
        return PyErr_Format(PyExc_TypeError, "expected a list of %zd inputs, got %R", self->inputs, values);
    for (Py_ssize_t i = 0; i < self->inputs; i++)
        if (number_from(PyList_GetItem(values, i), &self->numbers[i]))
            return NULL;
    evaluate(self->formulas, self->numbers, self->count);
    Py_RETURN_NONE;
}

/* formulas.hold(guards) -> bool: return whether numbers have the guarded values; guards are
 * (number, value, ...). */
static PyObject *formulas_hold(FormulasObject *self, PyObject *guards)
{
    if (!PyTuple_Check(guards))
        return PyErr_Format(PyExc_TypeError, "expected guards as a tuple, got %R", guards);
    for (Py_ssize_t i = 0; i + 1 < PyTuple_Size(guards); i += 2) {
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GetItem(guards, i));
        Number wanted;
        if (number_from(PyTuple_GetItem(guards, i + 1), &wanted) || place < 0 || place >= self->count)
            return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "unknown number %zd", place);
        if (!is_same_number(&self->numbers[place], &wanted))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

int write_call(const Number *numbers, Py_ssize_t count, KernelCallObject *call)
{
    for (Py_ssize_t i = 0; i + 1 < call->npatches; i += 2) {
        int64_t slot = call->patches[i], place = call->patches[i + 1];
        if (place < 0 || place >= count || slot >= call->nints || numbers[place].kind == UNDEFINED)
            return PyErr_Format(PyExc_IndexError, "expected patch < %zd, got %d", count, (int)place), -1;
        const Number *number = &numbers[place];
        if (slot >= 0)
            call->ints[slot] = number->integer;
        else if (slot == UNITS)
            call->call.units = number->integer;
        else if (slot == WORK)
            call->call.work = real_of(number);
        else if (slot == SCRATCH)
            call->call.scratch = number->integer;
        else if (slot == SHARED)
            call->call.shared = number->integer;
        else if (FLOATS - slot < call->nfloats)
            call->floats[FLOATS - slot] = real_of(number);
    }
    for (Py_ssize_t i = 0; call->parts && i < PyTuple_Size(call->parts); i++)
        if (write_call(numbers, count, (KernelCallObject *)PyTuple_GetItem(call->parts, i)))
            return -1;
    return 0;
}

/* formulas.write(calls): write the computed integers into the calls. */
static PyObject *formulas_write(FormulasObject *self, PyObject *calls)
{
    if (!PyList_Check(calls))
        return PyErr_Format(PyExc_TypeError, "expected calls as a list, got %R", calls);
    for (Py_ssize_t i = 0; i < PyList_Size(calls); i++) {
        PyObject *call = PyList_GetItem(calls, i);
        if (!is_kernel_call(call))
            return PyErr_Format(PyExc_TypeError, "expected a KernelCall, got %R", call);
        if (write_call(self->numbers, self->count, (KernelCallObject *)call))
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *formulas_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    return PyArg_ParseTuple(args, ":Formulas") && !kwargs ? object_of(type) : NULL;
}

static void formulas_dealloc(FormulasObject *self)
{
    PyMem_Free(self->formulas);
    PyMem_Free(self->numbers);
    free_object((PyObject *)self);
}

static PyMethodDef formulas_methods[] = {
    {"input", (PyCFunction)formulas_input, METH_NOARGS, "Add an input; return the number."},
    {"constant", (PyCFunction)formulas_constant, METH_O, "Add a constant; return the number."},
    {"step", (PyCFunction)formulas_step, METH_VARARGS, "Add the result of an operator; return the number."},
    {"evaluate", (PyCFunction)formulas_evaluate, METH_O, "Compute all numbers, for values of the inputs."},
    {"hold", (PyCFunction)formulas_hold, METH_O, "Return whether numbers have these values."},
    {"write", (PyCFunction)formulas_write, METH_O, "Write the integers of kernel calls."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot formulas_slots[] = {{Py_tp_new, formulas_new},
                                       {Py_tp_dealloc, formulas_dealloc},
                                       {Py_tp_methods, formulas_methods},
                                       {Py_tp_doc, "Formulas of lengths."},
                                       {0, NULL}};
static PyType_Spec formulas_spec = {"mlvm.machines.native._native.Formulas", sizeof(FormulasObject), 0,
                                    Py_TPFLAGS_DEFAULT, formulas_slots};

int formulas_init(PyObject *module)
{
    formulas_type = add_type(module, "Formulas", &formulas_spec);
    return formulas_type ? 0 : -1;
}
