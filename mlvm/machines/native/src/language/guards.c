/* Guards of a captured function, checked by one walk over flat lists.
 *
 * `Checklist` compares the state that the function has read with the present state, as `_holds` in
 * mlvm/eager/capture/guards/checker.py does. `Pattern` compares a call's arguments with the
 * arguments of a cache entry, as `Signature` in signature.py does, and returns the tensors. Both
 * return only whether everything matches: Python determines the reason. The interpreter lock is
 * held throughout.
 */
#include "guards.h"

#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

/* --- state that a function has read --- */

enum Kind { ITEM, ENTRY, ATTRIBUTE, CLASS, FIELDS, SLOT, KEYS, VALUES, ITEMS, UNREAD, NOW, EQUAL, KINDS };

static const char *const kinds[KINDS] = {"item", "entry",  "attribute", "class",  "fields",  "slot",
                                         "keys", "values", "items",     "unread", "context", "equal"};

typedef struct {
    enum Kind kind;
    PyObject *owner, *name, *value;
} Read;

typedef struct {
    PyObject_HEAD PyObject *missing, *reads; /* keeps all objects alive */
    Read *read;
} Checklist;

static PyTypeObject *checklist_type, *pattern_type;
static PyObject *dict_name;

/* Return whether a new reference is to the value, and release it. Errors are cleared. */
static int is_value(PyObject *object, PyObject *missing, PyObject *value)
{
    if (!object && PyErr_ExceptionMatches(PyExc_Exception)) {
        PyErr_Clear();
        return value == missing;
    }
    Py_XDECREF(object);
    return object ? object == value : -1;
}

/* Return whether iterating yields exactly the objects of a tuple. */
static int gives(PyObject *iterable, PyObject *expected)
{
    PyObject *iterator = PyObject_GetIter(iterable), *each = NULL;
    Py_ssize_t i = 0, n = PyTuple_Size(expected);
    int same = 1;
    while (iterator && same && (each = PyIter_Next(iterator))) {
        same = i < n && each == PyTuple_GetItem(expected, i++);
        Py_DECREF(each);
    }
    Py_XDECREF(iterator);
    if (PyErr_Occurred())
        return clear_nonfatal_error() ? -1 : 0;
    return same && i == n;
}

static int holds_container(const Read *read)
{
    PyObject *owner = read->owner, *expected = read->value;
    Py_ssize_t n = PyTuple_Size(expected), at = 0;
    if (read->kind != ITEMS && PyDict_Check(owner)) {
        if (PyDict_Size(owner) != n)
            return 0;
        PyObject *key, *value;
        for (Py_ssize_t i = 0; i < n && PyDict_Next(owner, &at, &key, &value); i++)
            if ((read->kind == KEYS ? key : value) != PyTuple_GetItem(expected, i))
                return 0;
        return 1;
    }
    if (PyList_CheckExact(owner)) {
        if (PyList_Size(owner) != n)
            return 0;
        for (Py_ssize_t i = 0; i < n; i++)
            if (PyList_GetItem(owner, i) != PyTuple_GetItem(expected, i))
                return 0;
        return 1;
    }
    if (read->kind == ITEMS)
        return gives(owner, expected);
    PyObject *keys = PyObject_CallMethod(owner, "keys", NULL);
    int same = keys ? gives(keys, expected) : clear_nonfatal_error() ? -1 : 0;
    Py_XDECREF(keys);
    return same;
}

static int holds_read(const Checklist *self, const Read *read)
{
    PyObject *owner = read->owner, *name = read->name, *value = read->value, *current;
    descrgetfunc get;
    int same;
    switch (read->kind) {
    case ITEM:
    case UNREAD:
        current = PyDict_GetItemWithError(owner, name);
        if (!current && PyErr_Occurred())
            return clear_nonfatal_error() ? -1 : 0;
        return (current ? current : self->missing) == value;
    case CLASS: return (PyObject *)Py_TYPE(owner) == value;
    case ENTRY: return is_value(PyObject_GetItem(owner, name), self->missing, value);
    case ATTRIBUTE: return is_value(PyObject_GetAttr(owner, name), NULL, value);
    case FIELDS: return is_value(PyObject_GenericGetAttr(owner, dict_name), NULL, value);
    case SLOT:
        get = (descrgetfunc)PyType_GetSlot(Py_TYPE(name), Py_tp_descr_get);
        return get ? is_value(get(name, owner, (PyObject *)Py_TYPE(owner)), self->missing, value) : 0;
    case NOW:
        current = present_context();
        same = current ? is_value(PyObject_GetAttr(current, name), NULL, value) : -1;
        Py_XDECREF(current);
        return same;
    case EQUAL:
        current = PyObject_CallFunctionObjArgs(name, owner, NULL);
        same = current ? PyObject_RichCompareBool(current, value, Py_EQ) : -1;
        Py_XDECREF(current);
        return same < 0 ? (clear_nonfatal_error() ? -1 : 0) : same;
    default: return holds_container(read);
    }
}

/* holds() -> bool */
static PyObject *checklist_holds(Checklist *self, PyObject *none)
{
    (void)none;
    Py_ssize_t count = self->reads ? PyTuple_Size(self->reads) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int holds = holds_read(self, &self->read[i]);
        if (holds < 0)
            return NULL;
        if (!holds)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Checklist(missing, reads): a read is (kind, owner, name, value). */
static PyObject *checklist_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *missing, *reads;
    if (!PyArg_ParseTuple(args, "OO!:Checklist", &missing, &PyTuple_Type, &reads))
        return NULL;
    Checklist *self = (Checklist *)object_of(type);
    Py_ssize_t n = PyTuple_Size(reads);
    if (!self || !(self->read = PyMem_Calloc(n ? (size_t)n : 1, sizeof *self->read)))
        goto failed;
    for (Py_ssize_t i = 0; i < n; i++) {
        Read *read = &self->read[i];
        const char *kind;
        if (!PyArg_ParseTuple(PyTuple_GetItem(reads, i), "sOOO", &kind, &read->owner, &read->name,
                              &read->value))
            goto failed;
        while (read->kind < KINDS && strcmp(kind, kinds[read->kind]))
            read->kind++;
        int needs_tuple = read->kind == KEYS || read->kind == VALUES || read->kind == ITEMS;
        int of_dict = read->kind == ITEM || read->kind == UNREAD;
        if (read->kind == KINDS || (needs_tuple && !PyTuple_Check(read->value)) ||
            (of_dict && !PyDict_Check(read->owner))) {
            PyErr_Format(PyExc_TypeError, "unknown kind of read: %s", kind);
            goto failed;
        }
    }
    self->missing = Py_NewRef(missing);
    self->reads = Py_NewRef(reads);
    return (PyObject *)self;
failed:
    if (self && !PyErr_Occurred())
        PyErr_NoMemory();
    Py_XDECREF((PyObject *)self);
    return NULL;
}

OBJECT_FIELDS(Checklist, checklist, missing, reads)

static void checklist_dealloc(Checklist *self)
{
    PyObject_GC_UnTrack(self);
    checklist_clear(self);
    PyMem_Free(self->read);
    free_object((PyObject *)self);
}

static PyMethodDef checklist_methods[] = {{"holds", (PyCFunction)checklist_holds, METH_NOARGS,
                                           "holds(): whether all reads return the same objects."},
                                          {NULL, NULL, 0, NULL}};
static PyType_Slot checklist_slots[] = {
    {Py_tp_new, checklist_new},
    {Py_tp_dealloc, checklist_dealloc},
    {Py_tp_traverse, checklist_traverse},
    {Py_tp_clear, checklist_clear},
    {Py_tp_methods, checklist_methods},
    {Py_tp_doc, "Checklist(missing, reads): the state that a function has read."},
    {0, NULL}};
static PyType_Spec checklist_spec = {"mlvm.machines.native._native.Checklist", sizeof(Checklist), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, checklist_slots};

/* --- arguments --- */

enum PartKind { TENSOR, NUMBER, PLAIN, LIST, TUPLE, DICT, PART_KINDS };

/* Part of a call's arguments, in traversal order: a tensor with the type, an ordinal and the
 * ordinal of the memory; a number with an ordinal; a plain value; or a container of `count` items,
 * which are the following parts. */
typedef struct {
    enum PartKind kind;
    PyObject *object; /* the type, the value, or a dict's keys */
    Py_ssize_t count, place;
    int is_root;
} Part;

typedef struct {
    PyObject_HEAD PyObject *tensor_class, *arena_class, *parts, *kept;
    Part *part;
    void **apart;   /* memory that must not be among the arguments, sorted */
    uintptr_t *met; /* hash set of the tensors and memories of a walk; 0 marks an empty slot */
    size_t room;    /* number of slots, a power of 2 */
    Py_ssize_t napart;
} Pattern;

static int by_address(const void *x, const void *y)
{
    const char *a = *(char *const *)x, *b = *(char *const *)y;
    return (a > b) - (a < b);
}

/* Return whether the address is new in this walk. */
static int is_new(const Pattern *self, uintptr_t address)
{
    size_t i = (address >> 4) * 0x9E3779B97F4A7C15u >> 32;
    while (self->met[i &= self->room - 1]) {
        if (self->met[i] == address)
            return 0;
        i++;
    }
    self->met[i] = address;
    return 1;
}

/* Record a tensor with an ordinal and memory, or compare it with the recorded tensor. */
static int fits_tensor(const Pattern *self, const Part *part, PyObject *value, PyObject *tensors,
                       PyObject *inputs)
{
    if ((PyObject *)Py_TYPE(value) != self->tensor_class)
        return 0;
    Allocation *x = (Allocation *)value, *root = root_of(x);
    if (x->type != part->object || (root == x) != part->is_root || !root->arena ||
        (PyObject *)Py_TYPE(root->arena) != self->arena_class)
        return 0;
    void *const its[] = {x, root};
    for (int i = 0; i < 2; i++)
        if (bsearch(&its[i], self->apart, (size_t)self->napart, sizeof(void *), by_address))
            return 0;
    Py_ssize_t ntensors = PyList_Size(tensors), ninputs = PyList_Size(inputs);
    if (part->count < ntensors)
        return PyList_GetItem(tensors, part->count) == value;
    if (!is_new(self, (uintptr_t)x | 1))
        return 0;
    if (PyList_Append(tensors, value))
        return -1;
    if (part->place < ninputs)
        return root_of((Allocation *)PyList_GetItem(inputs, part->place)) == root;
    if (!is_new(self, (uintptr_t)root))
        return 0;
    return PyList_Append(inputs, value) ? -1 : 1;
}

static int is_plain(PyObject *value, PyObject *expected)
{
    if (value == expected)
        return 1;
    if (Py_TYPE(value) != Py_TYPE(expected))
        return 0;
    if (PyUnicode_CheckExact(value))
        return PyUnicode_Compare(value, expected) == 0;
    return PyLong_CheckExact(value) ? PyObject_RichCompareBool(value, expected, Py_EQ) : 0;
}

/* Return whether a value matches the parts from `*at` on, and advance `*at`. Runs no Python. */
static int fits(const Pattern *self, Py_ssize_t *at, PyObject *value, PyObject *numbers, PyObject *tensors,
                PyObject *inputs)
{
    const Part *part = &self->part[(*at)++];
    PyObject *key, *each;
    Py_ssize_t place = 0;
    int same = 1;
    switch (part->kind) {
    case TENSOR: return fits_tensor(self, part, value, tensors, inputs);
    case NUMBER: return part->place < PyList_Size(numbers) && PyList_GetItem(numbers, part->place) == value;
    case PLAIN: return is_plain(value, part->object);
    case LIST:
        if (!PyList_CheckExact(value) || PyList_Size(value) != part->count)
            return 0;
        for (Py_ssize_t i = 0; i < part->count && same > 0; i++)
            same = fits(self, at, PyList_GetItem(value, i), numbers, tensors, inputs);
        return same;
    case TUPLE:
        if (!PyTuple_CheckExact(value) || PyTuple_Size(value) != part->count)
            return 0;
        for (Py_ssize_t i = 0; i < part->count && same > 0; i++)
            same = fits(self, at, PyTuple_GetItem(value, i), numbers, tensors, inputs);
        return same;
    default:
        if (!PyDict_CheckExact(value) || PyDict_Size(value) != part->count)
            return 0;
        for (Py_ssize_t i = 0; i < part->count && same > 0; i++)
            same = PyDict_Next(value, &place, &key, &each) &&
                           is_plain(key, PyTuple_GetItem(part->object, i))
                       ? fits(self, at, each, numbers, tensors, inputs)
                       : 0;
        return same;
    }
}

/* match(args, kwargs, given) -> (tensors, inputs) or None */
static PyObject *pattern_match(Pattern *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1]) || !PyList_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "match: expected (tuple, dict, list), got %zd args", nargs);
    PyObject *tensors = PyList_New(0), *inputs = PyList_New(0), *result = NULL;
    Py_ssize_t at = 0;
    int same = tensors && inputs ? 1 : -1;
    memset(self->met, 0, self->room * sizeof *self->met); /* no other thread walks simultaneously */
    for (int i = 0; i < 2 && same > 0; i++)
        same = fits(self, &at, args[i], args[2], tensors, inputs);
    if (same >= 0)
        result = same ? PyTuple_Pack(2, tensors, inputs) : Py_NewRef(Py_None);
    Py_XDECREF(tensors);
    Py_XDECREF(inputs);
    return result;
}

/* exclusive(tensors) -> bool: whether no other view of the memory is known. */
static PyObject *exclusive(PyObject *module, PyObject *tensors)
{
    (void)module;
    if (!PyList_Check(tensors))
        return PyErr_Format(PyExc_TypeError, "exclusive: expected a list, got %R", tensors);
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
        PyObject *each = PyList_GetItem(tensors, i);
        if (!PyObject_TypeCheck(each, allocation_type))
            Py_RETURN_FALSE;
        Region *region = home_of((Allocation *)each);
        if (!region || region->first_view)
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* Pattern(tensor_class, arena_class, parts, apart) */
static PyObject *pattern_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *tensor_class, *arena_class, *parts, *apart;
    if (!PyArg_ParseTuple(args, "OOO!O!:Pattern", &tensor_class, &arena_class, &PyTuple_Type, &parts,
                          &PyTuple_Type, &apart))
        return NULL;
    Pattern *self = (Pattern *)object_of(type);
    if (!self)
        return NULL;
    Py_ssize_t nparts = PyTuple_Size(parts), n = PyTuple_Size(apart);
    self->part = PyMem_Calloc((size_t)nparts + 1, sizeof *self->part);
    self->apart = PyMem_Calloc((size_t)n + 1, sizeof *self->apart);
    for (self->room = 8; self->room < 4 * (size_t)nparts;)
        self->room *= 2;
    self->met = PyMem_Calloc(self->room, sizeof *self->met);
    int failed = !self->part || !self->apart || !self->met;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < nparts && !failed; i++) {
        Part *part = &self->part[i];
        int kind;
        failed = !PyArg_ParseTuple(PyTuple_GetItem(parts, i), "iOnnp", &kind, &part->object, &part->count,
                                   &part->place, &part->is_root);
        part->kind = (enum PartKind)kind;
    }
    for (Py_ssize_t i = 0; i < n && !failed; i++)
        self->apart[i] = PyTuple_GetItem(apart, i);
    if (failed) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    qsort(self->apart, (size_t)n, sizeof(void *), by_address);
    self->napart = n;
    self->tensor_class = Py_NewRef(tensor_class);
    self->arena_class = Py_NewRef(arena_class);
    self->parts = Py_NewRef(parts);
    self->kept = Py_NewRef(apart);
    return (PyObject *)self;
}

OBJECT_FIELDS(Pattern, pattern, tensor_class, kept)

static void pattern_dealloc(Pattern *self)
{
    PyObject_GC_UnTrack(self);
    pattern_clear(self);
    PyMem_Free(self->part);
    PyMem_Free(self->apart);
    PyMem_Free(self->met);
    free_object((PyObject *)self);
}

static PyMethodDef pattern_methods[] = {
    {"match", (PyCFunction)(void (*)(void))pattern_match, METH_FASTCALL,
     "match(args, kwargs, given): the tensors of the arguments, and the first tensor of each memory."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot pattern_slots[] = {
    {Py_tp_new, pattern_new},
    {Py_tp_dealloc, pattern_dealloc},
    {Py_tp_traverse, pattern_traverse},
    {Py_tp_clear, pattern_clear},
    {Py_tp_methods, pattern_methods},
    {Py_tp_doc, "Pattern(tensor_class, arena_class, parts, apart): a known call."},
    {0, NULL}};
static PyType_Spec pattern_spec = {"mlvm.machines.native._native.Pattern", sizeof(Pattern), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, pattern_slots};

static PyMethodDef guards_functions[] = {
    {"exclusive", exclusive, METH_O, "exclusive(tensors): whether no views of the tensors exist."},
    {NULL, NULL, 0, NULL}};

int guards_init(PyObject *module)
{
    checklist_type = add_type(module, "Checklist", &checklist_spec);
    pattern_type = add_type(module, "Pattern", &pattern_spec);
    dict_name = PyUnicode_InternFromString("__dict__");
    if (!checklist_type || !pattern_type || !dict_name)
        return -1;
    return PyModule_AddFunctions(module, guards_functions);
}
