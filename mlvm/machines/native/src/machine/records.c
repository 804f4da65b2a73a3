/* Residuals: records of copies of tensors, on a stack. Programs push and read them as functions in C,
 * without the interpreter lock; that is asked for memory only. `residuals.py` says what is meant.
 *
 * A record lies in one piece: how many parts it has, what each is, and the elements of each. */
#include "records.h"

#include "host.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGNMENT = 64, FIRST_CHUNK = 1 << 16, MOST_DOUBLED = 10 };

/* The offsets are bytes from where the record begins. */
typedef struct {
    int32_t dtype, ndim;
    int64_t nbytes, shape, data;
} Part;

typedef struct {
    int64_t nparts;
    Part parts[];
} Record;

typedef struct {
    char *address;
    int64_t nbytes;
} Chunk;

typedef struct {
    PyObject_HEAD PyObject *more; /* gives an array of so many bytes */
    PyObject *keepalive;          /* a list of these arrays */
    Chunk *chunks;
    Record **records;
    int64_t nchunks, room, count;
    int64_t chunk, used; /* the top: in which chunk, and how much of it is used */
    int64_t first;       /* records of programs around this one */
    long long nbytes;
} Records;

static int64_t rounded(int64_t nbytes)
{
    return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* One chunk more, of so many bytes or more. Returns 0, or -1 with an exception set. */
static int grow(Records *self, int64_t nbytes)
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

/* Memory on top, or NULL with the call failed. */
static Record *take(Records *self, mlvm_frame *frame, int64_t nbytes)
{
    int64_t chunk = self->chunk, used = self->used;
    while (chunk < self->nchunks && used + nbytes > self->chunks[chunk].nbytes) {
        chunk++;
        used = 0;
    }
    int failed = 0;
    if (chunk == self->nchunks || self->count == self->room) {
        PyGILState_STATE lock = PyGILState_Ensure();
        failed = chunk == self->nchunks && grow(self, nbytes);
        if (!failed && self->count == self->room) {
            int64_t room = self->room * 2 + 64;
            Record **records = realloc(self->records, sizeof *records * (size_t)room);
            failed = !records;
            if (failed)
                PyErr_NoMemory();
            else {
                self->records = records;
                self->room = room;
            }
        }
        if (failed)
            frame_fail(frame);
        PyGILState_Release(lock);
    }
    if (failed)
        return NULL;
    self->chunk = chunk;
    self->used = used + nbytes;
    return (Record *)(void *)(self->chunks[chunk].address + used);
}

static int is_number(const mlvm_value *value)
{
    return value->kind == MLVM_TENSOR && value->tensor.dtype == MLVM_I64 && !value->tensor.ndim;
}

/* Whether the parameters are tensors, one of them the number of a record. */
static int are_tensors(const mlvm_frame *frame, int64_t number)
{
    for (int64_t i = 0; i < frame->nparams; i++)
        if (frame->params[i].kind != MLVM_TENSOR)
            return 0;
    return frame->nparams && is_number(&frame->params[number]);
}

static int refuse(mlvm_frame *frame)
{
    return frame->error(frame, "takes tensors, and an i64[] for the record's number");
}

/* ( p x1 .. xn -- ) */
static int push(mlvm_frame *frame)
{
    if (!are_tensors(frame, 0))
        return refuse(frame);
    Records *self = frame_owner(frame);
    const mlvm_value *x = frame->params + 1;
    int64_t n = frame->nparams - 1, nbytes = (int64_t)sizeof(Record) + n * (int64_t)sizeof(Part);
    for (int64_t i = 0; i < n; i++)
        nbytes += x[i].tensor.ndim * (int64_t)sizeof(int64_t);
    int64_t shape = (int64_t)sizeof(Record) + n * (int64_t)sizeof(Part), data = rounded(nbytes);
    nbytes = data;
    for (int64_t i = 0; i < n; i++)
        nbytes += rounded(x[i].tensor.nbytes);
    Record *record = take(self, frame, nbytes);
    if (!record)
        return 1;
    record->nparts = n;
    for (int64_t i = 0; i < n; i++) {
        const mlvm_tensor *t = &x[i].tensor;
        size_t lengths = (size_t)t->ndim * sizeof(int64_t);
        record->parts[i] = (Part){t->dtype, t->ndim, t->nbytes, shape, data};
        if (lengths)
            memcpy((char *)record + shape, t->shape, lengths);
        if (t->nbytes)
            memcpy((char *)record + data, t->data, (size_t)t->nbytes);
        shape += (int64_t)lengths;
        data += rounded(t->nbytes);
    }
    self->records[self->count++] = record;
    memcpy(frame->params[0].tensor.data, &self->count, sizeof self->count);
    return 0;
}

static const Record *record_of(const Records *self, int64_t number)
{
    return self->first < number && number <= self->count ? self->records[number - 1] : NULL;
}

static int fits(const Record *record, const Part *part, const mlvm_tensor *t)
{
    return part->dtype == t->dtype && part->ndim == t->ndim && part->nbytes == t->nbytes &&
           (!t->ndim ||
            !memcmp((const char *)record + part->shape, t->shape, (size_t)t->ndim * sizeof(int64_t)));
}

/* ( o1 .. on p -- ) */
static int read_record(mlvm_frame *frame)
{
    int64_t n = frame->nparams - 1, number;
    if (!are_tensors(frame, n))
        return refuse(frame);
    memcpy(&number, frame->params[n].tensor.data, sizeof number);
    const Record *record = record_of(frame_owner(frame), number);
    int is_match = !number || (record && n <= record->nparts);
    for (int64_t i = 0; number && is_match && i < n; i++)
        is_match = fits(record, &record->parts[i], &frame->params[i].tensor);
    if (!is_match) {
        char message[100];
        snprintf(message, sizeof message, "no record %lld of %lld such tensors is there", (long long)number,
                 (long long)n);
        return frame->error(frame, message);
    }
    for (int64_t i = 0; i < n; i++) {
        const mlvm_tensor *t = &frame->params[i].tensor;
        if (t->nbytes && number)
            memcpy(t->data, (const char *)record + record->parts[i].data, (size_t)t->nbytes);
        else if (t->nbytes)
            memset(t->data, 0, (size_t)t->nbytes);
    }
    return 0;
}

/* --- for Python --- */

static PyObject *records_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"more", NULL};
    PyObject *more;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Records", names, &more))
        return NULL;
    Records *self = (Records *)object_of(type);
    if (!self)
        return NULL;
    Py_INCREF(more);
    self->more = more;
    if (!(self->keepalive = PyList_New(0)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void records_dealloc(Records *self)
{
    free(self->chunks);
    free(self->records);
    Py_XDECREF(self->more);
    Py_XDECREF(self->keepalive);
    free_object((PyObject *)self);
}

/* begin() -> mark: where a program's own records begin */
static PyObject *records_begin(Records *self, PyObject *unused)
{
    (void)unused;
    PyObject *mark = Py_BuildValue("LLLL", (long long)self->chunk, (long long)self->used,
                                   (long long)self->count, (long long)self->first);
    self->first = self->count;
    return mark;
}

/* end(mark): give up the records since */
static PyObject *records_end(Records *self, PyObject *mark)
{
    long long chunk, used, count, first;
    if (!PyArg_ParseTuple(mark, "LLLL", &chunk, &used, &count, &first))
        return NULL;
    self->chunk = chunk;
    self->used = used;
    self->count = count;
    self->first = first;
    Py_RETURN_NONE;
}

/* parts(number) -> a list of (dtype, lengths), or None without such a record */
static PyObject *records_parts(Records *self, PyObject *number)
{
    const Record *record = record_of(self, PyLong_AsLongLong(number));
    if (PyErr_Occurred())
        return NULL;
    if (!record)
        Py_RETURN_NONE;
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list && i < record->nparts; i++) {
        const Part *part = &record->parts[i];
        const int64_t *shape = (const int64_t *)(const void *)((const char *)record + part->shape);
        PyObject *lengths = PyList_New(0);
        for (int j = 0; lengths && j < part->ndim; j++) {
            PyObject *length = PyLong_FromLongLong(shape[j]);
            if (!length || PyList_Append(lengths, length))
                Py_CLEAR(lengths);
            Py_XDECREF(length);
        }
        PyObject *pair = lengths ? Py_BuildValue("iN", (int)part->dtype, lengths) : NULL;
        if (!pair || PyList_Append(list, pair))
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

static PyMethodDef records_methods[] = {{"begin", (PyCFunction)records_begin, METH_NOARGS, NULL},
                                        {"end", (PyCFunction)records_end, METH_O, NULL},
                                        {"parts", (PyCFunction)records_parts, METH_O, NULL},
                                        {NULL, NULL, 0, NULL}};
static PyMemberDef records_members[] = {
    {"nbytes", T_LONGLONG, offsetof(Records, nbytes), READONLY, "The bytes of its memory."},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot records_slots[] = {
    {Py_tp_new, records_new},
    {Py_tp_dealloc, records_dealloc},
    {Py_tp_methods, records_methods},
    {Py_tp_members, records_members},
    {Py_tp_doc, "Records(more): a stack of records, in memory that more(nbytes) gives."},
    {0, NULL}};
static PyType_Spec records_spec = {"mlvm.machines.native._native.Records", sizeof(Records), 0,
                                   Py_TPFLAGS_DEFAULT, records_slots};

int records_init(PyObject *module)
{
    PyObject *pushes = PyLong_FromVoidPtr((void *)(uintptr_t)push);
    PyObject *reads = PyLong_FromVoidPtr((void *)(uintptr_t)read_record);
    int failed = !pushes || !reads || PyModule_AddObjectRef(module, "PUSH_RECORD", pushes) ||
                 PyModule_AddObjectRef(module, "READ_RECORD", reads) ||
                 !add_type(module, "Records", &records_spec);
    Py_XDECREF(pushes);
    Py_XDECREF(reads);
    return failed ? -1 : 0;
}
