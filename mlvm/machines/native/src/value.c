#include "value.h"

#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64 };

/* --- Type --- */

static PyObject *type_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"tensor_type", "nbytes", "size", "dtype", NULL};
    PyObject *tensor_type;
    long long nbytes, size;
    int dtype;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLi:Type", names, &tensor_type, &nbytes,
                                     &size, &dtype))
        return NULL;
    TypeObject *self = (TypeObject *)object_of(type);
    if (!self)
        return NULL;
    Py_INCREF(tensor_type);
    self->tensor_type = tensor_type;
    self->nbytes = nbytes;
    self->size = size;
    self->dtype = dtype;
    return (PyObject *)self;
}

static void type_dealloc(TypeObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Py_XDECREF(self->tensor_type);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMemberDef type_members[] = {
    {"tensor_type", T_OBJECT_EX, offsetof(TypeObject, tensor_type), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot type_slots[] = {{Py_tp_new, type_new},
                                   {Py_tp_dealloc, type_dealloc},
                                   {Py_tp_members, type_members},
                                   {Py_tp_doc, "A TensorType, as the loop sees it."},
                                   {0, NULL}};
static PyType_Spec type_spec = {"mlvm.machines.native._native.Type", sizeof(TypeObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, type_slots};

/* --- memory that an array views --- */

typedef struct {
    PyObject_HEAD
    Tensor *block; /* whose bytes these are */
    long long nbytes;
} MemoryObject;

static PyTypeObject *type_type, *memory_type;

static void let_go(Tensor *block)
{
    if (!--block->holders)
        free(block);
}

static int memory_getbuffer(PyObject *self, Py_buffer *view, int flags)
{
    MemoryObject *memory = (MemoryObject *)self;
    return PyBuffer_FillInfo(view, self, memory->block->address, memory->nbytes, 0, flags);
}

static void memory_dealloc(MemoryObject *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->block)
        let_go(self->block);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyType_Slot memory_slots[] = {{Py_tp_dealloc, memory_dealloc},
                                     {Py_bf_getbuffer, memory_getbuffer},
                                     {Py_tp_doc, "The bytes of a tensor that the loop made."},
                                     {0, NULL}};
static PyType_Spec memory_spec = {"mlvm.machines.native._native.Memory", sizeof(MemoryObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, memory_slots};

/* --- tensors --- */

Tensor *tensor_new(TypeObject *type)
{
    void *memory = NULL;
    size_t header = (sizeof(Tensor) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    if (posix_memalign(&memory, ALIGNMENT, header + (size_t)type->nbytes))
        return NULL;
    Tensor *tensor = memory;
    memset(tensor, 0, sizeof *tensor);
    tensor->references = 1;
    tensor->address = (char *)memory + header;
    tensor->type = type;
    return tensor;
}

Tensor *tensor_of(PyObject *array, TypeObject *type)
{
    Tensor *tensor = malloc(sizeof *tensor);
    if (!tensor) {
        PyErr_NoMemory();
        return NULL;
    }
    if (tensor_lend(tensor, array, type)) {
        free(tensor);
        return NULL;
    }
    Py_INCREF(array);
    tensor->references = 1;
    tensor->holders = 1;
    return tensor;
}

int tensor_lend(Tensor *tensor, PyObject *array, TypeObject *type)
{
    memset(tensor, 0, sizeof *tensor);
    tensor->references = IMMORTAL;
    tensor->type = type;
    tensor->array = array;
    return address_of(array, &tensor->address, &tensor->constant);
}

PyObject *tensor_array(Tensor *tensor)
{
    if (!tensor->array) {
        MemoryObject *memory = (MemoryObject *)object_of(memory_type);
        if (!memory)
            return NULL;
        memory->block = tensor;
        memory->nbytes = tensor->type->nbytes;
        tensor->holders = 2; /* the tensor and the memory */
        PyObject *array = PyObject_CallMethod((PyObject *)tensor->type, "array_over", "O", memory);
        if (!array)
            tensor->holders = 1, memory->block = NULL;
        Py_DECREF(memory);
        if (!array)
            return NULL;
        tensor->array = array;
    }
    Py_INCREF(tensor->array);
    return tensor->array;
}

void tensor_free(Tensor *tensor)
{
    if (!tensor->array) {
        free(tensor);
        return;
    }
    PyObject *array = tensor->array;
    tensor->array = NULL;
    let_go(tensor);
    Py_DECREF(array);
}

int is_type(PyObject *object)
{
    return PyObject_TypeCheck(object, type_type);
}

int value_init(PyObject *module)
{
    type_type = add_type(module, "Type", &type_spec);
    memory_type = add_type(module, "Memory", &memory_spec);
    return type_type && memory_type ? 0 : -1;
}
