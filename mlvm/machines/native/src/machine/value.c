/* Values on the native machine's stack, and the arrays of them for Python. */
#include "value.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

/* --- Type --- */

static PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor_type", "nbytes", "size", "dtype", "shape", NULL};
    PyObject *tensor_type, *shape;
    long long nbytes, size;
    int dtype;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLiO!:Type", names, &tensor_type, &nbytes, &size,
                                     &dtype, &PyTuple_Type, &shape))
        return NULL;
    TypeObject *self = (TypeObject *)object_of(type);
    if (!self)
        return NULL;
    int ndim = (int)PyTuple_Size(shape);
    int64_t *lengths = PyMem_Calloc((size_t)ndim + 1, sizeof *lengths);
    if (!lengths) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    for (int i = 0; i < ndim; i++)
        lengths[i] = PyLong_AsLongLong(PyTuple_GetItem(shape, i));
    self->tensor_type = Py_NewRef(tensor_type);
    self->type = (Type){nbytes, size, lengths, dtype, ndim};
    return (PyObject *)self;
}

static void type_dealloc(TypeObject *self)
{
    Py_XDECREF(self->tensor_type);
    PyMem_Free((int64_t *)self->type.shape);
    free_object((PyObject *)self);
}

static PyMemberDef type_members[] = {
    {"tensor_type", T_OBJECT_EX, offsetof(TypeObject, tensor_type), READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot type_slots[] = {{Py_tp_new, type_new},
                                   {Py_tp_dealloc, type_dealloc},
                                   {Py_tp_members, type_members},
                                   {Py_tp_doc, "A TensorType, as the loop sees it."},
                                   {0, NULL}};
static PyType_Spec type_spec = {"mlvm.machines.native._native.Type", sizeof(TypeObject), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, type_slots};

/* --- Types --- */

int types_init(Types *types)
{
    types->keepalive = PyDict_New();
    return types->keepalive ? 0 : -1;
}

void types_clear(Types *types)
{
    Py_CLEAR(types->keepalive);
}

void types_forget(Types *types)
{
    for (int i = 0; i < MOST_RECENT; i++)
        types->recent[i] = NULL;
    if (types->keepalive)
        PyDict_Clear(types->keepalive);
}

Py_ssize_t types_count(const Types *types)
{
    return PyDict_Size(types->keepalive);
}

static int place_of(int dtype, int ndim, const int64_t *shape)
{
    uint64_t hash = (uint64_t)dtype + 1;
    for (int i = 0; i < ndim; i++)
        hash = (hash ^ (uint64_t)shape[i]) * 0x9E3779B97F4A7C15u;
    return (int)((hash * 0x9E3779B97F4A7C15u) >> 58);
}

int types_keep(Types *types, PyObject *object)
{
    if (PyDict_SetItem(types->keepalive, object, Py_None))
        return -1;
    TypeObject *added = (TypeObject *)object;
    const Type *type = &added->type;
    types->recent[place_of(type->dtype, type->ndim, type->shape)] = added;
    return 0;
}

TypeObject *types_find(const Types *types, int dtype, int ndim, const int64_t *shape)
{
    TypeObject *recent_type = types->recent[place_of(dtype, ndim, shape)];
    const Type *type = recent_type ? &recent_type->type : NULL;
    if (!type || type->dtype != dtype || type->ndim != ndim)
        return NULL;
    for (int i = 0; i < ndim; i++)
        if (type->shape[i] != shape[i])
            return NULL;
    return recent_type;
}

/* Return the dtype of elements with this buffer format, or -1. */
static int dtype_of(const char *format, Py_ssize_t itemsize)
{
    static const char kinds[] = "?BbHhIiLlQqfd";
    if (format && format[0] == 'Z' && format[1] && !format[2]) /* complex */
        return format[1] == 'f' ? MLVM_C64 : format[1] == 'd' ? MLVM_C128 : -1;
    if (format && !strcmp(format, "e"))
        return MLVM_F16;
    if (format && !strcmp(format, "T{H:bf16:}"))
        return MLVM_BF16;
    const char *kind = format && format[0] && !format[1] ? strchr(kinds, format[0]) : NULL;
    if (!kind)
        return -1;
    int log = itemsize == 1 ? 0 : itemsize == 2 ? 1 : itemsize == 4 ? 2 : 3;
    static const int of_signed[] = {MLVM_I8, MLVM_I16, MLVM_I32, MLVM_I64};
    static const int of_unsigned[] = {MLVM_U8, MLVM_U16, MLVM_U32, MLVM_U64};
    switch (*kind) {
    case '?': return MLVM_BOOL;
    case 'f': return MLVM_F32;
    case 'd': return MLVM_F64;
    default: return (kind - kinds) % 2 ? of_unsigned[log] : of_signed[log];
    }
}

TypeObject *types_of_array(const Types *types, PyObject *array)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_RECORDS_RO)) {
        PyErr_Clear();
        return NULL;
    }
    int64_t shape[PyBUF_MAX_NDIM];
    TypeObject *type = NULL;
    int dtype = dtype_of(buffer.format, buffer.itemsize);
    if (dtype >= 0 && buffer.ndim <= PyBUF_MAX_NDIM) {
        for (int i = 0; i < buffer.ndim; i++)
            shape[i] = buffer.shape[i];
        type = types_find(types, dtype, buffer.ndim, shape);
    }
    PyBuffer_Release(&buffer);
    return type;
}

/* --- memory that arrays view --- */

/* A tensor, and the reference counts. */
typedef struct {
    Tensor tensor;
    int holders;     /* references: the tensor's and, protected by the interpreter lock, the array's */
    int64_t counted; /* bytes in the count of the launch */
} Block;

typedef struct {
    PyObject_HEAD Block *block; /* block that owns these bytes */
    long long nbytes;
} MemoryObject;

static PyTypeObject *type_type, *memory_type;

static _Thread_local int64_t most_made = -1, allocated;

void limit_made(int64_t most)
{
    most_made = most;
    allocated = 0;
}

int64_t get_made(void)
{
    return most_made < 0 ? 0 : allocated;
}

int is_limited(void)
{
    return most_made >= 0;
}

static int may_make(int64_t nbytes)
{
    return most_made < 0 || nbytes <= most_made - allocated;
}

int count_made(int64_t nbytes)
{
    if (!may_make(nbytes))
        return 0;
    allocated += nbytes;
    return 1;
}

/* Free a tensor without holders. An array may release it much later, in any thread, so the count
 * of the launch is reduced, but not below zero. */
static void let_go(Block *block)
{
    if (--block->holders)
        return;
    allocated = allocated > block->counted ? allocated - block->counted : 0;
    free(block);
}

static int memory_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    MemoryObject *memory = (MemoryObject *)self;
    return PyBuffer_FillInfo(view, self, memory->block->tensor.address, memory->nbytes, 0, flags);
}

static void memory_dealloc(MemoryObject *self)
{
    if (self->block)
        let_go(self->block);
    free_object((PyObject *)self);
}

static PyType_Slot memory_slots[] = {{Py_tp_dealloc, memory_dealloc},
                                     {Py_bf_getbuffer, memory_getbuffer},
                                     {Py_tp_doc, "The bytes of a tensor that the loop allocated."},
                                     {0, NULL}};
static PyType_Spec memory_spec = {"mlvm.machines.native._native.Memory", sizeof(MemoryObject), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots};

/* --- tensors --- */

static Tensor *tensor_in(void *memory, const Type *type)
{
    if (!memory)
        return NULL;
    Block *block = memory;
    memset(block, 0, sizeof *block);
    block->holders = 1;
    block->counted = type->nbytes + (int64_t)sizeof *block;
    allocated += block->counted;
    uintptr_t behind = (uintptr_t)(block + 1);
    block->tensor = (Tensor){
        .references = 1, .type = type, .address = (char *)(block + 1) + (-behind & (ALIGNMENT - 1))};
    return &block->tensor;
}

static size_t bytes_with_header(const Type *type)
{
    return sizeof(Block) + ALIGNMENT - 1 + (size_t)type->nbytes;
}

Tensor *tensor_new(const Type *type)
{
    return may_make(type->nbytes) ? tensor_in(malloc(bytes_with_header(type)), type) : NULL;
}

Tensor *tensor_zeros(const Type *type)
{
    return may_make(type->nbytes) ? tensor_in(calloc(1, bytes_with_header(type)), type) : NULL;
}

Tensor *tensor_of(PyObject *array, TypeObject *type)
{
    Block *block = calloc(1, sizeof *block);
    if (!block) {
        PyErr_NoMemory();
        return NULL;
    }
    if (tensor_lend(&block->tensor, array, type)) {
        free(block);
        return NULL;
    }
    Py_INCREF(array);
    block->tensor.references = 1;
    block->holders = 1;
    return &block->tensor;
}

int tensor_lend(Tensor *tensor, PyObject *array, TypeObject *type)
{
    *tensor = (Tensor){.references = IMMORTAL, .type = &type->type, .array = array};
    return address_of(array, &tensor->address, &tensor->constant);
}

PyObject *tensor_array(Tensor *tensor)
{
    if (!tensor->array) {
        Block *block = (Block *)tensor;
        MemoryObject *memory = (MemoryObject *)object_of(memory_type);
        if (!memory)
            return NULL;
        memory->block = block;
        memory->nbytes = tensor->type->nbytes;
        block->holders++;
        PyObject *type = (PyObject *)object_of_type(tensor->type);
        tensor->array = PyObject_CallMethod(type, "array_over", "O", memory);
        Py_DECREF(memory);
        if (!tensor->array)
            return NULL;
    }
    return Py_NewRef(tensor->array);
}

void tensor_free(Tensor *tensor)
{
    PyObject *array = tensor->array;
    tensor->array = NULL;
    let_go((Block *)tensor);
    Py_XDECREF(array);
}

int is_type(PyObject *object)
{
    return PyObject_TypeCheck(object, type_type);
}

/* --- values --- */

/* Return the type of an array, kept by `types`. NULL with an exception set. */
static TypeObject *type_of(Types *types, PyObject *helper, PyObject *array)
{
    TypeObject *cached = types_of_array(types, array);
    if (cached)
        return cached;
    PyObject *type = PyObject_CallMethod(helper, "type_of", "(O)", array);
    if (type && (!is_type(type) || types_keep(types, type)))
        Py_CLEAR(type);
    Py_XDECREF(type);
    return (TypeObject *)type;
}

int value_of(Types *types, PyObject *helper, PyObject *object, Value *value)
{
    int overflow = 1;
    if (PyLong_Check(object))
        value->as.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (!overflow)
        value->kind = INTEGER;
    else if (PyLong_Check(object) || PyUnicode_Check(object)) {
        Py_INCREF(object);
        value->kind = OBJECT;
        value->as.object = object;
    } else {
        TypeObject *type = type_of(types, helper, object);
        value->kind = TENSOR;
        if (!type || !(value->as.tensor = tensor_of(object, type)))
            return -1;
    }
    return 0;
}

PyObject *object_of_value(Value value)
{
    switch (value.kind) {
    case TENSOR: return tensor_array(value.as.tensor);
    case INTEGER: return PyLong_FromLongLong(value.as.integer);
    default: return Py_NewRef(value.as.object);
    }
}

PyObject *list_of_values(const Value *values, int64_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (int64_t i = 0; list && i < count; i++) {
        PyObject *object = object_of_value(values[i]);
        if (!object || PyList_SetItem(list, (Py_ssize_t)i, object))
            Py_CLEAR(list);
    }
    return list;
}

void drop_value(Value value)
{
    if (value.kind == OBJECT)
        Py_DECREF((PyObject *)value.as.object);
    else if (value.kind == TENSOR && !--value.as.tensor->references)
        tensor_free(value.as.tensor);
}

/* limit_made(most): see value.h. Return the bytes allocated so far; None changes nothing. */
static PyObject *set_limit_made(PyObject *module, PyObject *most)
{
    (void)module;
    int64_t nbytes = get_made();
    if (most != Py_None) {
        long long value = PyLong_AsLongLong(most);
        if (value == -1 && PyErr_Occurred())
            return NULL;
        limit_made(value);
    }
    return PyLong_FromLongLong(nbytes);
}

static PyObject *get_dtypes(PyObject *module, PyObject *unused)
{
#define FORMAT(name, code) "si"
#define PAIR(name, code) , #name, code
    (void)module, (void)unused;
    return Py_BuildValue("{" MLVM_DTYPES(FORMAT) "}" MLVM_DTYPES(PAIR));
}

static PyMethodDef value_functions[] = {
    {"limit_made", set_limit_made, METH_O,
     "Limit the bytes that launches in this thread allocate; return the allocated bytes. None: no change."},
    {"dtypes", get_dtypes, METH_NOARGS, "The codes of mlvm.h by dtype name."},
    {NULL, NULL, 0, NULL}};

int value_init(PyObject *module)
{
    type_type = add_type(module, "Type", &type_spec);
    memory_type = add_type(module, "Memory", &memory_spec);
    if (!type_type || !memory_type || PyModule_AddIntMacro(module, MLVM_ABI_VERSION) ||
        PyModule_AddIntMacro(module, MLVM_ANY))
        return -1;
    return PyModule_AddFunctions(module, value_functions);
}
