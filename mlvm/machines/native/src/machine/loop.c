/* The machine's loop (plan/loop.c) on programs of Python.
 *
 * In:       a Program, which `loop.py` prepares from the linker's steps; the arrays of a launch.
 * Out:      the outputs; or the state of the machine, from which the reference loop continues or
 *           raises the error. Must hold: arrays are contiguous and have the program's types; the
 *           function table has the program's
 *           version. A raw VM's program is not verified: the loop checks the stack itself.
 * Callers:  `NativeLoop.__call__`; lanes.c, for the programs of segments.
 * Locks:    the VM's lock. The interpreter lock is released where a program has enough work, and taken for
 *           callbacks: host functions in Python, kernels without a planner, signals. Host functions
 *           in C (host.c) run without it.
 */
#include "loop.h"

#include "../plan/turns.h"
#include "call.h"
#include "host.h"
#include "value.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_CASES = 8 };
#define MOST_VALUES (1 << 22) /* maximum stack of a launch with limits */
#define VALUE_COUNTS 56       /* bytes counted per value, as a C value or a Python object */
#define FRAME_COUNTS 128

/* Nanoseconds between checks for signals; estimated cost of a C function. */
#define TILL_SIGNALS 50000000
#define HOST_WORK 25000

/* Target of a step's call. */
typedef struct {
    PyObject *object; /* Python object to call */
    Host *host;       /* description of a host function */
    unsigned next_case;
} Callee;

typedef struct {
    PyObject_HEAD Function *functions;
    int nfunctions;
    int straight;     /* only RUN steps, then HALT: no state but the pc */
    BoundCall *bound; /* calls of these steps, `nbound` in number */
    int nbound;
    char **addresses; /* of the parameters of RUN steps */
    uint32_t *places; /* 0, 1, 2, ... */
    uint32_t naddresses;
    int64_t scratch, shared;
    double work;
    PyObject *keepalive; /* list of all Python objects that steps refer to */
    Types types;
    int running;            /* number of nested launches */
    int has_c;              /* whether it calls C functions */
    const int64_t *version; /* version of the function table */
    PyObject *arguments;    /* tuple of the types of the launch's arguments */
} ProgramObject;

static PyTypeObject *program_type;
static PyObject *name_check_signals, *name_load, *name_perform, *name_store;

/* --- preparation --- */

static int keep(ProgramObject *self, PyObject *object)
{
    return PyList_Append(self->keepalive, object);
}

/* Allocate the addresses of all RUN steps. Return 0, or -1 with an exception set. */
static int make_addresses(ProgramObject *self, PyObject *functions)
{
    size_t count = 0;
    for (Py_ssize_t f = 0; f < self->nfunctions; f++) {
        PyObject *steps = PySequence_GetItem(PyList_GetItem(functions, f), 0);
        for (Py_ssize_t i = 0; steps && i < PyList_Size(steps); i++) {
            PyObject *arrays = PyTuple_GetItem(PyList_GetItem(steps, i), 3);
            count += arrays && PyTuple_Check(arrays) ? (size_t)PyTuple_Size(arrays) : 0;
        }
        Py_XDECREF(steps);
        if (PyErr_Occurred())
            return -1;
    }
    self->addresses = PyMem_Calloc(count + 1, sizeof *self->addresses);
    self->places = count < UINT32_MAX ? PyMem_Calloc(count + 1, sizeof *self->places) : NULL;
    if (!self->addresses || !self->places)
        return PyErr_NoMemory(), -1;
    for (size_t i = 0; i < count; i++)
        self->places[i] = (uint32_t)i;
    return 0;
}

static int fill_run(ProgramObject *self, Step *step, PyObject *call, PyObject *arrays)
{
    if (!is_kernel_call(call) || !PyTuple_Check(arrays))
        return PyErr_BadArgument(), -1;
    Py_ssize_t count = PyTuple_Size(arrays);
    step->bound.call = &((KernelCallObject *)call)->call;
    step->bound.places = self->places + self->naddresses;
    if (count != step->bound.call->nparams || count > MOST_PARAMETERS)
        return PyErr_BadArgument(), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (address_of(PyTuple_GetItem(arrays, i), &self->addresses[self->naddresses++], NULL))
            return -1;
    if (step->bound.call->scratch > self->scratch)
        self->scratch = step->bound.call->scratch;
    if (step->bound.call->shared > self->shared)
        self->shared = step->bound.call->shared;
    self->work += step->bound.call->work;
    return keep(self, call) || keep(self, arrays) ? -1 : 0;
}

/* Set a constant: an int, a str, or a pair of an array and its type. */
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

static int fill_step(ProgramObject *self, Step *step, PyObject *spec)
{
    PyObject *first, *second;
    if (!PyArg_ParseTuple(spec, "iiOO", &step->code, &step->number, &first, &second))
        return -1;
    switch (step->code) {
    case RUN: return fill_run(self, step, first, second);
    case PUSH: self->straight = 0; return fill_push(self, step, first, second);
    case CALL:
    case BACK: {
        Callee *callee = PyMem_Calloc(1, sizeof *callee);
        if (!callee)
            return PyErr_NoMemory(), -1;
        step->callee = callee;
        callee->object = first;
        self->straight = 0;
        if (step->code == CALL && second != Py_None &&
            (keep(self, second) || !(callee->host = host_new(second))))
            return -1;
        step->foreign = callee->host != NULL;
        if (callee->host && callee->host->function) {
            self->has_c = 1;
            self->work = WORTH_RELEASING; /* the function runs without the interpreter lock */
        }
        return keep(self, first);
    }
    case JUMP:
    case JUMP_IF_FALSE:
    case CALL_FUNCTION: {
        self->work = WORTH_RELEASING; /* the duration is unknown */
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
    default: self->straight = self->straight && step->code == HALT; return PyErr_Occurred() ? -1 : 0;
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

static int fill_function(ProgramObject *self, Function *function, PyObject *spec)
{
    PyObject *steps, *starts, *ends;
    if (!PyArg_ParseTuple(spec, "O!O!O!", &PyList_Type, &steps, &PyList_Type, &starts, &PyList_Type, &ends))
        return -1;
    Py_ssize_t count = PyList_Size(steps);
    if (PyList_Size(starts) != count || PyList_Size(ends) != count)
        return PyErr_BadArgument(), -1;
    Step *filled = PyMem_Calloc((size_t)count + 1, sizeof *filled);
    if (!filled)
        return PyErr_NoMemory(), -1;
    function->steps = filled;
    function->count = (int)count;
    function->starts = numbers(starts, count);
    function->ends = numbers(ends, count);
    if (PyErr_Occurred())
        return -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (fill_step(self, &filled[i], PyList_GetItem(steps, i)))
            return -1;
    for (int i = 0; i < count; i++)
        if (filled[i].code == JUMP && filled[i].number >= 0 && filled[i].number < i)
            filled[i].turns = turns_new(function, i, self->addresses);
    return 0;
}

/* Collect the calls of a program without branches. Return 0, or -1 with an exception set. */
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

/* A program of empty functions. NULL with an exception set. */
static ProgramObject *new_program(PyTypeObject *type, Py_ssize_t nfunctions, PyObject *arguments,
                                  PyObject *version)
{
    char *address;
    ProgramObject *self = address_of(version, &address, NULL) ? NULL : (ProgramObject *)object_of(type);
    if (!self)
        return NULL;
    self->arguments = Py_NewRef(arguments);
    self->version = (const int64_t *)address;
    self->straight = 1;
    self->keepalive = PyList_New(0);
    self->functions = PyMem_Calloc((size_t)nfunctions + 1, sizeof *self->functions);
    self->nfunctions = self->functions ? (int)nfunctions : 0;
    if (!self->functions)
        PyErr_NoMemory();
    else if (self->keepalive && !types_init(&self->types) && !keep(self, version))
        return self;
    Py_DECREF(self);
    return NULL;
}

/* Program(functions, arguments, version): each function is a triple of lists: steps, starts,
 * ends; main is the first. A step is (code, number, object, object). `version` is an array with
 * the current version of the function table. */
static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"functions", "arguments", "version", NULL};
    PyObject *functions, *arguments, *version;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O:Program", names, &PyList_Type, &functions,
                                     &PyTuple_Type, &arguments, &version))
        return NULL;
    ProgramObject *self = new_program(type, PyList_Size(functions), arguments, version);
    int failed = !self || make_addresses(self, functions);
    for (Py_ssize_t i = 0; !failed && i < self->nfunctions; i++)
        failed = fill_function(self, &self->functions[i], PyList_GetItem(functions, i));
    if (!failed && !(self->straight && bind_all(self)))
        return (PyObject *)self;
    Py_XDECREF((PyObject *)self);
    return NULL;
}

static int program_traverse(ProgramObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->keepalive);
    Py_VISIT(self->types.keepalive);
    return 0;
}

/* A program may be part of a cycle: a host function refers to the VM, which keeps programs alive. */
static int program_clear(ProgramObject *self)
{
    Py_CLEAR(self->keepalive);
    return 0;
}

static PyObject *object_of_call(const KernelCall *call)
{
    return call ? (PyObject *)((char *)call - offsetof(KernelCallObject, call)) : NULL;
}

/* Discard cached calls and types. */
static void forget_cases(ProgramObject *self)
{
    for (int f = 0; f < self->nfunctions; f++)
        for (int i = 0; i < self->functions[f].count; i++) {
            Step *step = (Step *)&self->functions[f].steps[i];
            while (step->ncases) {
                PyObject *call = object_of_call(step->cases[--step->ncases].call);
                ((Case *)step->cases)[step->ncases].call = NULL;
                Py_XDECREF(call);
            }
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
            Step *step = (Step *)&function->steps[i];
            Callee *callee = (Callee *)step->callee;
            PyMem_Free((Case *)step->cases);
            host_free(callee ? callee->host : NULL);
            PyMem_Free(callee);
            turns_free(step->turns);
            if (step->code == PUSH && step->value.kind == TENSOR)
                PyMem_Free(step->value.as.tensor);
        }
        PyMem_Free((Step *)function->steps);
        PyMem_Free((int *)function->starts);
        PyMem_Free((int *)function->ends);
    }
    PyMem_Free(self->functions);
    PyMem_Free(self->bound);
    PyMem_Free(self->addresses);
    PyMem_Free(self->places);
    Py_XDECREF(self->keepalive);
    types_clear(&self->types);
    Py_XDECREF(self->arguments);
    free_object((PyObject *)self);
}

/* --- a launch --- */

/* State of the loop during a launch of a Python program. */
typedef struct {
    Machine m;
    ProgramObject *program;
    PoolObject *pool;
    PyObject *helper;     /* callbacks in Python: `loop.Helper` */
    PyThreadState *saved; /* NULL while this thread has the interpreter lock */
    int releases;
    int was_busy;    /* whether the pool was busy when the lock was released */
    Frame *frame;    /* frame for C functions */
    int64_t counted; /* bytes counted for stack and frames */
    int64_t looked;  /* time of the last check for signals */
} Launch;

static void hold(Launch *m)
{
    if (m->saved) {
        PyEval_RestoreThread(m->saved);
        m->saved = NULL;
        m->pool->busy = m->was_busy;
    }
}

static void release(Launch *m)
{
    if (m->releases && !m->saved) {
        m->was_busy = m->pool->busy; /* a C function may have re-entered Python and this loop */
        m->pool->busy = process_number();
        m->saved = PyEval_SaveThread();
    }
}

static void drop_last(Machine *machine, Value value)
{
    Launch *m = (Launch *)machine;
    if (value.kind == TENSOR && !value.as.tensor->array) {
        tensor_free(value.as.tensor);
        return;
    }
    int has_lock = !m->saved;
    hold(m);
    if (value.kind == TENSOR)
        tensor_free(value.as.tensor);
    else
        Py_DECREF((PyObject *)value.as.object);
    if (!has_lock)
        release(m);
}

static void keep_object(Machine *machine, Value value)
{
    Launch *m = (Launch *)machine;
    int has_lock = !m->saved;
    hold(m);
    Py_INCREF((PyObject *)value.as.object);
    if (!has_lock)
        release(m);
}

/* Grow the stack. Return 1 without memory, and -1 with an exception set if a limit is exceeded. */
static int more_values(Machine *machine, int64_t count)
{
    Launch *launch = (Launch *)machine;
    int64_t room = machine->room;
    while (machine->top + count > room)
        room *= 2;
    int64_t more = VALUE_COUNTS * (room - machine->room);
    if (is_limited() && (room > MOST_VALUES || !count_made(more))) {
        hold(launch);
        PyErr_SetString(PyExc_MemoryError, "the launch has too many values; nest fewer calls");
        return -1;
    }
    launch->counted += is_limited() ? more : 0;
    Value *stack = realloc(machine->stack, sizeof *stack * (size_t)room);
    if (!stack)
        return 1;
    machine->stack = stack;
    machine->room = room;
    return 0;
}

static int more_frames(Machine *machine)
{
    Launch *launch = (Launch *)machine;
    int64_t more = FRAME_COUNTS * machine->frames_room;
    if (is_limited() && !count_made(more))
        return 1;
    launch->counted += is_limited() ? more : 0;
    Return *frames = realloc(machine->frames, sizeof *frames * (size_t)(machine->frames_room * 2));
    if (!frames)
        return 1;
    machine->frames = frames;
    machine->frames_room *= 2;
    return 0;
}

/* Return the values from `first` to the top as a list; NULL with an exception set. */
static PyObject *objects_of(Launch *m, int64_t first)
{
    return list_of_values(m->m.stack + first, m->m.top - first);
}

/* Reserve stack space for values. On failure, take the interpreter lock and return nonzero with
 * an exception set. */
static int reserve(Launch *m, int64_t count)
{
    int outcome = make_room(&m->m, count);
    if (outcome)
        hold(m);
    if (outcome > 0)
        PyErr_NoMemory();
    return outcome;
}

/* Push a value from Python. Return 0, or -1 with an exception set. */
static int push_object(Launch *m, PyObject *object)
{
    Value value;
    if (reserve(m, 1) || value_of(&m->program->types, m->helper, object, &value))
        return -1;
    m->m.stack[m->m.top++] = value;
    return 0;
}

/* --- calls --- */

static Callee *callee_of(const Step *step)
{
    return (Callee *)step->callee;
}

/* Call the step's Python function on these parameters. */
static PyObject *call_in_python(const Step *step, PyObject *params)
{
    const Host *host = callee_of(step)->host;
    if (host && (host->nparams == MLVM_ANY || host->nparams == PyList_Size(params)))
        return PyObject_CallFunctionObjArgs(host->call, params, host->attributes, NULL);
    return PyObject_CallMethodObjArgs(callee_of(step)->object, name_perform, params, NULL);
}

/* Let Python call the function on the parameters from `first` on. Return 0, or -1 with an
 * exception set and an unchanged stack. The lock is held afterwards. */
static int call_back(Launch *m, const Step *step, int64_t first)
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
    int64_t before = m->m.top;
    Py_ssize_t count = PyList_Size(results);
    const Host *host = callee_of(step)->host;
    if (host && host->nresults != MLVM_ANY && host->nresults != count)
        Py_XDECREF(PyObject_CallMethod(host->helper, "end", "Oin", Py_None, 0, count));
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < count; i++)
        push_object(m, PyList_GetItem(results, i));
    Py_DECREF(results);
    if (PyErr_Occurred()) {
        drop_all(&m->m, before);
        return -1;
    }
    replace_below(&m->m, first, count);
    return 0;
}

/* Call a kernel without a planner. */
static int call_kernel(Machine *machine, const Step *step)
{
    Launch *m = (Launch *)machine;
    hold(m);
    PyObject *none = PyObject_CallNoArgs(callee_of(step)->object);
    if (!none)
        return -1;
    Py_DECREF(none);
    release(m);
    return 0;
}

/* Call a C function. Returns as `call_back` does. */
static int call_c(Launch *m, const Step *step, int64_t first)
{
    const Host *host = callee_of(step)->host;
    int64_t count = m->m.top - first;
    if (host->nparams != MLVM_ANY && host->nparams != count)
        return call_back(m, step, first);
    for (int64_t i = first; i < m->m.top; i++)
        if (m->m.stack[i].kind == OBJECT)
            hold(m);
    if (frame_enter(m->frame, host, m->m.stack + first, count))
        return call_back(m, step, first);
    release(m);
    m->m.worked += HOST_WORK;
    if (frame_run(m->frame)) {
        hold(m);
        frame_raise(m->frame);
        return -1;
    }
    int64_t nresults;
    const Value *results = frame_results(m->frame, &nresults);
    if (reserve(m, nresults)) {
        for (int64_t i = 0; i < nresults; i++)
            drop_value(results[i]);
        return -1;
    }
    if (nresults)
        memcpy(m->m.stack + m->m.top, results, sizeof *results * (size_t)nresults);
    m->m.top += nresults;
    replace_below(&m->m, first, nresults);
    return 0;
}

/* Resolve the call for parameters of these types in Python. NULL with an exception set. */
static const Case *new_case(Launch *m, Step *step, const Value *params, int count)
{
    if (!step->cases) {
        step->cases = PyMem_Calloc(MOST_CASES, sizeof *step->cases);
        if (!step->cases)
            return PyErr_NoMemory(), NULL;
    }
    PyObject *types = PyList_New(0);
    for (int i = 0; types && i < count; i++)
        if (PyList_Append(types, (PyObject *)object_of_type(params[i].as.tensor->type)))
            Py_CLEAR(types);
    PyObject *answer = types ? PyObject_CallMethod(callee_of(step)->object, "resolve", "O", types) : NULL;
    Py_XDECREF(types);
    if (!answer)
        return NULL;
    PyObject *call, *out, *over;
    Case resolved = {.count = count};
    int bad = !PyArg_ParseTuple(answer, "OOO!", &call, &out, &PyTuple_Type, &over);
    resolved.nwrites = bad ? 0 : (int)PyTuple_Size(over);
    bad = bad || resolved.nwrites > count;
    for (int i = 0; !bad && i < resolved.nwrites; i++)
        resolved.over[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(over, i));
    bad = bad || PyErr_Occurred();
    if (!bad && call != Py_None) {
        const KernelCall *its = resolved.call = &((KernelCallObject *)call)->call;
        bad = !is_kernel_call(call);
        if (!bad && out != Py_None) {
            bad = !is_type(out) || types_keep(&m->program->types, out);
            resolved.out = &((TypeObject *)out)->type;
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
        resolved.types[i] = params[i].as.tensor->type;
    unsigned place = callee_of(step)->next_case++ % MOST_CASES;
    PyObject *old = (int)place < step->ncases ? object_of_call(step->cases[place].call) : NULL;
    if (step->ncases < MOST_CASES)
        step->ncases++;
    ((Case *)step->cases)[place] = resolved;
    Py_XDECREF(old);
    return &step->cases[place];
}

static int call_from_loop(Machine *machine, const Step *step, int64_t first)
{
    Launch *m = (Launch *)machine;
    const Host *host = ((const Callee *)step->callee)->host;
    int outcome = host && host->function ? call_c(m, step, first) : call_back(m, step, first);
    if (!outcome)
        release(m);
    return outcome;
}

static const Case *resolve(Machine *machine, const Step *step, const Value *params, int count)
{
    Launch *m = (Launch *)machine;
    hold(m);
    const Case *resolved = new_case(m, (Step *)step, params, count);
    if (resolved)
        release(m);
    return resolved;
}

static Tensor *make_tensor(Machine *machine, const Type *type)
{
    (void)machine;
    return tensor_new(type); /* without memory, the reference loop raises the error */
}

static int truth_of_object(Value value)
{
    return PyLong_Check((PyObject *)value.as.object) ? 1 : -1; /* an int of more than 64 bits */
}

static int64_t now(void)
{
    struct timespec time;
    timespec_get(&time, TIME_UTC);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Periodically let Python handle signals and exceptions from other threads. Return -1 with an
 * exception set. */
static int look_at_clock(Machine *machine)
{
    Launch *m = (Launch *)machine;
    machine->worked = 0;
    int64_t time = now();
    if (!m->looked || (time >= m->looked && time < m->looked + TILL_SIGNALS)) {
        m->looked = m->looked ? m->looked : time;
        return 0;
    }
    m->looked = time;
    hold(m);
    PyObject *checked = PyErr_CheckSignals()
                            ? NULL
                            : PyObject_CallMethodObjArgs(m->helper, name_check_signals, NULL);
    Py_XDECREF(checked);
    release(m);
    return checked ? 0 : -1;
}

static int ended(Launch *m, int failed)
{
    if (failed)
        return clear_nonfatal_error() ? -1 : 1;
    release(m);
    return 0;
}

static int load_global(Machine *machine, int64_t handle)
{
    Launch *m = (Launch *)machine;
    hold(m);
    PyObject *number = PyLong_FromLongLong(handle);
    PyObject *array = number ? PyObject_CallMethodObjArgs(m->helper, name_load, number, NULL) : NULL;
    Py_XDECREF(number);
    int failed = array ? push_object(m, array) : -1;
    Py_XDECREF(array);
    return ended(m, failed);
}

static int store_global(Machine *machine, int64_t handle, Tensor *tensor)
{
    Launch *m = (Launch *)machine;
    hold(m);
    PyObject *array = tensor_array(tensor), *number = PyLong_FromLongLong(handle);
    PyObject *done = array && number
                         ? PyObject_CallMethodObjArgs(m->helper, name_store, number, array, NULL)
                         : NULL;
    Py_XDECREF(array);
    Py_XDECREF(number);
    Py_XDECREF(done);
    return ended(m, !done);
}

static const Runner in_python = {.more_values = more_values,
                                 .more_frames = more_frames,
                                 .look = look_at_clock,
                                 .call = call_from_loop,
                                 .back = call_kernel,
                                 .resolve = resolve,
                                 .make = make_tensor,
                                 .drop = drop_last,
                                 .keep = keep_object,
                                 .truth = truth_of_object,
                                 .turns = run_turns,
                                 .load = load_global,
                                 .store = store_global};

/* Run a program without branches. Return the step that failed: its kernel rejected values, or an
 * interrupt is set as exception; -1 on success. */
static int run_straight(Launch *m)
{
    const ProgramObject *program = m->program;
    int next = 0;
    m->m.worked = (int64_t)program->work;
    while (!look_up(&m->m)) {
        double most = TILL_CLOCK;
        if (run_bound(m->pool->pool, program->addresses, program->bound, program->nbound, &next, &most))
            break;
        if (next == program->nbound)
            return program->functions[0].steps[next].code == HALT ? -1 : next;
        m->m.worked = TILL_CLOCK;
    }
    return next;
}

/* Return the state for the reference loop: (stack, frames, function, pc, base, nparams, left,
 * since, exception). */
static PyObject *state_of(Launch *m)
{
    PyObject *error = take_exception(), *stack = objects_of(m, 0), *frames = PyList_New(0), *state = NULL;
    for (int64_t i = 0; frames && i < m->m.depth; i++) {
        const Return *frame = &m->m.frames[i];
        PyObject *item = Py_BuildValue("iiii", frame->function, frame->pc, frame->base, frame->nparams);
        if (!item || PyList_Append(frames, item))
            Py_CLEAR(frames);
        Py_XDECREF(item);
    }
    if (stack && frames)
        state = Py_BuildValue("OOiiiiLiO", stack, frames, m->m.function, m->m.pc, m->m.base, m->m.nparams,
                              (long long)m->m.steps_left, m->m.since, error ? error : Py_None);
    Py_XDECREF(stack);
    Py_XDECREF(frames);
    Py_XDECREF(error);
    return state;
}

static Machine machine_of(const ProgramObject *program, const PoolObject *pool)
{
    return (Machine){.runner = &in_python,
                     .functions = program->functions,
                     .pool = pool->pool,
                     .addresses = program->addresses,
                     .version = program->version,
                     .version_seen = *program->version,
                     .steps_left = -1};
}

static int lend_arguments(Launch *m, PyObject *operands)
{
    PyObject *types = m->program->arguments;
    Py_ssize_t count = PyTuple_Size(types);
    if (!count)
        return 0;
    m->m.arguments = PyMem_Calloc((size_t)count, sizeof *m->m.arguments);
    if (!m->m.arguments)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        if (tensor_lend(&m->m.arguments[i], PyTuple_GetItem(operands, i),
                        (TypeObject *)PyTuple_GetItem(types, i)))
            return -1;
    return 0;
}

/* Launch a program without branches. */
static PyObject *run_calls(PyObject *object, PoolObject *pool, PyObject *helper)
{
    ProgramObject *self = (ProgramObject *)object;
    Launch m = {.program = self, .pool = pool, .helper = helper, .m = machine_of(self, pool)};
    if (pool_reserve(pool->pool, self->scratch, self->shared))
        return PyErr_NoMemory();
    m.releases = self->work >= WORTH_RELEASING;
    Py_INCREF(object); /* another thread may release it */
    release(&m);
    m.m.pc = run_straight(&m);
    hold(&m);
    PyObject *result = m.m.pc < 0 ? Py_NewRef(Py_None) : state_of(&m);
    Py_DECREF(object);
    return result;
}

PyObject *program_launch(PyObject *object, PoolObject *pool, PyObject *helper, PyObject *operands,
                         int64_t left)
{
    ProgramObject *self = (ProgramObject *)object;
    Launch m = {.program = self, .pool = pool, .helper = helper, .m = machine_of(self, pool)};
    m.m.steps_left = left;
    PyObject *result = NULL;
    if (self->straight && left < 0)
        return run_calls(object, pool, helper);
    if (pool_reserve(m.pool->pool, self->scratch, self->shared))
        return PyErr_NoMemory();
    m.releases = self->work >= WORTH_RELEASING;
    Py_INCREF((PyObject *)self); /* a host function may release the program */
    if (!self->running && types_count(&self->types) > MOST_KEPT)
        forget_cases(self);
    if (self->has_c && !(m.frame = frame_take(&self->types))) {
        Py_DECREF(self);
        return NULL;
    }
    self->running++;
    m.m.room = m.m.frames_room = 32;
    m.m.stack = malloc(sizeof *m.m.stack * (size_t)m.m.room);
    m.m.frames = malloc(sizeof *m.m.frames * (size_t)m.m.frames_room);
    if (!m.m.stack || !m.m.frames)
        PyErr_NoMemory();
    else if (!lend_arguments(&m, operands)) {
        release(&m);
        int outcome = run_machine(&m.m);
        hold(&m);
        result = outcome > 0 ? objects_of(&m, m.m.base) : state_of(&m);
    }
    drop_all(&m.m, 0);
    count_made(-m.counted);
    if (m.frame)
        frame_give(m.frame);
    free(m.m.stack);
    free(m.m.frames);
    PyMem_Free(m.m.arguments);
    self->running--;
    Py_DECREF(self);
    return result;
}

/* program.run(pool, helper, operands, left): see `program_launch`. */
static PyObject *program_run(ProgramObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !is_pool(args[0]) || !PyTuple_Check(args[2]) ||
        PyTuple_Size(args[2]) < PyTuple_Size(self->arguments) || !self->keepalive)
        return PyErr_Format(PyExc_TypeError,
                            "run: expected a Pool, a helper, operands and the remaining steps");
    long long left = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    return program_launch((PyObject *)self, (PoolObject *)args[0], args[1], args[2], left);
}

int program_is_closed(PyObject *object)
{
    if (!PyObject_TypeCheck(object, program_type))
        return 0;
    const ProgramObject *program = (const ProgramObject *)object;
    const Step *step = program->functions[0].steps, *end = step + program->functions[0].count;
    while (step < end && (step->code == RUN || step->code == LOAD_ARG || step->code == JUMP ||
                          step->code == JUMP_IF_FALSE || step->code == HALT))
        step++;
    return step == end;
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
    Launch m = {.program = program, .pool = pool, .m = machine_of(program, pool)};
    if (pool_reserve(pool->pool, program->scratch, program->shared))
        return PyErr_NoMemory(), -1;
    m.releases = program->work >= WORTH_RELEASING;
    release(&m);
    int next = 0;
    double most = HUGE_VAL;
    int refused = run_bound(pool->pool, program->addresses, program->bound, program->nbound, &next, &most);
    hold(&m);
    return refused != 0;
}

/* open_program(rows, nargs, types, version): a program with calls that `activate` sets later. A row
 * is (code, number, arguments): a step of the loop, or RUN with argument numbers. `types` are the
 * types of the launch's arguments, which LOAD_ARG uses. */
static PyObject *open_program(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *rows, *types, *version;
    Py_ssize_t nargs;
    if (!PyArg_ParseTuple(args, "O!nO!O", &PyList_Type, &rows, &nargs, &PyTuple_Type, &types, &version))
        return NULL;
    ProgramObject *self = new_program(program_type, 1, types, version);
    if (!self)
        return NULL;
    Py_ssize_t count = PyList_Size(rows), nplaces = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        nplaces += PyTuple_Size(PyTuple_GetItem(PyList_GetItem(rows, i), 2));
    self->bound = PyMem_Calloc((size_t)count + 1, sizeof *self->bound);
    self->addresses = PyMem_Calloc((size_t)nargs + 1, sizeof *self->addresses);
    self->places = PyMem_Calloc((size_t)nplaces + 1, sizeof *self->places);
    Step *steps = PyMem_Calloc((size_t)count + 1, sizeof *steps);
    if (!self->bound || !self->addresses || !self->places || !steps) {
        PyMem_Free(steps);
        PyErr_NoMemory();
        goto failed;
    }
    self->naddresses = (uint32_t)nargs;
    self->functions[0] = (Function){.steps = steps, .count = (int)count + 1};
    steps[count].code = HALT;
    uint32_t *next = self->places;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *arguments;
        if (!PyArg_ParseTuple(PyList_GetItem(rows, i), "iiO!", &steps[i].code, &steps[i].number,
                              &PyTuple_Type, &arguments))
            goto failed;
        if (steps[i].code != RUN) {
            self->straight = 0;
            continue;
        }
        self->bound[self->nbound++].places = next;
        for (Py_ssize_t k = 0; k < PyTuple_Size(arguments); k++) {
            Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GetItem(arguments, k));
            if (number < 0 || number >= nargs) {
                PyErr_BadArgument();
                goto failed;
            }
            *next++ = (uint32_t)number;
        }
    }
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

/* program.activate(calls, operands): set the calls, a list, and the arrays of a launch. The
 * caller keeps the calls alive; arrays equal to those of the previous activation keep their
 * addresses. activate([], ()) releases the arrays. */
static PyObject *program_activate(ProgramObject *self, PyObject *args)
{
    PyObject *calls, *operands;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &calls, &PyTuple_Type, &operands))
        return NULL;
    if (!PyList_Size(calls) && !PyTuple_Size(operands)) {
        if (PyList_SetSlice(self->keepalive, 1, PyList_Size(self->keepalive), NULL))
            return NULL;
        Py_RETURN_NONE;
    }
    if (PyList_Size(calls) != self->nbound || PyTuple_Size(operands) < (Py_ssize_t)self->naddresses)
        return PyErr_Format(PyExc_TypeError, "activate: expected %d calls and %u arrays", self->nbound,
                            self->naddresses);
    PyObject *last = PyList_Size(self->keepalive) > 1 ? PyList_GetItem(self->keepalive, 1) : NULL;
    for (uint32_t i = 0; i < self->naddresses; i++) {
        PyObject *array = PyTuple_GetItem(operands, i);
        if (last && PyTuple_GetItem(last, i) == array)
            continue;
        if (address_of(array, &self->addresses[i], NULL))
            return PyList_SetSlice(self->keepalive, 1, PyList_Size(self->keepalive), NULL), NULL;
    }
    if (last ? PyList_SetItem(self->keepalive, 1, Py_NewRef(operands)) : keep(self, operands))
        return NULL;
    self->scratch = self->shared = 0;
    self->work = 0;
    for (int i = 0; i < self->nbound; i++) {
        PyObject *object = PyList_GetItem(calls, i);
        if (!is_kernel_call(object))
            return PyErr_Format(PyExc_TypeError, "activate: expected a KernelCall, got %R", object);
        const KernelCall *call = self->bound[i].call = &((KernelCallObject *)object)->call;
        self->scratch = call->scratch > self->scratch ? call->scratch : self->scratch;
        self->shared = call->shared > self->shared ? call->shared : self->shared;
        self->work += call->work;
    }
    if (!self->straight) {
        const BoundCall *next = self->bound;
        for (Step *step = (Step *)self->functions[0].steps; step->code != HALT; step++)
            if (step->code == RUN)
                step->bound = *next++;
        self->work = WORTH_RELEASING;
    }
    Py_RETURN_NONE;
}

static PyMethodDef program_methods[] = {
    {"activate", (PyCFunction)program_activate, METH_VARARGS, "activate(calls, operands): see opened.py."},
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

/* steps() -> dict: the code of each step of the loop */
static PyObject *get_steps(PyObject *module, PyObject *unused)
{
#define FORMAT(name) "si"
#define PAIR(name) , #name, name
    (void)module, (void)unused;
    return Py_BuildValue("{" STEPS(FORMAT) "}" STEPS(PAIR));
}

static PyMethodDef loop_functions[] = {
    {"steps", get_steps, METH_NOARGS, "The numbers of the steps that the loop knows."},
    {"open_program", open_program, METH_VARARGS, "A program with calls that are set later."},
    {NULL, NULL, 0, NULL}};

int loop_init(PyObject *module)
{
    name_check_signals = PyUnicode_InternFromString("check_signals");
    name_load = PyUnicode_InternFromString("load");
    name_perform = PyUnicode_InternFromString("perform");
    name_store = PyUnicode_InternFromString("store");
    if (!name_check_signals || !name_load || !name_perform || !name_store)
        return -1;
    program_type = add_type(module, "Program", &program_spec);
    if (!program_type || PyModule_AddIntConstant(module, "ANYWHERE", (long)OVER_ANYTHING))
        return -1;
    return PyModule_AddFunctions(module, loop_functions);
}
