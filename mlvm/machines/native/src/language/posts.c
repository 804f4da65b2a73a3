/* Eager calls to a remote VM: launches as messages, and messages as launches.
 *
 * On the client, `Outbox` collects the messages of eager calls, each with a line of Python. On the
 * server, `run_launches` looks up a message in a cache, and runs the kernel call without Python.
 * docs/wire.md specifies the layout of a message. All other calls are in mlvm/machines/remote/;
 * these two are in C because an eager loop runs them at each op. The interpreter lock is held
 * throughout.
 */
#include "posts.h"

#include "../machine/call.h"

#include <string.h>
#include <time.h>

enum { HEADER = 16, LAUNCH = 7, MOST_HANDLES = 16, GATHERED = 64 };

static const unsigned char START[8] = {'M', 'L', 'V', 'M', 1, 0, LAUNCH, 0};
static const double PAUSE = 100e-6; /* seconds after which the server may be idle */

static PyTypeObject *outbox_type, *bound_type;
static PyObject *filename_name, *lasti_name, *back_name;

/* --- Outbox --- */

struct Outbox {
    PyObject_HEAD PyObject *ours; /* by file name: whether the file belongs to mlvm */
    PyObject *place;              /* place() -> (code, offset) or None, for files that are not in `ours` */
    PyObject *places; /* locations of the messages in `data`; the first message has the number `first` */
    char *data;
    int64_t size, room;
    long long first;
    int64_t shown, shown_count; /* bytes and messages that the last `take` returned */
    double emptied;
};

double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static PyObject *outbox_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ours", "place", NULL};
    PyObject *ours, *place;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Outbox", names, &ours, &place))
        return NULL;
    if (!PyDict_Check(ours))
        return PyErr_Format(PyExc_TypeError, "Outbox: expected a dict of files, got %R", ours);
    Outbox *self = (Outbox *)object_of(type);
    if (!self)
        return NULL;
    self->ours = Py_NewRef(ours);
    self->place = Py_NewRef(place);
    self->places = PyList_New(0);
    if (!self->places) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static void outbox_dealloc(Outbox *self)
{
    Py_XDECREF(self->ours);
    Py_XDECREF(self->place);
    Py_XDECREF(self->places);
    PyMem_Free(self->data);
    free_object((PyObject *)self);
}

/* Return the innermost Python location outside of mlvm, as `user_place` in mlvm/core/errors.py. A new
 * reference; NULL with an exception set. */
static PyObject *user_place(Outbox *self)
{
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *place = NULL;
    Py_XINCREF(frame);
    while (frame && frame != Py_None) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)frame);
        PyObject *file = PyObject_GetAttr(code, filename_name);
        PyObject *is_ours = file ? PyDict_GetItemWithError(self->ours, file) : NULL;
        Py_XDECREF(file);
        if (is_ours != Py_True) {
            PyObject *offset = is_ours ? PyObject_GetAttr(frame, lasti_name) : NULL;
            if (offset)
                place = PyTuple_Pack(2, code, offset);
            else if (!PyErr_Occurred())
                place = PyObject_CallNoArgs(self->place);
            Py_XDECREF(offset);
            Py_DECREF(code);
            Py_DECREF(frame);
            return place;
        }
        Py_DECREF(code);
        PyObject *back = PyObject_GetAttr(frame, back_name);
        Py_DECREF(frame);
        frame = back;
    }
    if (!frame && PyErr_Occurred())
        return NULL;
    Py_XDECREF(frame);
    Py_RETURN_NONE;
}

static Py_ssize_t outbox_length(Outbox *self);

/* Reserve nbytes more. NULL with an exception set. */
static char *extend(Outbox *self, int64_t nbytes)
{
    if (!self->data || self->size + nbytes > self->room) {
        int64_t room = 2 * (self->size + nbytes) + 4096;
        char *data = PyMem_Realloc(self->data, (size_t)room);
        if (!data) {
            PyErr_NoMemory();
            return NULL;
        }
        self->data = data;
        self->room = room;
    }
    return self->data + self->size;
}

int outbox_launch(Outbox *self, long long number, const int64_t *handles, int count)
{
    PyObject *place = user_place(self);
    if (!place)
        return -1;
    int64_t body = 8 * (int64_t)(1 + count);
    char *out = extend(self, HEADER + body);
    if (!out || PyList_Append(self->places, place)) {
        Py_DECREF(place);
        return -1;
    }
    Py_DECREF(place);
    memcpy(out, START, sizeof START);
    memcpy(out + 8, &body, 8);
    memcpy(out + HEADER, &number, 8);
    memcpy(out + HEADER + 8, handles, 8 * (size_t)count);
    self->size += HEADER + body;
    return outbox_length(self) >= GATHERED || now() - self->emptied > PAUSE;
}

/* add(message, place) -> whether the box should be sent now */
static PyObject *outbox_add(Outbox *self, PyObject *args)
{
    const char *message;
    Py_ssize_t size;
    PyObject *place;
    if (!PyArg_ParseTuple(args, "y#O:add", &message, &size, &place))
        return NULL;
    char *out = extend(self, size);
    if (!out || PyList_Append(self->places, place))
        return NULL;
    memcpy(out, message, (size_t)size);
    self->size += size;
    return PyBool_FromLong(outbox_length(self) >= GATHERED || now() - self->emptied > PAUSE);
}

/* take(done) -> (bytes, places): drop the messages before number `done`, and return the others */
static PyObject *outbox_take(Outbox *self, PyObject *argument)
{
    long long done = PyLong_AsLongLong(argument);
    if (done == -1 && PyErr_Occurred())
        return NULL;
    if (done == self->first + self->shown_count && self->shown_count) {
        if (PyList_SetSlice(self->places, 0, (Py_ssize_t)self->shown_count, NULL))
            return NULL;
        memmove(self->data, self->data + self->shown, (size_t)(self->size - self->shown));
        self->size -= self->shown;
        self->first = done;
        self->shown = self->shown_count = 0;
    } else if (done != self->first) {
        return PyErr_Format(PyExc_ValueError, "expected done >= %lld, got %lld", self->first, done);
    }
    /* These allocations may run the garbage collector, and a finalizer may add a message. */
    Py_ssize_t count = PyList_Size(self->places);
    int64_t size = self->size;
    PyObject *places = PyList_GetSlice(self->places, 0, count);
    PyObject *data = places ? PyBytes_FromStringAndSize(self->data, (Py_ssize_t)size) : NULL;
    PyObject *result = data ? PyTuple_Pack(2, data, places) : NULL;
    Py_XDECREF(data);
    Py_XDECREF(places);
    if (result) {
        self->shown = size;
        self->shown_count = count;
        self->emptied = now();
    }
    return result;
}

/* The number of messages that `take` has not returned. */
static Py_ssize_t outbox_length(Outbox *self)
{
    return PyList_Size(self->places) - (Py_ssize_t)self->shown_count;
}

int is_outbox(PyObject *object)
{
    return PyObject_TypeCheck(object, outbox_type);
}

static PyMethodDef outbox_methods[] = {
    {"add", (PyCFunction)outbox_add, METH_VARARGS,
     "add(message, place): whether the messages should be sent now."},
    {"take", (PyCFunction)outbox_take, METH_O,
     "take(done): drop the messages before number `done`; return the remaining messages and places."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot outbox_slots[] = {
    {Py_tp_new, outbox_new},
    {Py_tp_dealloc, outbox_dealloc},
    {Py_tp_methods, outbox_methods},
    {Py_sq_length, outbox_length},
    {Py_tp_doc, "Outbox(ours, place): messages to send, and the line of Python of each."},
    {0, NULL}};
static PyType_Spec outbox_spec = {"mlvm.machines.native._native.Outbox", sizeof(Outbox), 0,
                                  Py_TPFLAGS_DEFAULT, outbox_slots};

/* --- Bound: a call with arrays --- */

typedef struct {
    PyObject_HEAD KernelCallObject *call;
    PyObject *arrays;
    char *addresses[MOST_HANDLES];
    int count;
} Bound;

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"call", "arrays", NULL};
    PyObject *call, *arrays;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!:Bound", names, &call, &PyTuple_Type, &arrays))
        return NULL;
    if (!is_kernel_call(call) || PyTuple_Size(arrays) >= MOST_HANDLES)
        return PyErr_Format(PyExc_TypeError, "Bound: expected a KernelCall and less than %d arrays",
                            MOST_HANDLES);
    Bound *self = (Bound *)object_of(type);
    if (!self)
        return NULL;
    self->call = (KernelCallObject *)Py_NewRef(call);
    self->arrays = Py_NewRef(arrays);
    self->count = (int)PyTuple_Size(arrays);
    for (int i = 0; i < self->count; i++)
        if (address_of(PyTuple_GetItem(arrays, i), &self->addresses[i], NULL)) {
            Py_DECREF((PyObject *)self);
            return NULL;
        }
    return (PyObject *)self;
}

static void bound_dealloc(Bound *self)
{
    Py_XDECREF((PyObject *)self->call);
    Py_XDECREF(self->arrays);
    free_object((PyObject *)self);
}

static PyType_Slot bound_slots[] = {
    {Py_tp_new, bound_new},
    {Py_tp_dealloc, bound_dealloc},
    {Py_tp_doc, "Bound(call, arrays): a call, and the arrays on which it runs."},
    {0, NULL}};
static PyType_Spec bound_spec = {"mlvm.machines.native._native.Bound", sizeof(Bound), 0, Py_TPFLAGS_DEFAULT,
                                 bound_slots};

/* run_launches(pool, buffer, start, end, bound) -> start, count
 *
 * Run the launches that begin at `start`, as long as their bodies are in the dict `bound`. Python
 * handles messages that are not in the cache, that the kernel rejects, or that are not launches. */
static PyObject *run_launches(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *pool, *bound;
    Py_buffer buffer;
    Py_ssize_t start, end, count = 0;
    if (!PyArg_ParseTuple(args, "Oy*nnO!:run_launches", &pool, &buffer, &start, &end, &PyDict_Type, &bound))
        return NULL;
    if (!is_pool(pool) || start < 0 || end > buffer.len) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_TypeError, "expected (Pool, part of a buffer), got %R", pool);
    }
    int failed = 0;
    while (end - start >= HEADER) {
        const char *message = (const char *)buffer.buf + start;
        uint64_t body;
        memcpy(&body, message + 8, 8);
        if (memcmp(message, START, sizeof START) || body > 8 * MOST_HANDLES ||
            (uint64_t)(end - start - HEADER) < body)
            break;
        PyObject *key = PyBytes_FromStringAndSize(message + HEADER, (Py_ssize_t)body);
        Bound *entry = key ? (Bound *)PyDict_GetItemWithError(bound, key) : NULL;
        Py_XDECREF(key);
        if (!entry || Py_TYPE((PyObject *)entry) != bound_type) {
            failed = PyErr_Occurred() != NULL;
            break;
        }
        char *p[MOST_HANDLES + 1];
        memcpy(p, entry->addresses, sizeof entry->addresses);
        Py_INCREF((PyObject *)entry);
        int refused = run_in_pool((PoolObject *)pool, &entry->call->call, p);
        Py_DECREF((PyObject *)entry);
        failed = refused < 0;
        if (refused)
            break;
        start += HEADER + (Py_ssize_t)body;
        count++;
    }
    PyBuffer_Release(&buffer);
    return failed ? NULL : Py_BuildValue("nn", start, count);
}

static PyMethodDef posts_functions[] = {
    {"run_launches", (PyCFunction)run_launches, METH_VARARGS,
     "run_launches(pool, buffer, start, end, bound): run the launches in the cache."},
    {NULL, NULL, 0, NULL}};

int posts_init(PyObject *module)
{
    outbox_type = add_type(module, "Outbox", &outbox_spec);
    bound_type = add_type(module, "Bound", &bound_spec);
    filename_name = PyUnicode_InternFromString("co_filename");
    lasti_name = PyUnicode_InternFromString("f_lasti");
    back_name = PyUnicode_InternFromString("f_back");
    if (!outbox_type || !bound_type || !filename_name || !lasti_name || !back_name)
        return -1;
    if (PyModule_AddIntMacro(module, MOST_HANDLES))
        return -1;
    return PyModule_AddFunctions(module, posts_functions);
}
