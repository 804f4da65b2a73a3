/* Lanes as a Python object: see plan/lanes.h.
 *
 * Python makes the code, and has made the rows of arguments. What is left to it meanwhile are
 * memory for more rows, programs that are met for the first time, and errors.
 */
#include "lanes.h"

#include "../plan/lanes.h"
#include "call.h"
#include "loop.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD
    Lanes lanes;
    PyObject *helper; /* while it runs */
    PoolObject *pool;
} LanesObject;

static PyTypeObject *lanes_type;

static LanesObject *object_of_lanes(Lanes *lanes)
{
    return (LanesObject *)(void *)((char *)lanes - offsetof(LanesObject, lanes));
}

/* --- what lanes ask --- */

static void *resize(Lanes *lanes, void *old, size_t had, size_t nbytes)
{
    (void)lanes, (void)had;
    void *made = realloc(old, nbytes);
    if (!made)
        PyErr_NoMemory();
    return made;
}

static int grow(Lanes *lanes, int64_t size, int64_t count)
{
    Rows *rows = &lanes->rows[size];
    long long address, room;
    PyObject *found = PyObject_CallMethod(object_of_lanes(lanes)->helper, "grow", "LLL", (long long)size,
                                          (long long)rows->used, (long long)count);
    int failed = !found || !PyArg_ParseTuple(found, "LL", &address, &room);
    Py_XDECREF(found);
    if (failed)
        return -1;
    rows->data = (char *)(intptr_t)address;
    rows->room = room;
    return 0;
}

/* Have the addresses that a program reads from and writes to. Returns 0, or -1 with an exception. */
static int learn(Lanes *lanes, int64_t number, int64_t k)
{
    const LanesObject *self = object_of_lanes(lanes);
    Segment *segment = &lanes->segments[number];
    Part *part = &segment->parts[k];
    PyObject *found = PyObject_CallMethod(self->helper, "part", "LL", (long long)number,
                                          (long long)segment->counts[k]);
    PyObject *program, *given, *left;
    if (!found || !PyArg_ParseTuple(found, "OO!O!", &program, &PyTuple_Type, &given, &PyTuple_Type,
                                    &left) ||
        PyTuple_Size(given) != segment->nins || PyTuple_Size(left) != segment->nouts) {
        Py_XDECREF(found);
        if (!PyErr_Occurred())
            PyErr_BadArgument();
        return -1;
    }
    for (int64_t i = 0; i < segment->nins; i++)
        part->given[i] = PyLong_AsVoidPtr(PyTuple_GetItem(given, (Py_ssize_t)i));
    for (int64_t i = 0; i < segment->nouts; i++)
        part->left[i] = PyLong_AsVoidPtr(PyTuple_GetItem(left, (Py_ssize_t)i));
    Py_XDECREF((PyObject *)part->program);
    part->program = NULL;
    if (program_is_straight(program)) {
        Py_INCREF(program);
        part->program = program;
    }
    Py_DECREF(found);
    part->known = !PyErr_Occurred();
    return -!part->known;
}

/* A program that is straight runs here, any other in Python. */
static int run_part(Lanes *lanes, int64_t number, int64_t k)
{
    const LanesObject *self = object_of_lanes(lanes);
    const Segment *segment = &lanes->segments[number];
    if (segment->parts[k].program) {
        int refused = program_run_straight(segment->parts[k].program, self->pool);
        if (refused <= 0)
            return refused;
    }
    PyObject *done = PyObject_CallMethod(self->helper, "run", "LL", (long long)number,
                                         (long long)segment->counts[k]);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

static int look(Lanes *lanes)
{
    (void)lanes;
    return PyErr_CheckSignals();
}

static int refuse(Lanes *lanes, const char *what, int64_t a, int64_t b)
{
    PyObject *done = PyObject_CallMethod(object_of_lanes(lanes)->helper, "refuse", "sLL", what,
                                         (long long)a, (long long)b);
    Py_XDECREF(done);
    return -1;
}

static const LanesRunner in_python = {
    .resize = resize, .grow = grow, .learn = learn, .run = run_part, .look = look, .refuse = refuse};

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

/* Lanes(code, at, heavy, width, sizes, segments, sites, shared): arrays of int64; `segments` are
 * triples (counts, operands, results), `sites` how many rows each has, `shared` how many there are. */
static PyObject *lanes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *code, *at, *heavy, *sizes, *segments, *sites;
    long long width, nshared;
    if (!PyArg_ParseTuple(args, "OOOLOO!OL", &code, &at, &heavy, &width, &sizes, &PyList_Type,
                          &segments, &sites, &nshared))
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
        !(numbers = copied(heavy, &count)))
        goto failed;
    self->heavy = marks = calloc((size_t)self->nsteps + 1, 1);
    self->ready = calloc((size_t)self->nsteps + 1, sizeof *self->ready);
    self->row_of_shared = calloc((size_t)nshared + 1, sizeof *self->row_of_shared);
    self->shared = calloc((size_t)nshared + 1, sizeof *self->shared);
    if (!marks || !self->ready || !self->row_of_shared || !self->shared)
        goto no_memory;
    for (int64_t i = 0; i < count; i++)
        marks[numbers[i]] = 1;
    free(numbers);
    if (!(numbers = copied(sizes, &self->nrows)))
        goto failed;
    if (!(self->rows = calloc((size_t)self->nrows + 1, sizeof *self->rows)))
        goto no_memory;
    for (int64_t i = 0; i < self->nrows; i++)
        self->rows[i].nbytes = numbers[i];
    free(numbers);
    if (!(numbers = copied(sites, &count)))
        goto failed;
    if (!(self->sites = calloc((size_t)count + 1, sizeof *self->sites)))
        goto no_memory;
    self->nsites = count;
    for (int64_t i = 0; i < count; i++) {
        self->sites[i].count = numbers[i];
        if (!(self->sites[i].rows = calloc((size_t)numbers[i] + 1, sizeof(List))))
            goto no_memory;
    }
    count = PyList_Size(segments);
    if (!(self->segments = calloc((size_t)count + 1, sizeof *self->segments)))
        goto no_memory;
    self->nsegments = count;
    for (int64_t i = 0; i < count; i++) {
        Segment *segment = &self->segments[i];
        PyObject *counts;
        long long nins, nouts;
        if (!PyArg_ParseTuple(PyList_GetItem(segments, (Py_ssize_t)i), "OLL", &counts, &nins, &nouts) ||
            !(segment->counts = copied(counts, &segment->ncounts)))
            goto failed;
        segment->nins = nins;
        segment->nouts = nouts;
        segment->parts = calloc((size_t)segment->ncounts + 1, sizeof(Part));
        segment->first = calloc((size_t)nouts + 1, sizeof *segment->first);
        if (!segment->parts || !segment->first)
            goto no_memory;
        for (int64_t k = 0; k < segment->ncounts; k++) {
            segment->parts[k].given = calloc((size_t)nins + 1, sizeof(char *));
            segment->parts[k].left = calloc((size_t)nouts + 1, sizeof(char *));
            if (!segment->parts[k].given || !segment->parts[k].left)
                goto no_memory;
        }
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
            free(segment->parts[k].given);
            free(segment->parts[k].left);
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
    }
    for (int64_t pc = 0; self->ready && pc < self->nsteps; pc++)
        free(self->ready[pc].of);
    int64_t *arrays[] = {(int64_t *)(uintptr_t)self->code, (int64_t *)(uintptr_t)self->at,
                         self->now.of, self->row_of_shared, self->regs,      self->parent,
                         self->depth, self->site,  self->waits,         self->wakes,     self->records.of,
                         self->record_at.of};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free((void *)(uintptr_t)self->heavy);
    free(self->stays);
    free(self->ready);
    free(self->shared);
    free(self->rows);
    free(self->segments);
    free(self->sites);
    free_object((PyObject *)object);
}

static PyObject *bytes_of(const int64_t *numbers, int64_t count)
{
    return PyBytes_FromStringAndSize((const char *)numbers, (Py_ssize_t)(count * (int64_t)sizeof *numbers));
}

/* What frames have said at the sites: [(frames, [rows of each operand])]. */
static PyObject *said(const Lanes *self)
{
    PyObject *list = PyList_New(0);
    for (int64_t i = 0; list && i < self->nsites; i++) {
        const Site *site = &self->sites[i];
        PyObject *rows = PyList_New(0), *item = NULL;
        for (int64_t k = 0; rows && k < site->count; k++) {
            PyObject *numbers = bytes_of(site->rows[k].of, site->rows[k].count);
            if (!numbers || PyList_Append(rows, numbers))
                Py_CLEAR(rows);
            Py_XDECREF(numbers);
        }
        PyObject *frames = bytes_of(site->frames.of, site->frames.count);
        if (rows && frames)
            item = PyTuple_Pack(2, frames, rows);
        if (!item || PyList_Append(list, item))
            Py_CLEAR(list);
        Py_XDECREF(item);
        Py_XDECREF(rows);
        Py_XDECREF(frames);
    }
    return list;
}

/* run(pool, helper, first, rows, shared): `first` are the registers of the lanes, `rows` has the
 * address of each size's rows, how many there is room for, and how many are used; `shared` has the
 * addresses of the shared operands. Returns the lanes' registers, what was said, and the callers and
 * depths of all frames. */
static PyObject *lanes_run(LanesObject *object, PyObject *args)
{
    Lanes *self = &object->lanes;
    PyObject *pool, *helper, *first, *rows, *shared, *result = NULL;
    int64_t nregs = 0, nrows = 0, nshared = 0, *regs = NULL, *given = NULL, *addresses = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO", &pool, &helper, &first, &rows, &shared))
        return NULL;
    if (!is_pool(pool) || object->helper)
        return PyErr_Format(PyExc_TypeError, "run takes a pool, and is not called within itself");
    lanes_clear(self);
    if (!(regs = copied(first, &nregs)) || !(given = copied(rows, &nrows)) ||
        !(addresses = copied(shared, &nshared)))
        goto end;
    if (nrows != 3 * self->nrows || nshared != self->nshared) {
        PyErr_BadArgument();
        goto end;
    }
    for (int64_t i = 0; i < self->nrows; i++) {
        self->rows[i].data = (char *)(intptr_t)given[3 * i];
        self->rows[i].room = given[3 * i + 1];
        self->rows[i].used = given[3 * i + 2];
    }
    for (int64_t i = 0; i < nshared; i++)
        self->shared[i] = (char *)(intptr_t)addresses[i];
    int64_t count = self->width ? nregs / self->width : 0;
    object->helper = helper;
    object->pool = (PoolObject *)pool;
    if (!lanes_frames(self, count)) {
        if (nregs)
            memcpy(self->regs, regs, sizeof *regs * (size_t)nregs);
        if (!lanes_go(self, count)) {
            PyObject *lanes = bytes_of(self->regs, nregs), *sums = said(self);
            PyObject *callers = bytes_of(self->parent, self->nsites ? self->n : 0);
            PyObject *depths = bytes_of(self->depth, self->nsites ? self->n : 0);
            if (lanes && sums && callers && depths)
                result = PyTuple_Pack(4, lanes, sums, callers, depths);
            Py_XDECREF(lanes);
            Py_XDECREF(sums);
            Py_XDECREF(callers);
            Py_XDECREF(depths);
        }
    }
    object->helper = NULL;
end:
    free(regs);
    free(given);
    free(addresses);
    return result;
}

/* forget(): no program is known any more. */
static PyObject *lanes_forget(LanesObject *object, PyObject *unused)
{
    const Lanes *self = &object->lanes;
    (void)unused;
    for (int64_t i = 0; i < self->nsegments; i++)
        for (int64_t k = 0; k < self->segments[i].ncounts; k++)
            self->segments[i].parts[k].known = 0;
    Py_INCREF(Py_None);
    return Py_None;
}

static PyMethodDef lanes_methods[] = {
    {"run", (PyCFunction)lanes_run, METH_VARARGS, "run(pool, helper, first, rows, shared)"},
    {"forget", (PyCFunction)lanes_forget, METH_NOARGS, "Shared operands lie elsewhere now."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot lanes_slots[] = {{Py_tp_new, lanes_new},
                                    {Py_tp_dealloc, lanes_dealloc},
                                    {Py_tp_methods, lanes_methods},
                                    {Py_tp_doc, "Frames of many lanes: see lanes.py."},
                                    {0, NULL}};
static PyType_Spec lanes_spec = {"mlvm.machines.native._native.Lanes", sizeof(LanesObject), 0,
                                 Py_TPFLAGS_DEFAULT, lanes_slots};

/* lane_steps() -> dict: the number of each kind of step */
static PyObject *get_steps(PyObject *module, PyObject *unused)
{
#define FORMAT(name) "si"
#define PAIR(name) , #name, STEP_##name
    (void)module, (void)unused;
    return Py_BuildValue("{" LANE_STEPS(FORMAT) "}" LANE_STEPS(PAIR));
}

static PyMethodDef lanes_functions[] = {
    {"lane_steps", get_steps, METH_NOARGS, "The numbers of the steps of lanes."},
    {NULL, NULL, 0, NULL}};

int lanes_init(PyObject *module)
{
    lanes_type = add_type(module, "Lanes", &lanes_spec);
    return lanes_type ? PyModule_AddFunctions(module, lanes_functions) : -1;
}
