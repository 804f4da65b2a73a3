/* Kernel calls and pools as Python objects, and lists of the available kernels. */
#include "call.h"

#include "../plan/processor.h"
#include "../plan/tables.h"

#include <stdlib.h>
#include <string.h>

static PyTypeObject *kernel_call_type, *pool_type;

/* --- KernelCall --- */

/* Allocate the numbers of a sequence as int64_t or as double; NULL with an exception set. */
static void *numbers_of(PyObject *sequence, int reals, Py_ssize_t *how_many)
{
    PyObject *list = PySequence_List(sequence);
    if (!list)
        return NULL;
    Py_ssize_t count = *how_many = PyList_Size(list);
    union {
        int64_t integer;
        double real;
    } *values = PyMem_Malloc(sizeof *values * (size_t)(count + 1));
    for (Py_ssize_t i = 0; values && i < count; i++) {
        PyObject *number = PyList_GetItem(list, i);
        if (reals)
            values[i].real = PyFloat_AsDouble(number);
        else
            values[i].integer = PyLong_AsLongLong(number);
    }
    Py_DECREF(list);
    if (!values)
        PyErr_NoMemory();
    else if (PyErr_Occurred()) {
        PyMem_Free(values);
        values = NULL;
    }
    return values;
}

/* Look up the row functions of a chain by name. Return 0, or -1 with an exception set. */
static int find_rows(KernelCallObject *self, PyObject *names)
{
    Py_ssize_t count = PySequence_Size(names);
    self->rows = count < 0 ? NULL : PyMem_Calloc((size_t)count + 1, sizeof *self->rows);
    if (!self->rows)
        return PyErr_Occurred() ? -1 : (PyErr_NoMemory(), -1);
    for (self->nrows = 0; self->nrows < count; self->nrows++) {
        PyObject *name = PySequence_GetItem(names, self->nrows);
        const char *text = name ? PyUnicode_AsUTF8AndSize(name, NULL) : NULL;
        self->rows[self->nrows] = text ? find_row(text) : NULL;
        if (text && !self->rows[self->nrows])
            PyErr_Format(PyExc_LookupError, "unknown row function %s", text);
        Py_XDECREF(name);
        if (PyErr_Occurred())
            return -1;
    }
    self->call.rows = self->rows;
    /* Code contains offsets, which patches would change. */
    self->call.code = self->npatches || !strcmp(simd_name(), "plain") ? NULL : &self->code;
    return 0;
}

/* Set the child calls of this call. Return 0, or -1 with an exception set. */
static int find_parts(KernelCallObject *self, PyObject *parts)
{
    self->parts = parts ? PySequence_Tuple(parts) : NULL;
    if (!self->parts)
        return parts ? -1 : 0;
    Py_ssize_t nparts = PyTuple_Size(self->parts);
    self->children = PyMem_Malloc(sizeof *self->children * (size_t)(nparts + 1));
    if (!self->children)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < nparts; i++) {
        PyObject *part = PyTuple_GetItem(self->parts, i);
        if (!PyObject_TypeCheck(part, kernel_call_type)) {
            PyErr_Format(PyExc_TypeError, "KernelCall: expected parts as KernelCalls, got %R", part);
            return -1;
        }
        self->children[i] = &((KernelCallObject *)part)->call;
    }
    self->call.children = self->children;
    self->call.nchildren = (int)nparts;
    return 0;
}

static PyObject *kernel_call_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kernel",  "nparams", "ints",  "floats", "units",   "work",
                            "scratch", "shared",  "parts", "rows",   "patches", NULL};
    const char *kernel;
    int nparams;
    PyObject *ints = NULL, *reals = NULL, *parts = NULL, *rows = NULL, *patches = NULL;
    long long units = 1, scratch = 0, shared = 0;
    double work = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "si|OOLdLLOOO:KernelCall", names, &kernel, &nparams,
                                     &ints, &reals, &units, &work, &scratch, &shared, &parts, &rows,
                                     &patches))
        return NULL;
    const KernelEntry *entry = find_kernel(kernel);
    if (!entry)
        return PyErr_Format(PyExc_LookupError, "unknown native kernel %s", kernel);
    KernelCallObject *self = (KernelCallObject *)object_of(type);
    if (!self)
        return NULL;
    self->call.kernel = entry;
    self->call.nparams = nparams;
    self->call.units = units;
    self->call.work = work;
    self->call.scratch = scratch;
    self->call.shared = shared;
    if ((!ints || (self->call.ints = self->ints = numbers_of(ints, 0, &self->nints))) &&
        (!reals || (self->call.floats = self->floats = numbers_of(reals, 1, &self->nfloats))) &&
        (!patches || (self->patches = numbers_of(patches, 0, &self->npatches))) &&
        !find_parts(self, parts) && (!rows || !find_rows(self, rows)))
        return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* Return the integers with these names, followed by the rest; NULL with no exception set if one
 * is not an int. */
static int64_t *named_integers(PyObject *names, PyObject *by_name, PyObject *rest, Py_ssize_t *how_many)
{
    Py_ssize_t named = PyTuple_Size(names), found = 0;
    PyObject *list = PySequence_List(rest);
    *how_many = named + (list ? PyList_Size(list) : 0);
    int64_t *values = list ? PyMem_Calloc((size_t)*how_many + 1, sizeof *values) : NULL;
    int are_ints = values != NULL;
    for (Py_ssize_t i = 0; are_ints && i < *how_many; i++) {
        PyObject *number = i < named ? PyDict_GetItemWithError(by_name, PyTuple_GetItem(names, i))
                                     : PyList_GetItem(list, i - named);
        found += i < named && number;
        are_ints = !number || PyLong_Check(number);
        values[i] = number && are_ints ? PyLong_AsLongLong(number) : 0;
    }
    Py_XDECREF(list);
    if (are_ints && found < PyDict_Size(by_name))
        PyErr_Format(PyExc_LookupError, "expected integers among %R, got %R", names, by_name);
    if (are_ints && !PyErr_Occurred())
        return values;
    PyMem_Free(values);
    return NULL;
}

/* kernel_call(kernel, nparams, units, work, names, integers, floats, scratch, shared, parts,
 * rest, rows): create a call with integers by name (0 for missing ones) and further integers.
 * Returns NotImplemented for numbers of other classes. */
static PyObject *kernel_call(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    const char *name = nargs == 12 ? PyUnicode_AsUTF8AndSize(args[0], NULL) : NULL;
    const KernelEntry *entry = name ? find_kernel(name) : NULL;
    if (!entry || !PyTuple_Check(args[4]) || !PyDict_Check(args[5]) || !PyTuple_Check(args[9]))
        return PyErr_Format(PyExc_TypeError, "expected a known kernel and 11 values, got %zd", nargs);
    int are_plain = PyLong_Check(args[2]) && PyLong_Check(args[7]) && PyLong_Check(args[8]) &&
                    (PyFloat_Check(args[3]) || PyLong_Check(args[3])) && PyTuple_CheckExact(args[6]);
    for (Py_ssize_t i = 0; are_plain && i < PyTuple_Size(args[6]); i++)
        are_plain = PyFloat_Check(PyTuple_GetItem(args[6], i)) || PyLong_Check(PyTuple_GetItem(args[6], i));
    for (Py_ssize_t i = 0; are_plain && i < PyTuple_Size(args[9]); i++)
        are_plain = is_kernel_call(PyTuple_GetItem(args[9], i));
    KernelCallObject *self = are_plain ? (KernelCallObject *)object_of(kernel_call_type) : NULL;
    if (!self)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
    self->call.kernel = entry;
    self->call.nparams = (int)PyLong_AsLong(args[1]);
    self->call.units = PyLong_AsLongLong(args[2]);
    self->call.work = PyFloat_AsDouble(args[3]);
    self->call.scratch = PyLong_AsLongLong(args[7]);
    self->call.shared = PyLong_AsLongLong(args[8]);
    if ((self->call.ints = self->ints = named_integers(args[4], args[5], args[10], &self->nints)) &&
        (self->call.floats = self->floats = numbers_of(args[6], 1, &self->nfloats)) &&
        !find_parts(self, args[9]) && !find_rows(self, args[11]) && !PyErr_Occurred())
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_NotImplemented);
}

static void kernel_call_dealloc(KernelCallObject *self)
{
    PyMem_Free(self->ints);
    PyMem_Free(self->floats);
    PyMem_Free(self->children);
    PyMem_Free(self->rows);
    PyMem_Free(self->patches);
    code_free(&self->code);
    Py_XDECREF(self->parts);
    free_object((PyObject *)self);
}

static PyObject *kernel_call_repr(KernelCallObject *self)
{
    return PyUnicode_FromFormat("<KernelCall %s>", self->call.kernel->name);
}

/* call.run(pool, *arrays) -> bool: run the call; False if the op rejects a value. */
static PyObject *kernel_call_run(KernelCallObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    char *p[MOST_PARAMETERS + 1];
    const KernelCall *call = &self->call;
    if (nargs != call->nparams + 1 || nargs > MOST_PARAMETERS || !is_pool(args[0]))
        return PyErr_Format(PyExc_TypeError, "%s: expected a Pool and %d arrays, got %zd values",
                            call->kernel->name, call->nparams, nargs);
    for (Py_ssize_t i = 1; i < nargs; i++)
        if (address_of(args[i], &p[i - 1], NULL))
            return NULL;
    PoolObject *pool = (PoolObject *)args[0];
    int result = run_in_pool(pool, call, p);
    if (result < 0)
        return NULL;
    return PyBool_FromLong(!result);
}

/* call.described() -> (ints, floats, parts, rows, patches): the arguments that created the call. */
static PyObject *kernel_call_described(KernelCallObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *ints = PyList_New(0), *reals = PyList_New(0), *rows = PyList_New(0);
    PyObject *patches = PyList_New(0);
    PyObject *parts = self->parts ? Py_NewRef(self->parts) : PyTuple_New(0);
    PyObject *item;
#define FILL(list, count, new_item)                            \
    for (Py_ssize_t i = 0; list && i < (count); i++) {         \
        if (!(item = (new_item)) || PyList_Append(list, item)) \
            Py_CLEAR(list);                                    \
        Py_XDECREF(item);                                      \
    }
    FILL(ints, self->nints, PyLong_FromLongLong(self->ints[i]))
    FILL(reals, self->nfloats, PyFloat_FromDouble(self->floats[i]))
    FILL(rows, self->nrows, PyUnicode_FromString(self->rows[i]->name))
    FILL(patches, self->npatches, PyLong_FromLongLong(self->patches[i]))
#undef FILL
    PyObject *all = ints && reals && parts && rows && patches
                        ? PyTuple_Pack(5, ints, reals, parts, rows, patches)
                        : NULL;
    Py_XDECREF(ints);
    Py_XDECREF(reals);
    Py_XDECREF(parts);
    Py_XDECREF(rows);
    Py_XDECREF(patches);
    return all;
}

static PyObject *kernel_call_name(KernelCallObject *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(self->call.kernel->name);
}

static PyMethodDef kernel_call_methods[] = {
    {"run", (PyCFunction)(void (*)(void))kernel_call_run, METH_FASTCALL,
     "run(pool, *arrays): run the call; return False if the op rejects a value."},
    {"described", (PyCFunction)kernel_call_described, METH_NOARGS,
     "The arguments that created the call: ints, floats, parts, rows, patches."},
    {NULL, NULL, 0, NULL}};

#define MEMBER(name, type)                                                 \
    {                                                                      \
#name, type, offsetof(KernelCallObject, call.name), READONLY, NULL \
    }
static PyMemberDef kernel_call_members[] = {MEMBER(units, T_LONGLONG),   MEMBER(work, T_DOUBLE),
                                            MEMBER(scratch, T_LONGLONG), MEMBER(shared, T_LONGLONG),
                                            MEMBER(nparams, T_INT),      {NULL, 0, 0, 0, NULL}};

static PyGetSetDef kernel_call_getters[] = {{"kernel", (getter)kernel_call_name, NULL, NULL, NULL},
                                            {NULL, NULL, NULL, NULL, NULL}};

static PyType_Slot kernel_call_slots[] = {
    {Py_tp_new, kernel_call_new},
    {Py_tp_dealloc, kernel_call_dealloc},
    {Py_tp_repr, kernel_call_repr},
    {Py_tp_methods, kernel_call_methods},
    {Py_tp_members, kernel_call_members},
    {Py_tp_getset, kernel_call_getters},
    {Py_tp_doc, "A native kernel, prepared for parameters of certain types."},
    {0, NULL}};
static PyType_Spec kernel_call_spec = {"mlvm.machines.native._native.KernelCall", sizeof(KernelCallObject),
                                       0, Py_TPFLAGS_DEFAULT, kernel_call_slots};

/* --- Pool --- */

int is_kernel_call(PyObject *object)
{
    return PyObject_TypeCheck(object, kernel_call_type);
}

int is_pool(PyObject *object)
{
    return PyObject_TypeCheck(object, pool_type);
}

int run_in_pool(PoolObject *self, const KernelCall *call, char **p)
{
    int alone = self->busy == process_number(), result;
    if (!alone && pool_reserve(self->pool, call->scratch, call->shared)) {
        PyErr_NoMemory();
        return -1;
    }
    if (call->work < WORTH_RELEASING && !alone)
        return pool_run(self->pool, call, p);
    self->busy = process_number();
    Py_BEGIN_ALLOW_THREADS result = alone ? run_alone(call, p) : pool_run(self->pool, call, p);
    Py_END_ALLOW_THREADS if (!alone) self->busy = 0;
    if (result < 0)
        PyErr_NoMemory();
    return result;
}

static PyObject *pool_new_(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"threads", "pinned", "worth_sharing", NULL};
    int threads = 1, pinned = 0;
    double worth_sharing = 4000; /* in nanoseconds; waking the other threads costs about 500 */
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ipd:Pool", names, &threads, &pinned, &worth_sharing))
        return NULL;
    PoolObject *self = (PoolObject *)object_of(type);
    if (self && !(self->pool = pool_new(threads, pinned, worth_sharing))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void pool_dealloc(PoolObject *self)
{
    if (self->pool) {
        Py_BEGIN_ALLOW_THREADS pool_free(self->pool);
        Py_END_ALLOW_THREADS
    }
    free_object((PyObject *)self);
}

static PyObject *pool_count(PoolObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(pool_threads(self->pool));
}

static PyGetSetDef pool_getters[] = {
    {"threads", (getter)pool_count, NULL, "Number of threads, including the caller.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot pool_slots[] = {
    {Py_tp_new, pool_new_},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_getset, pool_getters},
    {Py_tp_doc, "Pool(threads=1, pinned=False, worth_sharing=4000): threads that share the work "
                "of a call with at least this number of nanoseconds."},
    {0, NULL}};
static PyType_Spec pool_spec = {"mlvm.machines.native._native.Pool", sizeof(PoolObject), 0,
                                Py_TPFLAGS_DEFAULT, pool_slots};

/* --- available kernels --- */

static PyObject *get_simd(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyUnicode_FromString(simd_name());
}

static PyObject *get_simd_sets(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *sets = PyDict_New();
    const char *name;
    int here;
    for (int i = 0; sets && (name = simd_built(i, &here)); i++)
        if (PyDict_SetItemString(sets, name, here ? Py_True : Py_False))
            Py_CLEAR(sets);
    return sets;
}

static PyObject *simd_refused(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    return text ? PyBool_FromLong(processor_refused(text)) : NULL;
}

static PyObject *choose_simd(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    return text ? PyBool_FromLong(!simd_choose(text)) : NULL;
}

static PyObject *set_code_after(PyObject *module, PyObject *elements)
{
    (void)module;
    int64_t before = code_after;
    code_after = PyLong_AsLongLong(elements);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(before);
}

/* Return the names of a NULL-terminated list as a tuple. */
static PyObject *tuple_of_names(const char *const *names)
{
    Py_ssize_t count = 0;
    while (names[count])
        count++;
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *name = PyUnicode_FromString(names[i]);
        if (!name || PyTuple_SetItem(tuple, i, name))
            Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *get_kernels(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *kernels = PyDict_New();
    const KernelEntry *entry;
    const char *file, *const *names;
    for (int i = 0; kernels && (entry = nth_kernel(i, &file, &names)); i++) {
        PyObject *integers = tuple_of_names(names);
        PyObject *description = integers ? Py_BuildValue("sN", file, integers) : NULL;
        if (!description || PyDict_SetItemString(kernels, entry->name, description))
            Py_CLEAR(kernels);
        Py_XDECREF(description);
    }
    return kernels;
}

static PyObject *get_rows(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *costs = PyDict_New();
    const RowEntry *entry;
    for (int i = 0; costs && (entry = nth_row(i)); i++) {
        PyObject *cost = PyFloat_FromDouble(entry->cost);
        if (!cost || PyDict_SetItemString(costs, entry->name, cost))
            Py_CLEAR(costs);
        Py_XDECREF(cost);
    }
    return costs;
}

static PyObject *accumulate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array, *keys;
    long long nbytes, kind;
    uint64_t sums[8];
    char *p[3] = {(char *)sums};
    if (!PyArg_ParseTuple(args, "OLLO", &array, &nbytes, &kind, &keys) || address_of(array, &p[1], NULL) ||
        address_of(keys, &p[2], NULL))
        return NULL;
    const RowEntry *row = find_row("digest");
    Py_BEGIN_ALLOW_THREADS;
    row->run(p, nbytes, (const int64_t[]){kind});
    Py_END_ALLOW_THREADS;
    return PyBytes_FromStringAndSize((const char *)sums, sizeof sums);
}

static PyMethodDef call_functions[] = {
    {"simd", get_simd, METH_NOARGS, "The name of the instruction set in use."},
    {"simd_sets", get_simd_sets, METH_NOARGS,
     "The instruction sets of this build, the best first, and whether the processor has them."},
    {"simd_refused", simd_refused, METH_O,
     "Whether the processor supports an instruction set that the system denies to this process."},
    {"choose_simd", choose_simd, METH_O,
     "Use an instruction set for later calls; return False if it is not available."},
    {"code_after", set_code_after, METH_O,
     "Generate machine code for a chain after that many elements, for tests; return the number before."},
    {"kernel_call", (PyCFunction)(void (*)(void))kernel_call, METH_FASTCALL,
     "kernel_call(kernel, nparams, units, work, names, integers, floats, scratch, shared, parts, rest, "
     "rows): a call "
     "with integers by name, or NotImplemented for numbers of other classes."},
    {"kernels", get_kernels, METH_NOARGS,
     "All kernels: the file of each kernel, and the names of the integers of a call."},
    {"accumulate", accumulate, METH_VARARGS,
     "accumulate(data, nbytes, kind, keys): the sums of a digest; see mlvm/machines/digest.py."},
    {"rows", get_rows, METH_NOARGS, "All row functions, and the nanoseconds per byte of the result."},
    {NULL, NULL, 0, NULL}};

static int add_names(PyObject *module, const char *name, const char *const *names)
{
    PyObject *value = tuple_of_names(names);
    int failed = !value || PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

int call_init(PyObject *module)
{
    kernel_call_type = add_type(module, "KernelCall", &kernel_call_spec);
    pool_type = add_type(module, "Pool", &pool_spec);
    if (!kernel_call_type || !pool_type)
        return -1;
#define ADD(name, number)                               \
    if (PyModule_AddIntConstant(module, #name, number)) \
        return -1;
    CONSTANTS(ADD)
#define TEXT(name) #name,
    static const char *const of_chain[] = {chain_value_integers(TEXT) NULL};
    static const char *const of_halves[] = {halves_value_integers(TEXT) NULL};
    static const char *const cells[] = {recurrent_cells(TEXT) NULL};
    if (add_names(module, "CHAIN_VALUE", of_chain) || add_names(module, "HALVES_VALUE", of_halves) ||
        add_names(module, "RECURRENT_CELLS", cells))
        return -1;
    return PyModule_AddFunctions(module, call_functions);
}
