/* The machine's loop, without the interpreter lock where a program is long.
 *
 * It runs what `loop.py` prepares from the steps of the linker, and does what
 * `mlvm.core.machine.run` does with them. It explains nothing: whatever is out of the ordinary ends
 * it with the state of the machine, and the reference loop goes on from there, or says what is
 * wrong. Host functions in C are called from here (host.c); those in Python, and kernels without a
 * planner, are called back. Nobody has verified a raw machine's program: what would leave the stack is
 * left to the reference loop.
 *
 * Whoever changes the function table counts that in its `version`. Before each function the loop
 * looks at the count, without the interpreter lock, and ends if it is another. That is enough:
 * a change needs the VM's own lock, which the launch has, so it comes from this thread: from a host
 * function, however it has come back to Python, or from a signal handler.
 *
 * A call that takes its parameters from the stack remembers, for the types it has met, the kernel call to
 * run and the type of the result. Other types ask Python once.
 */
#include "loop.h"

#include "../plan/bound.h"
#include "call.h"
#include "host.h"
#include "value.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The steps that this loop knows, by the names of mlvm/core/machine/link.py, and two of its own: RUN, a
 * kernel on parameters with addresses that are known, and BACK, back to Python with no parameters and no
 * results. Python has their numbers from here. */
#define STEPS(X)                                                                         \
    X(UNKNOWN) X(HALT) X(LOAD_ARG) X(CALL) X(PUSH) X(GET) X(SET) X(JUMP_IF_FALSE) X(JUMP) \
    X(CALL_FUNCTION) X(RETURN) X(POP) X(LOAD_GLOBAL) X(STORE_GLOBAL) X(RUN) X(BACK)
enum Code { STEPS(NAME) };

enum { MOST_CASES = 8, MOST_TYPES = 32, MOST_DEPTH = 10000, ALL = -1 };
#define MOST_VALUES (1 << 22) /* on the stack of a launch that has limits */
#define VALUE_COUNTS 56       /* as so many bytes, here or as an object of Python's list */
#define FRAME_COUNTS 128
#define ANYWHERE UINT32_MAX /* parameter may lie anywhere over others */

/* Nanoseconds of estimated work until the clock is read, and by the clock till Python may handle
 * signals; what a jump and a call of a function in C count for. */
#define TILL_CLOCK 100000
#define TILL_SIGNALS 50000000
#define JUMP_WORK 5
#define HOST_WORK 25000

/* What a call does for parameters of certain types. */
typedef struct {
    TypeObject *types[MOST_TYPES]; /* of `count` parameters */
    int count;
    KernelCallObject *call; /* the case's own; NULL: Python calls the function */
    TypeObject *out;  /* of the result it makes; NULL if it writes to its first parameters */
    int nwrites;
    uint32_t over[MOST_TYPES]; /* for each it writes, which others it may lie exactly over */
} Case;

typedef struct {
    int code;
    int number;
    int nparams;
    int ncases;
    unsigned next_case;
    BoundCall bound;  /* RUN */
    PyObject *object; /* what to call, or a constant */
    Value value;      /* PUSH */
    Case *cases;      /* CALL */
    Host *host;       /* CALL of a host function */
} Step;

typedef struct {
    Step *steps;
    int count;
    int *starts, *ends; /* the pcs that each step was made of */
} Function;

typedef struct {
    PyObject_HEAD
    Function *functions;
    int nfunctions;
    int straight;        /* only RUN steps, then HALT: no state but the pc */
    BoundCall *bound;    /* of these steps, `nbound` of them */
    int nbound;
    int64_t scratch, shared;
    double work;
    PyObject *kept;      /* a list of all Python objects that steps refer to */
    Types types;
    int running; /* launches within each other */
    int has_c; /* whether it calls functions in C */
    const int64_t *version; /* of the function table */
    PyObject *arguments; /* a tuple of the types of the launch's arguments */
} ProgramObject;

static PyTypeObject *program_type;
static PyObject *name_breathe, *name_load, *name_perform, *name_store;

/* --- preparing --- */

static int keep(ProgramObject *self, PyObject *object)
{
    return PyList_Append(self->kept, object);
}

static int fill_run(ProgramObject *self, Step *step, PyObject *call, PyObject *arrays)
{
    if (!is_kernel_call(call) || !PyTuple_Check(arrays))
        return PyErr_BadArgument(), -1;
    Py_ssize_t count = PyTuple_Size(arrays);
    step->bound.call = &((KernelCallObject *)call)->call;
    step->bound.p = PyMem_Calloc((size_t)count + 1, sizeof *step->bound.p);
    if (!step->bound.p)
        return PyErr_NoMemory(), -1;
    if (count != step->bound.call->nparams)
        return PyErr_BadArgument(), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (address_of(PyTuple_GetItem(arrays, i), &step->bound.p[i], NULL))
            return -1;
    if (step->bound.call->scratch > self->scratch)
        self->scratch = step->bound.call->scratch;
    if (step->bound.call->shared > self->shared)
        self->shared = step->bound.call->shared;
    self->work += step->bound.call->work;
    return keep(self, call) || keep(self, arrays) ? -1 : 0;
}

/* A constant: an int, a str, or a pair of an array and its type. */
static int fill_push(ProgramObject *self, Step *step, PyObject *value, PyObject *type)
{
    if (is_type(type)) {
        Tensor *tensor = PyMem_Calloc(1, sizeof *tensor);
        if (!tensor)
            return PyErr_NoMemory(), -1;
        step->value.kind = TENSOR;
        step->value.as.tensor = tensor;
        if (tensor_lend(tensor, value, (TypeObject *)type))
            return -1;
        return keep(self, value) || keep(self, type) ? -1 : 0;
    }
    if (PyLong_Check(value)) {
        int overflow = 0;
        long long integer = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (!overflow) {
            step->value.kind = INTEGER;
            step->value.as.integer = integer;
            return PyErr_Occurred() ? -1 : 0;
        }
    }
    step->value.kind = OBJECT;
    step->value.as.object = value;
    return keep(self, value);
}

static int fill_step(ProgramObject *self, Step *step, PyObject *given)
{
    PyObject *first, *second;
    if (!PyArg_ParseTuple(given, "iiOO", &step->code, &step->number, &first, &second))
        return -1;
    switch (step->code) {
    case RUN:
        return fill_run(self, step, first, second);
    case PUSH:
        self->straight = 0;
        return fill_push(self, step, first, second);
    case CALL:
        if (second != Py_None && (keep(self, second) || !(step->host = host_new(second))))
            return -1;
        if (step->host && step->host->function) {
            self->has_c = 1;
            self->work = WORTH_RELEASING; /* the function runs without the lock */
        }
        /* fall through */
    case BACK:
        self->straight = 0;
        step->object = first;
        return keep(self, first);
    case JUMP:
    case JUMP_IF_FALSE:
    case CALL_FUNCTION: {
        self->work = WORTH_RELEASING; /* who knows how long */
        long nparams = PyLong_AsLong(first);
        if (nparams > INT_MAX || nparams < INT_MIN)
            PyErr_SetNone(PyExc_OverflowError);
        step->nparams = (int)nparams;
        self->straight = 0;
        return PyErr_Occurred() ? -1 : 0;
    }
    case LOAD_ARG:
        if (step->number < 0 || step->number >= PyTuple_Size(self->arguments))
            step->code = UNKNOWN;
        /* fall through */
    default:
        self->straight = self->straight && step->code == HALT;
        return PyErr_Occurred() ? -1 : 0;
    }
}

static int *numbers(PyObject *list, Py_ssize_t count)
{
    int *values = PyMem_Calloc((size_t)count + 1, sizeof *values);
    if (!values)
        return PyErr_NoMemory(), NULL;
    for (Py_ssize_t i = 0; i < count; i++)
        values[i] = (int)PyLong_AsLong(PyList_GetItem(list, i));
    return values;
}

static int fill_function(ProgramObject *self, Function *function, PyObject *given)
{
    PyObject *steps, *starts, *ends;
    if (!PyArg_ParseTuple(given, "O!O!O!", &PyList_Type, &steps, &PyList_Type, &starts,
                          &PyList_Type, &ends))
        return -1;
    Py_ssize_t count = PyList_Size(steps);
    if (PyList_Size(starts) != count || PyList_Size(ends) != count)
        return PyErr_BadArgument(), -1;
    function->steps = PyMem_Calloc((size_t)count + 1, sizeof *function->steps);
    if (!function->steps)
        return PyErr_NoMemory(), -1;
    function->count = (int)count;
    function->starts = numbers(starts, count);
    function->ends = numbers(ends, count);
    if (PyErr_Occurred())
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (fill_step(self, &function->steps[i], PyList_GetItem(steps, i)))
            return -1;
    return 0;
}

/* The calls of a straight program, side by side. Returns 0, or -1 with an exception set. */
static int bind_all(ProgramObject *self)
{
    const Function *main = &self->functions[0];
    self->bound = PyMem_Calloc((size_t)main->count + 1, sizeof *self->bound);
    if (!self->bound)
        return PyErr_NoMemory(), -1;
    for (; main->steps[self->nbound].code == RUN; self->nbound++)
        self->bound[self->nbound] = main->steps[self->nbound].bound;
    return 0;
}

/* Program(functions, arguments, version): each function is a triple of lists: steps, starts, ends;
 * main is the first. A step is (code, number, object, object). `version` is that of the function
 * table: an array, which tells it at any time. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"functions", "arguments", "version", NULL};
    PyObject *functions, *arguments, *version;
    char *address;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O:Program", names, &PyList_Type, &functions,
                                     &PyTuple_Type, &arguments, &version) ||
        address_of(version, &address, NULL))
        return NULL;
    ProgramObject *self = (ProgramObject *)object_of(type);
    if (!self)
        return NULL;
    Py_ssize_t count = PyList_Size(functions);
    Py_INCREF(arguments);
    self->arguments = arguments;
    self->version = (const int64_t *)address;
    self->straight = 1;
    self->kept = PyList_New(0);
    self->functions = PyMem_Calloc((size_t)count + 1, sizeof *self->functions);
    if (!self->kept || types_init(&self->types) || keep(self, version))
        goto failed;
    if (!self->functions) {
        PyErr_NoMemory();
        goto failed;
    }
    self->nfunctions = (int)count;
    for (Py_ssize_t i = 0; i < count; i++)
        if (fill_function(self, &self->functions[i], PyList_GetItem(functions, i)))
            goto failed;
    if (self->straight && bind_all(self))
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int program_traverse(ProgramObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->kept);
    Py_VISIT(self->types.kept);
    return 0;
}

/* It may be part of a cycle: a host function refers to its VM, which keeps its programs. */
static int program_clear(ProgramObject *self)
{
    Py_CLEAR(self->kept);
    return 0;
}

/* Forget what calls were resolved to, and the types that they were resolved for. */
static void forget_cases(ProgramObject *self)
{
    for (int f = 0; f < self->nfunctions; f++)
        for (int i = 0; i < self->functions[f].count; i++) {
            Step *step = &self->functions[f].steps[i];
            while (step->ncases) {
                PyObject *call = (PyObject *)step->cases[--step->ncases].call;
                step->cases[step->ncases].call = NULL;
                Py_XDECREF(call);
            }
            step->next_case = 0;
        }
    types_forget(&self->types);
}

static void program_dealloc(ProgramObject *self)
{
    PyObject_GC_UnTrack(self);
    forget_cases(self);
    for (int f = 0; f < self->nfunctions; f++) {
        Function *function = &self->functions[f];
        for (int i = 0; i < function->count; i++) {
            Step *step = &function->steps[i];
            PyMem_Free(step->bound.p);
            PyMem_Free(step->cases);
            host_free(step->host);
            if (step->code == PUSH && step->value.kind == TENSOR)
                PyMem_Free(step->value.as.tensor);
        }
        PyMem_Free(function->steps);
        PyMem_Free(function->starts);
        PyMem_Free(function->ends);
    }
    PyMem_Free(self->functions);
    PyMem_Free(self->bound);
    Py_XDECREF(self->kept);
    types_clear(&self->types);
    Py_XDECREF(self->arguments);
    free_object((PyObject *)self);
}

/* --- a launch --- */

typedef struct {
    int function, pc, base, nparams;
} Return;

/* The machine while it runs. */
typedef struct {
    ProgramObject *program;
    PoolObject *pool;
    PyObject *helper;     /* what Python does for the loop: `loop.Helper` */
    PyThreadState *saved; /* NULL while this thread has the interpreter lock */
    int releases;
    int was_busy;         /* the pool, when the lock was released */
    int64_t version;
    Frame *frame;         /* for functions in C */
    Value *stack;
    int64_t top, room;
    Return *frames;
    int64_t depth, frames_room;
    int64_t counted; /* bytes of stack and frames, as made */
    Tensor *arguments;
    int function, pc, base, nparams, since;
    int64_t left; /* instructions that the launch may still take; -1: any number */
    int64_t worked; /* nanoseconds of estimated work since the clock was read */
    int64_t looked; /* at signals: when, by the clock */
} Machine;

static void hold(Machine *m)
{
    if (m->saved) {
        PyEval_RestoreThread(m->saved);
        m->saved = NULL;
        m->pool->busy = m->was_busy;
    }
}

static void release(Machine *m)
{
    if (m->releases && !m->saved) {
        m->was_busy = m->pool->busy; /* a function in C may have come back to Python and here */
        m->pool->busy = process_number();
        m->saved = PyEval_SaveThread();
    }
}

static void drop(Machine *m, Value value)
{
    if (value.kind == INTEGER || (value.kind == TENSOR && --value.as.tensor->references))
        return;
    if (value.kind == TENSOR && !value.as.tensor->array) {
        tensor_free(value.as.tensor);
        return;
    }
    int held = !m->saved;
    hold(m);
    if (value.kind == TENSOR)
        tensor_free(value.as.tensor);
    else
        Py_DECREF(value.as.object);
    if (!held)
        release(m);
}

static Value another(Machine *m, Value value)
{
    if (value.kind == TENSOR)
        value.as.tensor->references++;
    else if (value.kind == OBJECT) {
        int held = !m->saved;
        hold(m);
        Py_INCREF(value.as.object);
        if (!held)
            release(m);
    }
    return value;
}

static void drop_all(Machine *m, int64_t first)
{
    while (m->top > first)
        drop(m, m->stack[--m->top]);
}

/* Room for so many more values. Returns 0, or -1. */
static int make_room(Machine *m, int64_t count)
{
    int64_t room = m->room;
    while (m->top + count > room)
        room *= 2;
    if (room == m->room)
        return 0;
    int64_t more = VALUE_COUNTS * (room - m->room);
    if (is_limited() && (room > MOST_VALUES || !count_made(more)))
        return -1;
    m->counted += is_limited() ? more : 0;
    Value *stack = realloc(m->stack, sizeof *stack * (size_t)room);
    if (!stack)
        return -1;
    m->stack = stack;
    m->room = room;
    return 0;
}

/* Whether the stack has as many values as it may; then an exception is set. */
static int is_full(Machine *m)
{
    if (!is_limited())
        return 0;
    hold(m);
    PyErr_SetString(PyExc_MemoryError, "more values lie on the stack than a launch may hold");
    return 1;
}

/* Room for one more frame. Returns 0, or -1. */
static int grow(Machine *m)
{
    int64_t more = FRAME_COUNTS * m->frames_room;
    if (is_limited() && !count_made(more))
        return -1;
    m->counted += is_limited() ? more : 0;
    Return *frames = realloc(m->frames, sizeof *frames * (size_t)(m->frames_room * 2));
    if (!frames)
        return -1;
    m->frames = frames;
    m->frames_room *= 2;
    return 0;
}

/* The values from `first` to the top as a list; NULL with an exception set. */
static PyObject *objects_of(Machine *m, int64_t first)
{
    PyObject *list = PyList_New((Py_ssize_t)(m->top - first));
    for (int64_t i = first; list && i < m->top; i++) {
        PyObject *object = object_of_value(m->stack[i]);
        if (!object || PyList_SetItem(list, (Py_ssize_t)(i - first), object))
            Py_CLEAR(list);
    }
    return list;
}

/* Push a value that Python has made. Returns 0, or -1 with an exception set. */
static int push_object(Machine *m, PyObject *object)
{
    Value value;
    if (make_room(m, 1))
        return PyErr_NoMemory(), -1;
    if (value_of(&m->program->types, m->helper, object, &value))
        return -1;
    m->stack[m->top++] = value;
    return 0;
}

/* --- calls --- */

/* Whether somebody has changed the function table since the launch began. */
static int changed(const Machine *m)
{
    return *(const volatile int64_t *)m->program->version != m->version;
}

/* Put the topmost `count` values in the place of those below, from `first` on. */
static void replace(Machine *m, int64_t first, int64_t count)
{
    int64_t from = m->top - count;
    for (int64_t i = first; i < from; i++)
        drop(m, m->stack[i]);
    memmove(m->stack + first, m->stack + from, sizeof *m->stack * (size_t)count);
    m->top = first + count;
}

/* What Python makes of a call on these parameters. */
static PyObject *call_in_python(const Step *step, PyObject *params)
{
    const Host *host = step->host;
    if (host && (host->nparams == MLVM_ANY || host->nparams == PyList_Size(params)))
        return PyObject_CallFunctionObjArgs(host->call, params, host->attributes, NULL);
    return PyObject_CallMethodObjArgs(step->object, name_perform, params, NULL);
}

/* Let Python call the function on the parameters from `first` on. Returns 0, or -1 with an exception
 * set, the stack unchanged. Leaves the lock held. */
static int call_back(Machine *m, const Step *step, int64_t first)
{
    hold(m);
    PyObject *params = objects_of(m, first);
    PyObject *results = params ? call_in_python(step, params) : NULL;
    Py_XDECREF(params);
    if (results && !PyList_Check(results)) {
        PyObject *list = PySequence_List(results);
        Py_DECREF(results);
        results = list;
    }
    if (!results)
        return -1;
    int64_t before = m->top;
    Py_ssize_t count = PyList_Size(results);
    const Host *host = step->host;
    if (host && host->nresults != MLVM_ANY && host->nresults != count)
        Py_XDECREF(PyObject_CallMethod(host->asked, "end", "Oin", Py_None, 0, count));
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < count; i++)
        push_object(m, PyList_GetItem(results, i));
    Py_DECREF(results);
    if (PyErr_Occurred()) {
        drop_all(m, before);
        return -1;
    }
    replace(m, first, count);
    return 0;
}

/* A kernel without a planner. Returns as `call_back` does. */
static int call_kernel(Machine *m, const Step *step)
{
    hold(m);
    PyObject *none = PyObject_CallNoArgs(step->object);
    if (!none)
        return -1;
    Py_DECREF(none);
    return 0;
}

/* A function in C. Returns as `call_back` does. */
static int call_c(Machine *m, const Step *step, int64_t first)
{
    const Host *host = step->host;
    int64_t count = m->top - first;
    if (host->nparams != MLVM_ANY && host->nparams != count)
        return call_back(m, step, first);
    for (int64_t i = first; i < m->top; i++)
        if (m->stack[i].kind == OBJECT)
            hold(m);
    if (frame_enter(m->frame, host, m->stack + first, count))
        return call_back(m, step, first);
    release(m);
    m->worked += HOST_WORK;
    if (frame_run(m->frame)) {
        hold(m);
        frame_raise(m->frame);
        return -1;
    }
    int64_t left;
    const Value *results = frame_results(m->frame, &left);
    if (make_room(m, left)) {
        hold(m);
        for (int64_t i = 0; i < left; i++)
            drop(m, results[i]);
        return PyErr_NoMemory(), -1;
    }
    if (left)
        memcpy(m->stack + m->top, results, sizeof *results * (size_t)left);
    m->top += left;
    replace(m, first, left);
    return 0;
}

static Case *find_case(const Step *step, const Value *params, int count)
{
    for (int i = 0; i < step->ncases; i++) {
        Case *known = &step->cases[i];
        int j = 0;
        while (j < count && known->types[j] == params[j].as.tensor->type)
            j++;
        if (j == count && known->count == count)
            return known;
    }
    return NULL;
}

/* Ask Python what to do for parameters of these types. NULL with an exception set. */
static Case *new_case(Machine *m, Step *step, const Value *params, int count)
{
    if (!step->cases) {
        step->cases = PyMem_Calloc(MOST_CASES, sizeof *step->cases);
        if (!step->cases)
            return (Case *)PyErr_NoMemory();
    }
    PyObject *types = PyList_New(0);
    for (int i = 0; types && i < count; i++)
        if (PyList_Append(types, (PyObject *)params[i].as.tensor->type))
            Py_CLEAR(types);
    PyObject *answer = types ? PyObject_CallMethod(step->object, "resolve", "O", types) : NULL;
    Py_XDECREF(types);
    if (!answer)
        return NULL;
    PyObject *call, *out, *over;
    Case found = {.count = count};
    int bad = !PyArg_ParseTuple(answer, "OOO!", &call, &out, &PyTuple_Type, &over);
    found.nwrites = bad ? 0 : (int)PyTuple_Size(over);
    bad = bad || found.nwrites > count;
    for (int i = 0; !bad && i < found.nwrites; i++)
        found.over[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(over, i));
    bad = bad || PyErr_Occurred();
    if (!bad && call != Py_None) {
        found.call = (KernelCallObject *)call;
        const KernelCall *its = &found.call->call;
        bad = !is_kernel_call(call);
        if (!bad && out != Py_None) {
            bad = !is_type(out) || types_keep(&m->program->types, out);
            found.out = (TypeObject *)out;
        }
        if (!bad && pool_reserve(m->pool->pool, its->scratch, its->shared))
            PyErr_NoMemory(), bad = 1;
        if (!bad)
            Py_INCREF(call);
    }
    Py_DECREF(answer);
    if (bad) {
        if (!PyErr_Occurred())
            PyErr_BadArgument();
        return NULL;
    }
    for (int i = 0; i < count; i++)
        found.types[i] = params[i].as.tensor->type;
    int place = step->next_case++ % MOST_CASES;
    if (step->ncases < MOST_CASES)
        step->ncases++;
    PyObject *old = (PyObject *)step->cases[place].call;
    step->cases[place] = found;
    Py_XDECREF(old);
    return &step->cases[place];
}

/* Whether a result would overwrite an operand, another result, or a constant. */
static int collides(const Case *known, const Value *params, int count)
{
    for (int i = 0; i < known->nwrites; i++) {
        const Tensor *out = params[i].as.tensor;
        if (out->constant)
            return 1;
        for (int j = 0; known->over[i] != ANYWHERE && j < count; j++) {
            const Tensor *x = params[j].as.tensor;
            if (j != i && out->address < x->address + x->type->nbytes &&
                x->address < out->address + out->type->nbytes &&
                (out->address != x->address || !(known->over[i] >> j & 1)))
                return 1;
        }
    }
    return 0;
}

/* A function of the table, on the parameters from `first` on. Returns as `call_back` does, and 1
 * for values that the kernel refuses, or without memory: nothing has happened then. */
static int call_function(Machine *m, Step *step, int64_t first)
{
    if (step->host)
        return step->host->function ? call_c(m, step, first) : call_back(m, step, first);
    int count = (int)(m->top - first);
    Value *params = m->stack + first;
    for (int i = 0; i < count; i++)
        if (count > MOST_TYPES || params[i].kind != TENSOR)
            return call_back(m, step, first);
    Case *known = find_case(step, params, count);
    if (!known) {
        hold(m);
        known = new_case(m, step, params, count);
        if (!known)
            return -1;
    }
    if (!known->call || collides(known, params, count))
        return call_back(m, step, first);
    char *p[MOST_TYPES + 2]; /* the result's, the parameters', shared bytes */
    Tensor *out = NULL;
    if (known->out) {
        out = tensor_new(known->out);
        if (!out)
            return 1; /* the reference loop says how much was wanted */
        p[0] = out->address;
    }
    for (int i = 0; i < count; i++)
        p[i + (out != NULL)] = params[i].as.tensor->address;
    m->worked += (int64_t)known->call->call.work;
    if (pool_run(m->pool->pool, &known->call->call, p)) {
        if (out)
            tensor_free(out);
        return 1;
    }
    drop_all(m, first);
    if (out) {
        m->stack[m->top].kind = TENSOR;
        m->stack[m->top++].as.tensor = out;
    }
    return 0;
}

/* Whether a value counts as true. -1 for one that is no condition. */
static int truth(Value value)
{
    if (value.kind == INTEGER)
        return value.as.integer != 0;
    if (value.kind == OBJECT)
        return PyLong_Check(value.as.object) ? 1 : -1; /* of more than 64 bits */
    const Tensor *x = value.as.tensor;
    if (x->type->size != 1)
        return -1;
    const float *single = (const float *)x->address;
    const double *twice = (const double *)x->address;
    switch (x->type->dtype) {
    case MLVM_F32:
        return *single != 0;
    case MLVM_F64:
        return *twice != 0;
    case MLVM_F16:
    case MLVM_BF16:
        return (*(const uint16_t *)x->address & 0x7FFF) != 0; /* of zeros of both signs, none */
    case MLVM_C64:
        return single[0] != 0 || single[1] != 0;
    case MLVM_C128:
        return twice[0] != 0 || twice[1] != 0;
    default:
        for (long long i = 0; i < x->type->nbytes; i++)
            if (x->address[i])
                return 1;
        return 0;
    }
}

/* Count the instructions of the steps since .. pc - 1. Returns whether too few are left. */
static int spend(Machine *m, const Function *function, int pc)
{
    if (m->left >= 0) {
        int64_t taken = function->ends[pc - 1] - function->starts[m->since] + 1;
        if (taken > m->left)
            return 1;
        m->left -= taken;
    }
    return 0;
}

static int64_t now(void)
{
    struct timespec time;
    timespec_get(&time, TIME_UTC);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int look_at_clock(Machine *m)
{
    m->worked = 0;
    int64_t time = now();
    if (!m->looked || (time >= m->looked && time < m->looked + TILL_SIGNALS)) {
        m->looked = m->looked ? m->looked : time;
        return 0;
    }
    m->looked = time;
    hold(m);
    PyObject *breathed =
        PyErr_CheckSignals() ? NULL : PyObject_CallMethodObjArgs(m->helper, name_breathe, NULL);
    Py_XDECREF(breathed);
    release(m);
    return breathed ? 0 : -1;
}

/* From time to time, let Python handle signals, and raise what another thread has for this one.
 * Returns -1 with an exception set. */
static inline int look_up(Machine *m)
{
    return m->worked < TILL_CLOCK ? 0 : look_at_clock(m);
}

static int load_global(Machine *m, int64_t handle)
{
    hold(m);
    PyObject *number = PyLong_FromLongLong(handle);
    PyObject *array = number ? PyObject_CallMethodObjArgs(m->helper, name_load, number, NULL) : NULL;
    Py_XDECREF(number);
    int failed = array ? push_object(m, array) : -1;
    Py_XDECREF(array);
    return failed;
}

static int store_global(Machine *m, int64_t handle, Tensor *tensor)
{
    hold(m);
    PyObject *array = tensor_array(tensor), *number = PyLong_FromLongLong(handle);
    PyObject *done = array && number
                         ? PyObject_CallMethodObjArgs(m->helper, name_store, number, array, NULL)
                         : NULL;
    Py_XDECREF(array);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* --- the loop --- */

/* A straight program. Returns the step whose values its kernel refuses or that is none, or with an
 * exception set the one that was interrupted; -1 if it has ended. */
static int run_straight(Machine *m)
{
    const ProgramObject *program = m->program;
    int next = 0;
    m->worked = (int64_t)program->work;
    while (!look_up(m)) {
        double most = TILL_CLOCK;
        if (run_bound(m->pool->pool, program->bound, program->nbound, &next, &most))
            break;
        if (next == program->nbound)
            return program->functions[0].steps[next].code == HALT ? -1 : next;
        m->worked = TILL_CLOCK;
    }
    return next;
}

/* Run until `halt`: returns 1. Returns 0 where the reference loop is to go on: `function` and `pc`
 * say with which step. Returns -1 with an exception set, of that step. */
static int run(Machine *m)
{
    Function *functions = m->program->functions, *function = &functions[m->function];
    Step *step;
    int pc = m->pc, outcome;
    int64_t first, slot;
#define TOP(i) m->stack[m->top - 1 - (i)]
#define STOP(result)                                                                     \
    do {                                                                                 \
        m->pc = pc - 1;                                                                  \
        return result;                                                                   \
    } while (0)
#define NEED(condition)                                                                  \
    do {                                                                                 \
        if (!(condition))                                                                \
            STOP(0);                                                                     \
    } while (0)
#define CALLED(result)                                                                   \
    do {                                                                                 \
        outcome = look_up(m) ? -1 : changed(m) ? 1 : (result);                           \
        if (outcome)                                                                     \
            STOP(outcome < 0 ? -1 : 0);                                                  \
        release(m);                                                                      \
    } while (0)
#define GO_TO(target)                                                                    \
    do {                                                                                 \
        m->since = pc = (target);                                                        \
        m->worked += JUMP_WORK;                                                          \
        if (look_up(m)) {                                                                \
            pc++;                                                                        \
            STOP(-1);                                                                    \
        }                                                                                \
    } while (0)
    for (;;) {
        step = &function->steps[pc++];
        if (m->top == m->room && make_room(m, 1))
            STOP(-is_full(m));
        switch (step->code) {
        case RUN:
            m->worked += (int64_t)step->bound.call->work;
            if (look_up(m))
                STOP(-1);
            if (changed(m) || pool_run(m->pool->pool, step->bound.call, step->bound.p))
                STOP(0);
            break;
        case CALL:
            first = step->number == ALL ? m->base : m->top - step->number;
            NEED(first >= 0 && first <= m->top);
            CALLED(call_function(m, step, first));
            break;
        case BACK:
            CALLED(call_kernel(m, step));
            break;
        case LOAD_ARG:
            m->stack[m->top].kind = TENSOR;
            m->stack[m->top++].as.tensor = &m->arguments[step->number];
            m->arguments[step->number].references++;
            break;
        case PUSH:
            if (step->value.kind == INTEGER)
                m->stack[m->top] = step->value;
            else
                m->stack[m->top] = another(m, step->value);
            m->top++;
            break;
        case GET:
            slot = (int64_t)m->base + step->number;
            NEED(slot >= 0 && slot < m->top);
            m->stack[m->top] = another(m, m->stack[slot]);
            m->top++;
            break;
        case SET: {
            slot = (int64_t)m->base + step->number;
            NEED(slot >= 0 && slot < m->top - 1);
            Value old = m->stack[slot];
            m->stack[slot] = TOP(0);
            m->top--;
            drop(m, old);
            break;
        }
        case POP:
            NEED(step->number <= m->top);
            drop_all(m, m->top - step->number);
            break;
        case JUMP_IF_FALSE:
            NEED(m->top);
            outcome = truth(TOP(0));
            NEED(outcome >= 0);
            if (!outcome && spend(m, function, pc))
                STOP(0);
            drop(m, TOP(0));
            m->top--;
            if (!outcome)
                GO_TO(step->number);
            break;
        case JUMP:
            if (spend(m, function, pc))
                STOP(0);
            GO_TO(step->number);
            break;
        case CALL_FUNCTION:
            if (m->depth >= MOST_DEPTH || (m->depth == m->frames_room && grow(m)) ||
                spend(m, function, pc))
                STOP(0);
            m->frames[m->depth++] = (Return){m->function, pc, m->base, m->nparams};
            m->function = step->number;
            m->base = (int)m->top;
            m->nparams = step->nparams;
            function = &functions[m->function];
            m->since = pc = 0;
            break;
        case RETURN: {
            first = (int64_t)m->base - m->nparams;
            NEED(m->depth && first >= 0 && step->number >= 0 && m->top - step->number >= first);
            if (spend(m, function, pc))
                STOP(0);
            Return back = m->frames[--m->depth];
            replace(m, first, step->number);
            m->function = back.function;
            m->base = back.base;
            m->nparams = back.nparams;
            function = &functions[m->function];
            GO_TO(back.pc);
            break;
        }
        case LOAD_GLOBAL: {
            NEED(m->top && TOP(0).kind == INTEGER);
            if (load_global(m, TOP(0).as.integer))
                STOP(-forgive());
            m->top--;
            m->stack[m->top - 1] = m->stack[m->top];
            release(m);
            break;
        }
        case STORE_GLOBAL:
            NEED(m->top > 1 && TOP(0).kind == INTEGER && TOP(1).kind == TENSOR);
            if (store_global(m, TOP(0).as.integer, TOP(1).as.tensor))
                STOP(-forgive());
            drop_all(m, m->top - 2);
            release(m);
            break;
        case HALT:
            NEED(m->base <= m->top);
            if (spend(m, function, pc))
                STOP(0);
            return 1;
        default:
            STOP(0);
        }
    }
}

/* What the reference loop needs to go on: (stack, frames, function, pc, base, nparams, left,
 * since, exception). */
static PyObject *state_of(Machine *m)
{
    PyObject *type = NULL, *error = NULL, *traceback = NULL;
    PyErr_Fetch(&type, &error, &traceback);
    if (type) {
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback)
            PyException_SetTraceback(error, traceback);
    }
    PyObject *stack = objects_of(m, 0), *frames = PyList_New(0), *state = NULL;
    for (int64_t i = 0; frames && i < m->depth; i++) {
        const Return *frame = &m->frames[i];
        PyObject *item =
            Py_BuildValue("iiii", frame->function, frame->pc, frame->base, frame->nparams);
        if (!item || PyList_Append(frames, item))
            Py_CLEAR(frames);
        Py_XDECREF(item);
    }
    if (stack && frames)
        state = Py_BuildValue("OOiiiiLiO", stack, frames, m->function, m->pc, m->base, m->nparams,
                              (long long)m->left, m->since, error ? error : Py_None);
    Py_XDECREF(stack);
    Py_XDECREF(frames);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    return state;
}

static int lend_arguments(Machine *m, PyObject *operands)
{
    PyObject *types = m->program->arguments;
    Py_ssize_t count = PyTuple_Size(types);
    if (!count)
        return 0;
    m->arguments = PyMem_Calloc((size_t)count, sizeof *m->arguments);
    if (!m->arguments)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (tensor_lend(&m->arguments[i], PyTuple_GetItem(operands, i),
                        (TypeObject *)PyTuple_GetItem(types, i)))
            return -1;
    return 0;
}

/* program.run(pool, helper, operands, left): a list of what is left on the stack, or the
 * state of the machine where the reference loop is to go on. */
static PyObject *program_run(ProgramObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !is_pool(args[0]) || !PyTuple_Check(args[2]) ||
        PyTuple_Size(args[2]) < PyTuple_Size(self->arguments) || !self->kept)
        return PyErr_Format(PyExc_TypeError, "run takes a pool, a helper, operands, left");
    Machine m = {.program = self, .pool = (PoolObject *)args[0], .helper = args[1],
                 .left = PyLong_AsLongLong(args[3]), .version = *self->version};
    PyObject *result = NULL;
    if (PyErr_Occurred())
        return NULL;
    if (pool_reserve(m.pool->pool, self->scratch, self->shared))
        return PyErr_NoMemory();
    m.releases = self->work >= WORTH_RELEASING;
    Py_INCREF((PyObject *)self); /* a host function may forget the program */
    if (self->straight && m.left < 0) {
        release(&m);
        m.pc = run_straight(&m);
        hold(&m);
        if (m.pc < 0) {
            Py_DECREF(self);
            Py_INCREF(Py_None);
            return Py_None;
        }
        result = state_of(&m);
        Py_DECREF(self);
        return result;
    }
    if (!self->running && types_count(&self->types) > MOST_KEPT)
        forget_cases(self);
    if (self->has_c && !(m.frame = frame_take(&self->types))) {
        Py_DECREF(self);
        return NULL;
    }
    self->running++;
    m.room = m.frames_room = 32;
    m.stack = malloc(sizeof *m.stack * (size_t)m.room);
    m.frames = malloc(sizeof *m.frames * (size_t)m.frames_room);
    if (!m.stack || !m.frames)
        PyErr_NoMemory();
    else if (!lend_arguments(&m, args[2])) {
        release(&m);
        int outcome = run(&m);
        hold(&m);
        result = outcome > 0 ? objects_of(&m, m.base) : state_of(&m);
    }
    drop_all(&m, 0);
    count_made(-m.counted);
    if (m.frame)
        frame_give(m.frame);
    free(m.stack);
    free(m.frames);
    PyMem_Free(m.arguments);
    self->running--;
    Py_DECREF(self);
    return result;
}

int program_is_straight(PyObject *object)
{
    if (!PyObject_TypeCheck(object, program_type))
        return 0;
    const ProgramObject *program = (const ProgramObject *)object;
    return program->straight && program->functions[0].steps[program->nbound].code == HALT;
}

int program_run_straight(PyObject *object, PoolObject *pool)
{
    ProgramObject *program = (ProgramObject *)object;
    Machine m = {.program = program, .pool = pool, .left = -1, .version = *program->version};
    if (pool_reserve(pool->pool, program->scratch, program->shared))
        return PyErr_NoMemory(), -1;
    m.releases = program->work >= WORTH_RELEASING;
    release(&m);
    int next = 0;
    double most = HUGE_VAL;
    int refused = run_bound(pool->pool, program->bound, program->nbound, &next, &most);
    hold(&m);
    return refused != 0;
}

static PyMethodDef program_methods[] = {
    {"run", (PyCFunction)(void (*)(void))program_run, METH_FASTCALL,
     "run(pool, helper, operands, left): see loop.py."},
    {NULL, NULL, 0, NULL}};
static PyMemberDef program_members[] = {
    {"straight", T_INT, offsetof(ProgramObject, straight), READONLY, NULL},
    {"work", T_DOUBLE, offsetof(ProgramObject, work), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot program_slots[] = {{Py_tp_new, program_new},
                                      {Py_tp_traverse, program_traverse},
                                      {Py_tp_clear, program_clear},
                                      {Py_tp_dealloc, program_dealloc},
                                      {Py_tp_methods, program_methods},
                                      {Py_tp_members, program_members},
                                      {Py_tp_doc, "A linked program, prepared for the loop."},
                                      {0, NULL}};
static PyType_Spec program_spec = {"mlvm.machines.native._native.Program", sizeof(ProgramObject), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, program_slots};

/* steps() -> dict: the number of each step that the loop knows */
static PyObject *get_steps(PyObject *module, PyObject *unused)
{
#define FORMAT(name) "si"
#define PAIR(name) , #name, name
    (void)module, (void)unused;
    return Py_BuildValue("{" STEPS(FORMAT) "}" STEPS(PAIR));
}

static PyMethodDef loop_functions[] = {
    {"steps", get_steps, METH_NOARGS, "The numbers of the steps that the loop knows."},
    {NULL, NULL, 0, NULL}};

int loop_init(PyObject *module)
{
    name_breathe = PyUnicode_InternFromString("breathe");
    name_load = PyUnicode_InternFromString("load");
    name_perform = PyUnicode_InternFromString("perform");
    name_store = PyUnicode_InternFromString("store");
    if (!name_breathe || !name_load || !name_perform || !name_store)
        return -1;
    program_type = add_type(module, "Program", &program_spec);
    if (!program_type || PyModule_AddIntConstant(module, "ANYWHERE", (long)ANYWHERE))
        return -1;
    return PyModule_AddFunctions(module, loop_functions);
}
