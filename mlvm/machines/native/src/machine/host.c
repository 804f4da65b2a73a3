/* Host functions in C: frames and calls. */
#include "host.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* --- a call in a program --- */

static int fill_numbers(Host *host, PyObject *numbers)
{
    host->nnumbers = PyTuple_Size(numbers);
    host->numbers = PyMem_Calloc((size_t)host->nnumbers + 1, sizeof *host->numbers);
    if (!host->numbers)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < host->nnumbers; i++) {
        struct Number *number = &host->numbers[i];
        PyObject *value;
        if (!PyArg_ParseTuple(PyTuple_GetItem(numbers, i), "yO", &number->name, &value))
            return -1;
        number->has_value = value != Py_None;
        if (number->has_value)
            number->value = PyFloat_AsDouble(value);
    }
    return PyErr_Occurred() ? -1 : 0;
}

Host *host_new(PyObject *spec)
{
    Host *host = PyMem_Calloc(1, sizeof *host);
    if (!host)
        return (Host *)PyErr_NoMemory();
    unsigned long long address, owner;
    PyObject *numbers;
    if (!PyArg_ParseTuple(spec, "OOOiiKyO!K", &host->call, &host->attributes, &host->helper, &host->nparams,
                          &host->nresults, &address, &host->text, &PyTuple_Type, &numbers, &owner) ||
        fill_numbers(host, numbers)) {
        host_free(host);
        return NULL;
    }
    host->function = (mlvm_function)(uintptr_t)address;
    host->owner = (void *)(uintptr_t)owner;
    return host;
}

void host_free(Host *host)
{
    if (host)
        PyMem_Free(host->numbers);
    PyMem_Free(host);
}

/* --- frames --- */

/* A tensor that the function has created. */
typedef struct NewTensor {
    mlvm_tensor public;
    Tensor *tensor;
    struct NewTensor *next;
} NewTensor;

struct Frame {
    mlvm_frame public; /* the part that C functions see */
    Frame *next;       /* next in the list of all frames */
    Frame *next_idle;
    Types *types; /* types of the current launch */
    mlvm_value *values;
    int64_t room, results_room;
    int status;
    /* Any thread of the call may use a callback, so the other fields are protected by this
     * mutex. A thread must not wait for the interpreter lock while it holds the mutex. */
    pthread_mutex_t mutex;
    int running;
    const Host *host;
    const Value *params;
    int64_t nparams, nresults;
    Value *results;
    NewTensor *new_tensors;
    PyObject *failure; /* first exception of a callback */
};

static _Atomic(Frame *) frames;
static Frame *idle; /* protected by the interpreter lock */

/* Lock and return the frame with that address, or NULL if no call uses it. */
static Frame *entered(const mlvm_frame *public)
{
    Frame *frame = frames;
    while (frame && &frame->public != public)
        frame = frame->next;
    if (!frame)
        return NULL;
    pthread_mutex_lock(&frame->mutex);
    if (frame->running)
        return frame;
    pthread_mutex_unlock(&frame->mutex);
    return NULL;
}

/* Fail with the current exception, unless the call has failed before. The interpreter lock is
 * held. */
static void fail(Frame *frame)
{
    PyObject *error = take_exception();
    pthread_mutex_lock(&frame->mutex);
    if (frame->running && !frame->failure) {
        frame->failure = error;
        error = NULL;
    }
    pthread_mutex_unlock(&frame->mutex);
    Py_XDECREF(error);
}

/* Call a Python method: a new reference, or NULL if it raises, which fails the call. The
 * interpreter lock is held. */
static PyObject *ask(Frame *frame, const char *method, const char *format, ...)
{
    pthread_mutex_lock(&frame->mutex);
    PyObject *helper = frame->running ? frame->host->helper : NULL;
    Py_XINCREF(helper);
    pthread_mutex_unlock(&frame->mutex);
    if (!helper)
        return NULL;
    va_list values;
    va_start(values, format);
    PyObject *args = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *function = args ? PyObject_GetAttrString(helper, method) : NULL;
    PyObject *answer = function ? PyObject_CallObject(function, args) : NULL;
    Py_XDECREF(function);
    Py_XDECREF(args);
    Py_DECREF(helper);
    if (!answer)
        fail(frame);
    return answer;
}

/* --- callbacks --- */

/* Return whether the answer is known without Python. A name with non-ASCII bytes may be invalid
 * UTF-8. */
static int find_number(const Host *host, const char *name, double *value)
{
    for (Py_ssize_t i = 0; i < host->nnumbers; i++) {
        const struct Number *number = &host->numbers[i];
        if (!strcmp(number->name, name)) {
            if (number->has_value)
                *value = number->value;
            return number->has_value;
        }
    }
    for (; *name; name++)
        if (*name & 0x80)
            return 0;
    return 1;
}

static int answer_number(mlvm_frame *public, const char *name, double *value)
{
    Frame *frame = entered(public);
    if (!frame)
        return 1;
    int is_number = name && value && find_number(frame->host, name, value);
    pthread_mutex_unlock(&frame->mutex);
    if (is_number)
        return 0;
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *answer = ask(frame, "number", "(yi)", name, value != NULL);
    int failed = !answer;
    Py_XDECREF(answer);
    PyGILState_Release(lock);
    return failed;
}

/* A tensor as C functions see it. */
static mlvm_tensor shown(const Tensor *tensor)
{
    const Type *type = tensor->type;
    return (mlvm_tensor){.data = tensor->address,
                         .nbytes = type->nbytes,
                         .size = type->size,
                         .shape = type->shape,
                         .dtype = type->dtype,
                         .ndim = type->ndim};
}

/* Create a tensor of the call, or NULL if memory is exhausted. The mutex is held. */
static NewTensor *make(Frame *frame, const Type *type)
{
    NewTensor *new_tensor = malloc(sizeof *new_tensor);
    Tensor *tensor = new_tensor ? tensor_zeros(type) : NULL;
    if (!tensor) {
        free(new_tensor);
        return NULL;
    }
    new_tensor->public = shown(tensor);
    new_tensor->tensor = tensor;
    new_tensor->next = frame->new_tensors;
    frame->new_tensors = new_tensor;
    return new_tensor;
}

static PyObject *lengths_of(int ndim, const int64_t *shape)
{
    PyObject *lengths = PyList_New(0);
    for (int i = 0; lengths && i < ndim; i++) {
        PyObject *length = PyLong_FromLongLong(shape[i]);
        if (!length || PyList_Append(lengths, length))
            Py_CLEAR(lengths);
        Py_XDECREF(length);
    }
    return lengths;
}

/* Create a tensor of a type that is not cached, with the interpreter lock. */
static NewTensor *ask_and_make(Frame *frame, int dtype, int ndim, const int64_t *shape)
{
    PyGILState_STATE lock = PyGILState_Ensure();
    NewTensor *new_tensor = NULL;
    PyObject *lengths = ndim > 0 && ndim <= PyBUF_MAX_NDIM && shape ? lengths_of(ndim, shape)
                                                                    : Py_BuildValue("");
    PyObject *type = lengths ? ask(frame, "new_tensor", "(iiN)", dtype, ndim, lengths) : NULL;
    if (!lengths)
        fail(frame);
    if (type) {
        pthread_mutex_lock(&frame->mutex);
        Types *types = frame->running ? frame->types : NULL;
        pthread_mutex_unlock(&frame->mutex);
        int is_retained = types && !types_keep(types, type);
        if (PyErr_Occurred())
            fail(frame);
        pthread_mutex_lock(&frame->mutex);
        if (is_retained && frame->running && frame->types == types)
            new_tensor = make(frame, &((TypeObject *)type)->type);
        pthread_mutex_unlock(&frame->mutex);
        if (is_retained && !new_tensor)
            Py_XDECREF(ask(frame, "no_memory", "(O)", ((TypeObject *)type)->tensor_type));
        Py_DECREF(type);
    }
    PyGILState_Release(lock);
    return new_tensor;
}

static mlvm_tensor *answer_new_tensor(mlvm_frame *public, int32_t dtype, int32_t ndim, const int64_t *shape)
{
    Frame *frame = entered(public);
    if (!frame)
        return NULL;
    TypeObject *type = NULL;
    if (ndim >= 0 && ndim <= PyBUF_MAX_NDIM && (shape || !ndim))
        type = types_find(frame->types, dtype, ndim, shape);
    NewTensor *new_tensor = type ? make(frame, &type->type) : NULL;
    pthread_mutex_unlock(&frame->mutex);
    if (!new_tensor)
        new_tensor = ask_and_make(frame, dtype, ndim, shape);
    return new_tensor ? &new_tensor->public : NULL;
}

/* Return the tensor for a pointer from C code, which may be invalid; NULL if it is. */
static Tensor *find_tensor(const Frame *frame, const mlvm_tensor *public)
{
    for (const NewTensor *new_tensor = frame->new_tensors; new_tensor; new_tensor = new_tensor->next)
        if (&new_tensor->public == public)
            return new_tensor->tensor;
    uintptr_t offset = (uintptr_t) public - (uintptr_t)frame->values;
    if (offset % sizeof(mlvm_value) || offset / sizeof(mlvm_value) >= (uintptr_t)frame->nparams)
        return NULL;
    Value param = frame->params[offset / sizeof(mlvm_value)];
    return param.kind == TENSOR ? param.as.tensor : NULL;
}

/* Append a result. Return 0, or -1 without memory. The mutex is held. */
static int add_result(Frame *frame, Value value)
{
    if (frame->nresults == frame->results_room) {
        int64_t room = frame->results_room * 2 + 4;
        Value *results = realloc(frame->results, sizeof *results * (size_t)room);
        if (!results)
            return -1;
        frame->results = results;
        frame->results_room = room;
    }
    frame->results[frame->nresults++] = value;
    return 0;
}

static int fail_without_memory(Frame *frame)
{
    PyGILState_STATE lock = PyGILState_Ensure();
    PyErr_NoMemory();
    fail(frame);
    PyGILState_Release(lock);
    return 1;
}

static int answer_push(mlvm_frame *public, const mlvm_tensor *tensor)
{
    Frame *frame = entered(public);
    if (!frame)
        return 1;
    Tensor *its_tensor = find_tensor(frame, tensor);
    int failed = its_tensor && add_result(frame, (Value){.kind = TENSOR, .as.tensor = its_tensor});
    if (its_tensor && !failed)
        its_tensor->references++;
    pthread_mutex_unlock(&frame->mutex);
    if (failed)
        return fail_without_memory(frame);
    if (its_tensor)
        return 0;
    PyGILState_STATE lock = PyGILState_Ensure();
    Py_XDECREF(ask(frame, "no_tensor", "()"));
    PyGILState_Release(lock);
    return 1;
}

static int answer_push_int(mlvm_frame *public, int64_t integer)
{
    Frame *frame = entered(public);
    if (!frame)
        return 1;
    int failed = add_result(frame, (Value){.kind = INTEGER, .as.integer = integer});
    pthread_mutex_unlock(&frame->mutex);
    return failed ? fail_without_memory(frame) : 0;
}

static int answer_push_str(mlvm_frame *public, const char *text)
{
    Frame *frame = entered(public);
    if (!frame)
        return 1;
    pthread_mutex_unlock(&frame->mutex);
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *string = ask(frame, "string", "(y)", text);
    int failed = 0, pushed = 0;
    pthread_mutex_lock(&frame->mutex);
    if (string && frame->running) {
        failed = add_result(frame, (Value){.kind = OBJECT, .as.object = string});
        pushed = !failed;
    }
    pthread_mutex_unlock(&frame->mutex);
    if (failed) {
        PyErr_NoMemory();
        fail(frame);
    }
    if (!pushed)
        Py_XDECREF(string);
    PyGILState_Release(lock);
    return !pushed;
}

static int answer_error(mlvm_frame *public, const char *message)
{
    Frame *frame = entered(public);
    if (!frame)
        return 1;
    pthread_mutex_unlock(&frame->mutex);
    PyGILState_STATE lock = PyGILState_Ensure();
    Py_XDECREF(ask(frame, "error", "(y)", message));
    PyGILState_Release(lock);
    return 1;
}

void *frame_owner(mlvm_frame *public)
{
    return ((Frame *)(void *)public)->host->owner;
}

const Value *frame_params(const mlvm_frame *public)
{
    return ((const Frame *)(const void *)public)->params;
}

void frame_fail(mlvm_frame *public)
{
    fail((Frame *)(void *)public);
}

/* --- a call --- */

static Frame *frame_new(void)
{
    Frame *frame = calloc(1, sizeof *frame);
    if (!frame)
        return (Frame *)PyErr_NoMemory();
    frame->public = (mlvm_frame){.number = answer_number,
                                 .new_tensor = answer_new_tensor,
                                 .push = answer_push,
                                 .push_int = answer_push_int,
                                 .push_str = answer_push_str,
                                 .error = answer_error};
    pthread_mutex_init(&frame->mutex, NULL);
    frame->next = frames; /* the interpreter lock protects the list */
    frames = frame;
    return frame;
}

Frame *frame_take(Types *types)
{
    Frame *frame = idle;
    if (frame)
        idle = frame->next_idle;
    else if (!(frame = frame_new()))
        return NULL;
    frame->types = types;
    return frame;
}

void frame_give(Frame *frame)
{
    frame->types = NULL;
    frame->next_idle = idle;
    idle = frame;
}

/* Return a C string owned by the object; NULL if it contains a NUL or a lone surrogate. */
static const char *text_of(PyObject *object)
{
    Py_ssize_t length;
    const char *text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &length) : NULL;
    PyErr_Clear();
    return text && strlen(text) == (size_t)length ? text : NULL;
}

/* Convert a value for C. Return 0, or 1 if C cannot represent it. */
static int show(mlvm_value *to, Value value)
{
    memset(to, 0, sizeof *to);
    if (value.kind == INTEGER) {
        to->kind = MLVM_INT;
        to->integer = value.as.integer;
        return 0;
    }
    if (value.kind == OBJECT) {
        to->kind = MLVM_STR;
        to->string = text_of(value.as.object);
        return !to->string;
    }
    to->kind = MLVM_TENSOR;
    to->tensor = shown(value.as.tensor);
    return 0;
}

int frame_enter(Frame *frame, const Host *host, const Value *params, int64_t count)
{
    if (count > frame->room || !frame->values) {
        mlvm_value *values = realloc(frame->values, sizeof *values * (size_t)(count + 4));
        if (!values)
            return 1;
        frame->values = values;
        frame->room = count + 4;
    }
    for (int64_t i = 0; i < count; i++)
        if (show(&frame->values[i], params[i]))
            return 1;
    frame->public.nparams = count;
    frame->public.params = frame->values;
    frame->public.attributes = host->text;
    pthread_mutex_lock(&frame->mutex);
    frame->host = host;
    frame->params = params;
    frame->nparams = count;
    frame->nresults = 0;
    frame->running = 1;
    pthread_mutex_unlock(&frame->mutex);
    return 0;
}

int frame_run(Frame *frame)
{
    const Host *host = frame->host;
    frame->status = host->function(&frame->public);
    pthread_mutex_lock(&frame->mutex);
    frame->running = 0;
    pthread_mutex_unlock(&frame->mutex);
    while (frame->new_tensors) {
        NewTensor *new_tensor = frame->new_tensors;
        frame->new_tensors = new_tensor->next;
        if (!--new_tensor->tensor->references)
            tensor_free(new_tensor->tensor);
        free(new_tensor);
    }
    int miscounted = host->nresults != MLVM_ANY && host->nresults != frame->nresults;
    return frame->failure || frame->status || miscounted ? -1 : 0;
}

const Value *frame_results(const Frame *frame, int64_t *count)
{
    *count = frame->nresults;
    return frame->results;
}

static void drop_results(Frame *frame)
{
    while (frame->nresults)
        drop_value(frame->results[--frame->nresults]);
}

void frame_raise(Frame *frame)
{
    PyObject *failure = frame->failure;
    frame->failure = NULL;
    /* `end` raises the error */
    Py_XDECREF(PyObject_CallMethod(frame->host->helper, "end", "OiL", failure ? failure : Py_None,
                                   frame->status, (long long)frame->nresults));
    Py_XDECREF(failure);
    drop_results(frame);
}

/* --- a call from Python --- */

typedef struct {
    PyObject_HEAD PyObject *spec; /* owner of the objects that `host` borrows */
    Host *host;
    Types types;
    int running; /* number of running calls, which may have values of these types */
} Caller;

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"host", NULL};
    PyObject *spec;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:Caller", names, &PyTuple_Type, &spec))
        return NULL;
    Caller *self = (Caller *)object_of(type);
    if (!self)
        return NULL;
    self->spec = Py_NewRef(spec);
    if (types_init(&self->types) || !(self->host = host_new(spec)))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void caller_dealloc(Caller *self)
{
    host_free(self->host);
    types_clear(&self->types);
    Py_XDECREF(self->spec);
    free_object((PyObject *)self);
}

/* Return the results as a list, and release them; NULL with an exception set. */
static PyObject *list_of_results(Frame *frame)
{
    PyObject *list = list_of_values(frame->results, frame->nresults);
    drop_results(frame);
    return list;
}

static PyObject *call_on(Caller *self, Frame *frame, const Value *params, PyObject *args_list)
{
    if (frame_enter(frame, self->host, params, PyList_Size(args_list)))
        return PyObject_CallMethod(self->host->helper, "refuse", "(O)", args_list);
    int failed;
    Py_BEGIN_ALLOW_THREADS failed = frame_run(frame);
    Py_END_ALLOW_THREADS if (!failed) return list_of_results(frame);
    frame_raise(frame);
    return NULL;
}

/* caller(params) -> list of results */
static PyObject *caller_call(Caller *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"params", NULL};
    PyObject *args_list, *results = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:Caller", names, &args_list))
        return NULL;
    args_list = PySequence_List(args_list);
    Py_ssize_t count = args_list ? PyList_Size(args_list) : 0, nvalues = 0;
    Value *params = args_list ? PyMem_Calloc((size_t)count + 1, sizeof *params) : NULL;
    if (!self->running && types_count(&self->types) > MOST_KEPT)
        types_forget(&self->types);
    Frame *frame = params ? frame_take(&self->types) : NULL;
    if (args_list && !params)
        PyErr_NoMemory();
    Py_INCREF((PyObject *)self);
    self->running++;
    while (
        frame && nvalues < count &&
        !value_of(&self->types, self->host->helper, PyList_GetItem(args_list, nvalues), &params[nvalues]))
        nvalues++;
    if (frame && nvalues == count)
        results = call_on(self, frame, params, args_list);
    if (frame)
        frame_give(frame);
    while (nvalues)
        drop_value(params[--nvalues]);
    PyMem_Free(params);
    Py_XDECREF(args_list);
    self->running--;
    Py_DECREF((PyObject *)self);
    return results;
}

static PyType_Slot caller_slots[] = {{Py_tp_new, caller_new},
                                     {Py_tp_dealloc, caller_dealloc},
                                     {Py_tp_call, caller_call},
                                     {Py_tp_doc, "Caller(host): calls a function in C for Python."},
                                     {0, NULL}};
static PyType_Spec caller_spec = {"mlvm.machines.native._native.Caller", sizeof(Caller), 0,
                                  Py_TPFLAGS_DEFAULT, caller_slots};

int host_init(PyObject *module)
{
    return add_type(module, "Caller", &caller_spec) ? 0 : -1;
}
