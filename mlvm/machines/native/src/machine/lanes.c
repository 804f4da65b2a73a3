/* Lanes as a Python object, around the scheduler of plan/lanes.c.
 *
 * In:       the code that native/lanes.py encodes; for a run the addresses of arguments, results, sums and
 *           shared arrays, and a helper.
 * Out:      rows of results, written to the caller's memory; or an exception.
 * Must hold: the arrays stay alive during the run; a run is not called within itself.
 * Callers:  native/lanes.py. The helper is called for memory of more rows, for a segment's program at its
 *           first use, and for errors.
 * Locks:    the interpreter lock, and the VM's lock of the launch.
 */
#include "lanes.h"

#include "../plan/lanes.h"
#include "call.h"
#include "loop.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD Lanes lanes;
    PyObject *helper; /* set during a run */
    PoolObject *pool;
    uint64_t looks;
} LanesObject;

enum { LOOKS_PER_CHECK = 64, FEW_BYTES = 1 << 14 };

static PyTypeObject *lanes_type;

static LanesObject *object_of_lanes(Lanes *lanes)
{
    return (LanesObject *)(void *)((char *)lanes - offsetof(LanesObject, lanes));
}

/* --- callbacks of the scheduler --- */

/* Resize a block within the VM's limits. */
static void *resize(Lanes *lanes, void *old, size_t had, size_t nbytes)
{
    if (nbytes > had + FEW_BYTES) {
        PyObject *done = PyObject_CallMethod(object_of_lanes(lanes)->helper, "keep", "L",
                                             (long long)(nbytes - had));
        if (!done)
            return NULL;
        Py_DECREF(done);
    }
    void *memory = realloc(old, nbytes);
    if (!memory)
        PyErr_NoMemory();
    return memory;
}

static int grow(Lanes *lanes, int64_t size, int64_t count)
{
    Rows *rows = &lanes->rows[size];
    long long address, room;
    PyObject *answer = PyObject_CallMethod(object_of_lanes(lanes)->helper, "grow", "LLL", (long long)size,
                                           (long long)rows->used, (long long)count);
    int failed = !answer || !PyArg_ParseTuple(answer, "LL", &address, &room);
    Py_XDECREF(answer);
    if (failed)
        return -1;
    rows->data = (char *)(intptr_t)address;
    rows->room = room;
    return 0;
}

/* Set the program and the addresses of a part. Return 0, or -1 with an exception. */
static int prepare(Lanes *lanes, int64_t number, int64_t k)
{
    const LanesObject *self = object_of_lanes(lanes);
    Segment *segment = &lanes->segments[number];
    Part *part = &segment->parts[k];
    PyObject *answer = PyObject_CallMethod(self->helper, "part", "LL", (long long)number,
                                           (long long)segment->counts[k]);
    PyObject *program, *operands, *results;
    if (!answer ||
        !PyArg_ParseTuple(answer, "OO!O!", &program, &PyTuple_Type, &operands, &PyTuple_Type, &results) ||
        PyTuple_Size(operands) != segment->nins || PyTuple_Size(results) != segment->nouts) {
        Py_XDECREF(answer);
        if (!PyErr_Occurred())
            PyErr_BadArgument();
        return -1;
    }
    for (int64_t i = 0; i < segment->nins; i++)
        part->operands[i] = PyLong_AsVoidPtr(PyTuple_GetItem(operands, (Py_ssize_t)i));
    for (int64_t i = 0; i < segment->nouts; i++)
        part->results[i] = PyLong_AsVoidPtr(PyTuple_GetItem(results, (Py_ssize_t)i));
    Py_XDECREF((PyObject *)part->program);
    part->program = NULL;
    if (program_is_straight(program)) {
        Py_INCREF(program);
        part->program = program;
    }
    Py_DECREF(answer);
    part->prepared = !PyErr_Occurred();
    return -!part->prepared;
}

/* Run a part: here if the program consists of kernel calls, otherwise in Python. */
static int run_part(Lanes *lanes, int64_t number, int64_t k)
{
    const LanesObject *self = object_of_lanes(lanes);
    const Segment *segment = &lanes->segments[number];
    if (segment->parts[k].program) {
        int refused = program_run_straight(segment->parts[k].program, self->pool);
        if (refused <= 0)
            return refused;
    }
    PyObject *done = PyObject_CallMethod(self->helper, "run_part", "LL", (long long)number,
                                         (long long)segment->counts[k]);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Let Python handle signals, and periodically run other threads, which may stop this launch. */
static int look(Lanes *lanes)
{
    LanesObject *self = object_of_lanes(lanes);
    if (PyErr_CheckSignals())
        return -1;
    if (++self->looks % LOOKS_PER_CHECK)
        return 0;
    PyObject *done = PyObject_CallMethod(self->helper, "check_signals", NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int refuse(Lanes *lanes, const char *what, int64_t a, int64_t b)
{
    PyObject *done = PyObject_CallMethod(object_of_lanes(lanes)->helper, "refuse", "sLL", what,
                                         (long long)a, (long long)b);
    Py_XDECREF(done);
    return -1;
}

static const LanesRunner in_python = {
    .resize = resize, .grow = grow, .prepare = prepare, .run = run_part, .look = look, .refuse = refuse};

/* --- Python --- */

static int64_t *copied(PyObject *array, int64_t *count)
{
    Py_buffer buffer;
    if (PyObject_GetBuffer(array, &buffer, PyBUF_SIMPLE))
        return NULL;
    int64_t *numbers = malloc((size_t)buffer.len + sizeof *numbers);
    if (numbers)
        memcpy(numbers, buffer.buf, (size_t)buffer.len);
    else
        PyErr_NoMemory();
    *count = (int64_t)(buffer.len / (Py_ssize_t)sizeof *numbers);
    PyBuffer_Release(&buffer);
    return numbers;
}

/* Registers: an array of pairs. */
static LaneRegister *registers(PyObject *array, int64_t *count)
{
    *count = 0;
    LaneRegister *of = (LaneRegister *)(void *)copied(array, count);
    *count /= 2;
    return of;
}

static int new_segment(Segment *segment, PyObject *spec)
{
    PyObject *counts;
    long long nins, nouts;
    if (!PyArg_ParseTuple(spec, "OLL", &counts, &nins, &nouts) ||
        !(segment->counts = copied(counts, &segment->ncounts)))
        return -1;
    segment->nins = nins;
    segment->nouts = nouts;
    segment->parts = calloc((size_t)segment->ncounts + 1, sizeof(Part));
    segment->first = calloc((size_t)nouts + 1, sizeof *segment->first);
    int failed = !segment->parts || !segment->first;
    for (int64_t k = 0; !failed && k < segment->ncounts; k++) {
        segment->parts[k].operands = calloc((size_t)nins + 1, sizeof(char *));
        segment->parts[k].results = calloc((size_t)nouts + 1, sizeof(char *));
        failed = !segment->parts[k].operands || !segment->parts[k].results;
    }
    if (failed)
        PyErr_NoMemory();
    return -failed;
}

static int new_site(Site *site, PyObject *spec)
{
    PyObject *sizes;
    long long segment, sum, nbytes;
    if (!PyArg_ParseTuple(spec, "LLLO", &segment, &sum, &nbytes, &sizes) ||
        !(site->sizes = copied(sizes, &site->count)))
        return -1;
    site->segment = segment;
    site->sum = sum;
    site->nbytes = nbytes;
    if (!(site->rows = calloc((size_t)site->count + 1, sizeof(List))))
        return PyErr_NoMemory(), -1;
    return 0;
}

/* Lanes(code, at, heavy, width, sizes, lent, segments, sites, shared, params, returned): arrays
 * of int64. `heavy` has a flag per step, `lent` per size. `segments` are triples (counts,
 * operands, results), `sites` (segment, sum, its bytes, sizes of operands). `shared` is the
 * number of shared arrays. */
static PyObject *lanes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *code, *at, *heavy, *sizes, *lent, *segments, *sites, *params, *returned;
    long long width, nshared;
    if (!PyArg_ParseTuple(args, "OOOLOOO!O!LOO", &code, &at, &heavy, &width, &sizes, &lent, &PyList_Type,
                          &segments, &PyList_Type, &sites, &nshared, &params, &returned))
        return NULL;
    LanesObject *object = (LanesObject *)object_of(type);
    int64_t count, *numbers = NULL;
    char *marks;
    if (!object)
        return NULL;
    Lanes *self = &object->lanes;
    self->runner = &in_python;
    self->width = width;
    self->nshared = nshared;
    if (!(self->code = copied(code, &count)) || !(self->at = copied(at, &self->nsteps)) ||
        !(self->params = registers(params, &self->nparams)) ||
        !(self->returned = registers(returned, &self->nreturned)))
        goto failed;
    for (int i = 0; i < 2; i++) {
        if (!(numbers = copied(i ? lent : heavy, &count)))
            goto failed;
        if (!(marks = calloc((size_t)count + 1, 1)))
            goto no_memory;
        *(i ? &self->lent : &self->heavy) = marks;
        for (int64_t k = 0; k < count; k++)
            marks[k] = (char)numbers[k];
        free(numbers);
    }
    if (!(numbers = copied(sizes, &self->nrows)))
        goto failed;
    self->ready = calloc((size_t)self->nsteps + 1, sizeof *self->ready);
    self->row_of_shared = calloc((size_t)nshared + 1, sizeof *self->row_of_shared);
    self->shared = calloc((size_t)nshared + 1, sizeof *self->shared);
    self->rows = calloc((size_t)self->nrows + 1, sizeof *self->rows);
    self->segments = calloc((size_t)PyList_Size(segments) + 1, sizeof *self->segments);
    self->sites = calloc((size_t)PyList_Size(sites) + 1, sizeof *self->sites);
    if (!self->ready || !self->row_of_shared || !self->shared || !self->rows || !self->segments ||
        !self->sites)
        goto no_memory;
    for (int64_t i = 0; i < self->nrows; i++)
        self->rows[i].nbytes = numbers[i];
    while (self->nsegments < PyList_Size(segments)) {
        int64_t i = self->nsegments++;
        if (new_segment(&self->segments[i], PyList_GetItem(segments, (Py_ssize_t)i)))
            goto failed;
    }
    while (self->nsites < PyList_Size(sites)) {
        int64_t i = self->nsites++;
        if (new_site(&self->sites[i], PyList_GetItem(sites, (Py_ssize_t)i)))
            goto failed;
    }
    free(numbers);
    return (PyObject *)object;
no_memory:
    PyErr_NoMemory();
failed:
    free(numbers);
    Py_DECREF(object);
    return NULL;
}

static void lanes_dealloc(LanesObject *object)
{
    Lanes *self = &object->lanes;
    for (int64_t i = 0; self->segments && i < self->nsegments; i++) {
        Segment *segment = &self->segments[i];
        for (int64_t k = 0; segment->parts && k < segment->ncounts; k++) {
            Py_XDECREF((PyObject *)segment->parts[k].program);
            free(segment->parts[k].operands);
            free(segment->parts[k].results);
        }
        free(segment->parts);
        free(segment->first);
        free((void *)(uintptr_t)segment->counts);
    }
    for (int64_t i = 0; self->sites && i < self->nsites; i++) {
        for (int64_t k = 0; self->sites[i].rows && k < self->sites[i].count; k++)
            free(self->sites[i].rows[k].of);
        free(self->sites[i].rows);
        free(self->sites[i].frames.of);
        free((void *)(uintptr_t)self->sites[i].sizes);
    }
    for (int64_t pc = 0; self->ready && pc < self->nsteps; pc++)
        free(self->ready[pc].of);
    int64_t *arrays[] = {(int64_t *)(uintptr_t)self->code,
                         (int64_t *)(uintptr_t)self->at,
                         self->now.of,
                         self->row_of_shared,
                         self->regs,
                         self->parent,
                         self->depth,
                         self->site,
                         self->waits,
                         self->wakes,
                         self->records.of,
                         self->record_at.of,
                         self->order.of,
                         self->sums.of,
                         self->begins.of};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free((void *)(uintptr_t)self->heavy);
    free((void *)(uintptr_t)self->lent);
    free((void *)(uintptr_t)self->params);
    free((void *)(uintptr_t)self->returned);
    free(self->stays);
    free(self->ready);
    free(self->shared);
    free(self->rows);
    free(self->segments);
    free(self->sites);
    free_object((PyObject *)object);
}

/* Return addresses from an array of int64. NULL with an exception. */
static char **addresses(PyObject *array, int64_t wanted)
{
    int64_t count = 0, *numbers = copied(array, &count);
    if (numbers && count < wanted) {
        free(numbers);
        PyErr_BadArgument();
        return NULL;
    }
    char **of = (char **)(void *)numbers; /* both have 64 bits */
    for (int64_t i = 0; numbers && i < count; i++)
        of[i] = (char *)(intptr_t)numbers[i];
    return of;
}

/* run(pool, helper, count, args, results, sums, shared): run the lanes on arrays given by
 * address. */
static PyObject *lanes_run(LanesObject *object, PyObject *args)
{
    Lanes *self = &object->lanes;
    PyObject *pool, *helper, *lists[4];
    long long count;
    char **of[4] = {NULL};
    if (!PyArg_ParseTuple(args, "OOLOOOO", &pool, &helper, &count, &lists[0], &lists[1], &lists[2],
                          &lists[3]))
        return NULL;
    if (!is_pool(pool) || object->helper)
        return PyErr_Format(PyExc_TypeError, "run: expected a Pool, got %R, and no nested run", pool);
    int64_t sums = 0;
    for (int64_t i = 0; i < self->nsites; i++)
        sums = self->sites[i].sum < sums ? sums : self->sites[i].sum + 1;
    const int64_t counts[] = {self->nparams, self->nreturned, sums, self->nshared};
    int failed = 0;
    for (int i = 0; i < 4; i++)
        failed |= !(of[i] = addresses(lists[i], counts[i]));
    if (!failed) {
        memcpy(self->shared, of[3], sizeof *self->shared * (size_t)self->nshared);
        object->helper = helper;
        object->pool = (PoolObject *)pool;
        failed = lanes_run_rows(self, count, of[0], of[1], of[2]);
        object->helper = NULL;
    }
    for (int i = 0; i < 4; i++)
        free(of[i]);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* forget(): drop the programs of all parts. */
static PyObject *lanes_forget(LanesObject *object, PyObject *unused)
{
    const Lanes *self = &object->lanes;
    (void)unused;
    for (int64_t i = 0; i < self->nsegments; i++)
        for (int64_t k = 0; k < self->segments[i].ncounts; k++)
            self->segments[i].parts[k].prepared = 0;
    Py_RETURN_NONE;
}

/* forget_rows(): drop the rows, because a different program has used the memory. */
static PyObject *lanes_forget_rows(LanesObject *object, PyObject *unused)
{
    Lanes *self = &object->lanes;
    (void)unused;
    for (int64_t i = 0; i < self->nrows; i++)
        self->rows[i] = (Rows){.nbytes = self->rows[i].nbytes};
    Py_RETURN_NONE;
}

static PyMethodDef lanes_methods[] = {
    {"run", (PyCFunction)lanes_run, METH_VARARGS, "run(pool, helper, count, args, results, sums, shared)"},
    {"forget", (PyCFunction)lanes_forget, METH_NOARGS,
     "Drop the programs of all parts, because shared operands have moved."},
    {"forget_rows", (PyCFunction)lanes_forget_rows, METH_NOARGS,
     "Drop the rows, because a different program has used the memory."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot lanes_slots[] = {{Py_tp_new, lanes_new},
                                    {Py_tp_dealloc, lanes_dealloc},
                                    {Py_tp_methods, lanes_methods},
                                    {Py_tp_doc, "Frames of many lanes: see lanes.py."},
                                    {0, NULL}};
static PyType_Spec lanes_spec = {"mlvm.machines.native._native.Lanes", sizeof(LanesObject), 0,
                                 Py_TPFLAGS_DEFAULT, lanes_slots};

/* lane_steps() -> dict: the code of each kind of step */
static PyObject *get_steps(PyObject *module, PyObject *unused)
{
#define FORMAT(name) "si"
#define PAIR(name) , #name, STEP_##name
    (void)module, (void)unused;
    return Py_BuildValue("{" LANE_STEPS(FORMAT) "}" LANE_STEPS(PAIR));
}

static PyMethodDef lanes_functions[] = {
    {"lane_steps", get_steps, METH_NOARGS, "The numbers of the steps of lanes."}, {NULL, NULL, 0, NULL}};

int lanes_init(PyObject *module)
{
    lanes_type = add_type(module, "Lanes", &lanes_spec);
    return lanes_type ? PyModule_AddFunctions(module, lanes_functions) : -1;
}
