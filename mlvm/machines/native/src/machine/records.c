/* Residuals: stack of records of a VM, in chunks allocated by Python. Programs push and read
 * records through C functions without the interpreter lock, which is needed only to allocate. */
#include "records.h"

#include "../plan/records.h"
#include "host.h"

#include <stdlib.h>

enum { FIRST_CHUNK = 1 << 16, MOST_DOUBLED = 10 };

typedef struct {
    char *address;
    int64_t nbytes;
} Chunk;

typedef struct {
    PyObject_HEAD Records records; /* the first record is at index 1 */
    PyObject *more;                /* allocates an array of a given number of bytes */
    PyObject *keepalive;           /* list of these arrays */
    Chunk *chunks;
    int64_t nchunks, room;
    int64_t chunk, used; /* top of the stack: index of the chunk, and used bytes in it */
    long long nbytes;
    mlvm_frame *frame; /* frame of the running call */
    char why[RECORDS_WHY];
} Stack;

/* Add a chunk of at least `nbytes`. Return 0, or -1 with an exception set. */
static int grow(Stack *self, int64_t nbytes)
{
    int64_t doubled = self->nchunks < MOST_DOUBLED ? self->nchunks : MOST_DOUBLED;
    int64_t size = (int64_t)FIRST_CHUNK << doubled;
    if (size < nbytes)
        size = nbytes;
    Chunk *chunks = realloc(self->chunks, sizeof *chunks * (size_t)(self->nchunks + 1));
    if (!chunks)
        return PyErr_NoMemory(), -1;
    self->chunks = chunks;
    Chunk *chunk = &chunks[self->nchunks];
    PyObject *array = PyObject_CallFunction(self->more, "L", (long long)size);
    int failed = !array || address_of(array, &chunk->address, NULL) ||
                 PyList_Append(self->keepalive, array);
    Py_XDECREF(array);
    if (failed)
        return -1;
    chunk->nbytes = size;
    self->nchunks++;
    self->nbytes += size;
    return 0;
}

/* Reserve a table entry for another record. Return 0, or -1 with an exception set. */
static int grow_table(Stack *self)
{
    int64_t room = self->room * 2 + 64;
    Record **table = realloc(self->records.table, sizeof *table * (size_t)room);
    if (!table)
        return PyErr_NoMemory(), -1;
    self->records.table = table;
    self->room = room;
    return 0;
}

static Record *take(Records *records, int64_t nbytes)
{
    Stack *self = (Stack *)(void *)((char *)records - offsetof(Stack, records));
    int64_t chunk = self->chunk, used = self->used;
    while (chunk < self->nchunks && used + nbytes > self->chunks[chunk].nbytes) {
        chunk++;
        used = 0;
    }
    int is_full = records->count + 1 >= self->room;
    if (chunk == self->nchunks || is_full) {
        PyGILState_STATE lock = PyGILState_Ensure();
        int failed = (chunk == self->nchunks && grow(self, nbytes)) || (is_full && grow_table(self));
        if (failed)
            frame_fail(self->frame);
        PyGILState_Release(lock);
        if (failed)
            return NULL;
    }
    self->chunk = chunk;
    self->used = used + nbytes;
    return (Record *)(void *)(self->chunks[chunk].address + used);
}

static int call(mlvm_frame *frame, const char *(*perform)(Records *, const Value *, int64_t))
{
    Stack *self = frame_owner(frame);
    self->frame = frame;
    const char *wrong = perform(&self->records, frame_params(frame), frame->nparams);
    return wrong ? frame->error(frame, wrong) : 0; /* the frame keeps the first failure */
}

#define FUNCTION(name)                          \
    static int name##_record(mlvm_frame *frame) \
    {                                           \
        return call(frame, records_##name);     \
    }
FUNCTION(push)
FUNCTION(read)
FUNCTION(read_rows)
FUNCTION(add)

/* --- Python interface --- */

static PyObject *records_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"more", NULL};
    PyObject *more;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Records", names, &more))
        return NULL;
    Stack *self = (Stack *)object_of(type);
    if (!self)
        return NULL;
    self->more = Py_NewRef(more);
    self->records.take = take;
    self->records.step = 1;
    self->records.why = self->why;
    if (!(self->keepalive = PyList_New(0)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void records_dealloc(Stack *self)
{
    free(self->chunks);
    free(self->records.table);
    Py_XDECREF(self->more);
    Py_XDECREF(self->keepalive);
    free_object((PyObject *)self);
}

/* begin() -> mark: start of the records of a program */
static PyObject *records_begin(Stack *self, PyObject *unused)
{
    (void)unused;
    PyObject *mark = Py_BuildValue("LLLL", (long long)self->chunk, (long long)self->used,
                                   (long long)self->records.count, (long long)self->records.first);
    self->records.first = self->records.count;
    return mark;
}

/* end(mark): free the records after the mark */
static PyObject *records_end(Stack *self, PyObject *mark)
{
    long long chunk, used, count, first;
    if (!PyArg_ParseTuple(mark, "LLLL", &chunk, &used, &count, &first))
        return NULL;
    self->chunk = chunk;
    self->used = used;
    self->records.count = count;
    self->records.first = first;
    Py_RETURN_NONE;
}

static PyMethodDef records_methods[] = {{"begin", (PyCFunction)records_begin, METH_NOARGS, NULL},
                                        {"end", (PyCFunction)records_end, METH_O, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyMemberDef records_members[] = {
    {"nbytes", T_LONGLONG, offsetof(Stack, nbytes), READONLY, "Number of bytes of memory."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot records_slots[] = {
    {Py_tp_new, records_new},
    {Py_tp_dealloc, records_dealloc},
    {Py_tp_methods, records_methods},
    {Py_tp_members, records_members},
    {Py_tp_doc, "Records(more): a stack of records, in memory that more(nbytes) allocates."},
    {0, NULL}};
static PyType_Spec records_spec = {"mlvm.machines.native._native.Records", sizeof(Stack), 0,
                                   Py_TPFLAGS_DEFAULT, records_slots};

int records_init(PyObject *module)
{
    const struct {
        const char *name;
        mlvm_function function;
    } functions[] = {{"PUSH_RECORD", push_record},
                     {"READ_RECORD", read_record},
                     {"READ_RECORD_ROWS", read_rows_record},
                     {"ADD_RECORDS", add_record}};
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        PyObject *address = PyLong_FromVoidPtr((void *)(uintptr_t)functions[i].function);
        int failed = !address || PyModule_AddObjectRef(module, functions[i].name, address);
        Py_XDECREF(address);
        if (failed)
            return -1;
    }
    return add_type(module, "Records", &records_spec) ? 0 : -1;
}
