/* Frames of many lanes on their way, as `mlvm/machines/lanes.py` says it in Python.
 *
 * Python makes the code, and has made the rows of arguments. What is left to it meanwhile are
 * memory for more rows, programs that are met for the first time, and errors. All numbers are int64_t; a
 * step begins with its kind, and has what `_flat` in that file writes.
 */
#include "lanes.h"

#include "call.h"
#include "loop.h"

#include <stdlib.h>
#include <string.h>

#define KINDS(X)                                                                         \
    X(run) X(move) X(dup) X(const) X(take) X(put) X(split) X(jump) X(call) X(join)       \
    X(return) X(push) X(read) X(add) X(check)
#define STEP(name) STEP_##name,
enum { KINDS(STEP) };

enum { MOST_FRAMES_DEEP = 10000 };

typedef struct {
    int64_t *of, count, room;
} List;

typedef struct {
    char *data;
    int64_t nbytes, used, room;
} Rows;

typedef struct {
    PyObject *program; /* NULL: Python runs it */
    char **given, **left;
    int known;
} Part;

typedef struct {
    int64_t ncounts, nins, nouts, *counts;
    int64_t *first; /* the number of the first row of each result */
    Part *parts;    /* one for each count, the largest first */
} Segment;

typedef struct {
    int64_t count;
    List frames, *rows;
} Site;

typedef struct {
    PyObject_HEAD
    int64_t *code, *at, nsteps;
    char *heavy;
    int64_t nrows, nsegments, nsites, nshared, width;
    Rows *rows;
    Segment *segments;
    Site *sites;
    int64_t *row_of_shared; /* -1: none yet */
    char **shared;
    /* Frames: */
    int64_t n, room, *regs, *parent, *depth, *site, *waits, *wakes;
    List *ready;
    List records, record_at;
    PyObject *helper; /* while it runs */
    PoolObject *pool;
} LanesObject;

static PyTypeObject *lanes_type;

/* Make room for so many more numbers. Returns 0, or -1 with an exception set. */
static int reserve(List *list, int64_t more)
{
    if (list->count + more <= list->room)
        return 0;
    int64_t room = 2 * list->room > list->count + more ? 2 * list->room : list->count + more + 16;
    int64_t *of = realloc(list->of, sizeof *of * (size_t)room);
    if (!of)
        return PyErr_NoMemory(), -1;
    list->of = of;
    list->room = room;
    return 0;
}

static int append(List *list, const int64_t *numbers, int64_t count)
{
    if (reserve(list, count))
        return -1;
    if (count)
        memcpy(list->of + list->count, numbers, sizeof *numbers * (size_t)count);
    list->count += count;
    return 0;
}

/* --- rows --- */

/* Room for more rows of a size. Returns the first's number, or -1 with an exception set. */
static int64_t more(LanesObject *self, int64_t size, int64_t count)
{
    Rows *rows = &self->rows[size];
    int64_t first = rows->used;
    if (first + count > rows->room) {
        long long address, room;
        PyObject *found = PyObject_CallMethod(self->helper, "grow", "LLL", (long long)size,
                                              (long long)first, (long long)count);
        int failed = !found || !PyArg_ParseTuple(found, "LL", &address, &room);
        Py_XDECREF(found);
        if (failed)
            return -1;
        rows->data = (char *)(intptr_t)address;
        rows->room = room;
    }
    rows->used = first + count;
    return first;
}

/* The row of that number; of one that nothing has been written to, the first. */
static inline char *row(const LanesObject *self, int64_t size, int64_t number)
{
    const Rows *rows = &self->rows[size];
    return rows->data + ((uint64_t)number < (uint64_t)rows->room ? number : 0) * rows->nbytes;
}

static inline int64_t *reg(const LanesObject *self, int64_t frame, int64_t number)
{
    return &self->regs[frame * self->width + number];
}

static int64_t integer_at(const char *p, int64_t nbytes, int64_t is_signed)
{
    switch (nbytes) {
    case 1:
        return is_signed ? *(const int8_t *)p : *(const uint8_t *)p;
    case 2:
        return is_signed ? *(const int16_t *)p : *(const uint16_t *)p;
    case 4:
        return is_signed ? (int64_t)*(const int32_t *)p : (int64_t)*(const uint32_t *)p;
    default:
        return *(const int64_t *)p;
    }
}

static int refuse(LanesObject *self, const char *what, int64_t a, int64_t b)
{
    PyObject *done = PyObject_CallMethod(self->helper, "refuse", "sLL", what, (long long)a, (long long)b);
    Py_XDECREF(done);
    return -1;
}

/* The place that a frame's index says among so many, where `count` of them begin; -1 with an
 * exception set. `s` has the register, its size of rows, and whether it is signed. */
static int64_t place(LanesObject *self, int64_t frame, const int64_t *s, int64_t length, int64_t count)
{
    int64_t given = integer_at(row(self, s[1], *reg(self, frame, s[0])), self->rows[s[1]].nbytes, s[2]);
    int64_t at = given < 0 ? given + length : given;
    if (at < 0 || at > length - count)
        return refuse(self, "index", given, length);
    return at;
}

/* --- programs --- */

/* Have the addresses that a program reads from and writes to. Returns 0, or -1 with an exception. */
static int learn(LanesObject *self, int64_t number, int64_t k)
{
    Segment *segment = &self->segments[number];
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
    Py_CLEAR(part->program);
    if (program_is_straight(program)) {
        Py_INCREF(program);
        part->program = program;
    }
    Py_DECREF(found);
    part->known = !PyErr_Occurred();
    return -!part->known;
}

static int run_part(LanesObject *self, int64_t number, int64_t k)
{
    const Segment *segment = &self->segments[number];
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

/* s: segment, how many operands, their registers and sizes of rows, how many results, theirs. */
static int run_segment(LanesObject *self, const int64_t *s, const List *frames)
{
    int64_t number = s[0], nins = s[1], total = frames->count, start = 0;
    const int64_t *ins = s + 2, *outs = ins + 2 * nins + 1;
    int64_t nouts = outs[-1];
    const Segment *segment = &self->segments[number];
    for (int64_t j = 0; j < nouts; j++) {
        segment->first[j] = more(self, outs[2 * j + 1], total);
        if (segment->first[j] < 0)
            return -1;
    }
    for (int64_t k = 0; k < segment->ncounts; k++) {
        int64_t count = segment->counts[k];
        Part *part = &segment->parts[k];
        for (; total - start >= count; start += count) {
            if (!part->known && learn(self, number, k))
                return -1;
            for (int64_t i = 0; i < nins; i++) {
                size_t nbytes = (size_t)self->rows[ins[2 * i + 1]].nbytes;
                char *to = part->given[i];
                for (int64_t f = start; nbytes && f < start + count; f++, to += nbytes)
                    memcpy(to, row(self, ins[2 * i + 1], *reg(self, frames->of[f], ins[2 * i])), nbytes);
            }
            if (run_part(self, number, k))
                return -1;
            for (int64_t j = 0; j < nouts; j++) {
                int64_t size = outs[2 * j + 1];
                if (self->rows[size].nbytes)
                    memcpy(row(self, size, segment->first[j] + start), part->left[j],
                           (size_t)(self->rows[size].nbytes * count));
            }
        }
    }
    for (int64_t j = 0; j < nouts; j++) /* whose registers may have had operands */
        for (int64_t f = 0; f < total; f++)
            *reg(self, frames->of[f], outs[2 * j]) = segment->first[j] + f;
    return 0;
}

/* --- frames --- */

static int wait_at(LanesObject *self, int64_t pc, const int64_t *frames, int64_t count)
{
    return append(&self->ready[pc], frames, count);
}

static int widen(int64_t **of, int64_t room)
{
    int64_t *wider = realloc(*of, sizeof *wider * (size_t)room);
    if (!wider)
        return PyErr_NoMemory(), -1;
    *of = wider;
    return 0;
}

static int make_frames(LanesObject *self, int64_t count)
{
    if (!count)
        return 0;
    if (self->n + count > self->room) {
        int64_t room = 2 * self->room > self->n + count ? 2 * self->room : self->n + count + 64;
        if (widen(&self->regs, room * self->width) || widen(&self->parent, room) ||
            widen(&self->depth, room) || widen(&self->site, room) || widen(&self->waits, room) ||
            widen(&self->wakes, room))
            return -1;
        self->room = room;
    }
    memset(self->regs + self->n * self->width, 0xff,
           sizeof *self->regs * (size_t)(count * self->width));
    for (int64_t f = self->n; f < self->n + count; f++) {
        self->parent[f] = self->site[f] = self->wakes[f] = -1;
        self->depth[f] = self->waits[f] = 0;
    }
    self->n += count;
    return 0;
}

/* s: entry, how many arguments, pairs of registers, how many results, pairs of registers. */
static int call_function(LanesObject *self, int64_t pc, const int64_t *s, const List *frames)
{
    int64_t first = self->n;
    if (make_frames(self, frames->count) || reserve(&self->ready[s[0]], frames->count))
        return -1;
    for (int64_t i = 0; i < frames->count; i++) {
        int64_t caller = frames->of[i], called = first + i;
        self->parent[called] = caller;
        self->site[called] = pc;
        self->depth[called] = self->depth[caller] + 1;
        if (self->depth[called] > MOST_FRAMES_DEEP)
            return refuse(self, "depth", MOST_FRAMES_DEEP, 0);
        self->waits[caller]++;
        for (int64_t k = 0; k < s[1]; k++)
            *reg(self, called, s[2 + 2 * k]) = *reg(self, caller, s[3 + 2 * k]);
        self->ready[s[0]].of[self->ready[s[0]].count++] = called;
    }
    return 0;
}

static int give_back(LanesObject *self, const List *frames)
{
    for (int64_t i = 0; i < frames->count; i++) {
        int64_t called = frames->of[i], caller = self->parent[called];
        if (caller < 0)
            continue;
        const int64_t *s = self->code + self->at[self->site[called]] + 2; /* after its entry */
        s += 1 + 2 * s[0];
        for (int64_t k = 0; k < s[0]; k++)
            *reg(self, caller, s[1 + 2 * k]) = *reg(self, called, s[2 + 2 * k]);
        if (!--self->waits[caller] && self->wakes[caller] >= 0) {
            if (wait_at(self, self->wakes[caller], &caller, 1))
                return -1;
            self->wakes[caller] = -1;
        }
    }
    return 0;
}

/* Keep those frames for which `stays` holds; the others wait at `other`, if that is not -1. */
static int part_ways(LanesObject *self, List *frames, const char *stays, int64_t other)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < frames->count; i++) {
        if (stays[i])
            frames->of[kept++] = frames->of[i];
        else if (other >= 0 && wait_at(self, other, &frames->of[i], 1))
            return -1;
    }
    frames->count = kept;
    return 0;
}

/* Whether an element is not zero. One of a float is zero whatever its sign. */
static int truth(const char *p, int64_t nbytes, int64_t is_float)
{
    for (int64_t i = 0; i < nbytes; i++)
        if (is_float && i == nbytes - 1 ? p[i] & 0x7f : p[i])
            return 1;
    return 0;
}

/* Run these frames from a step on until they wait. Returns 0, or -1 with an exception set. */
static int go_on(LanesObject *self, int64_t pc, List *frames, char **stays, int64_t *nstays)
{
    int64_t begun = pc;
    while (frames->count) {
        int64_t count = frames->count;
        const int64_t *of = frames->of, *s = self->code + self->at[pc];
        if (self->heavy[pc] && pc != begun)
            return wait_at(self, pc, of, count);
        int64_t kind = *s++;
        switch (kind) {
        case STEP_run:
            if (run_segment(self, s, frames))
                return -1;
            break;
        case STEP_move: /* to, of */
            for (int64_t i = 0; i < count; i++)
                *reg(self, of[i], s[0]) = *reg(self, of[i], s[1]);
            break;
        case STEP_dup: { /* to, of, size */
            int64_t first = more(self, s[2], count);
            if (first < 0)
                return -1;
            for (int64_t i = 0; i < count; i++) {
                memcpy(row(self, s[2], first + i), row(self, s[2], *reg(self, of[i], s[1])),
                       (size_t)self->rows[s[2]].nbytes);
                *reg(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_const: { /* to, number, size */
            int64_t *found = &self->row_of_shared[s[1]];
            if (*found < 0) {
                int64_t made = more(self, s[2], 1);
                if (made < 0)
                    return -1;
                *found = made;
                if (self->rows[s[2]].nbytes)
                    memcpy(row(self, s[2], made), self->shared[s[1]], (size_t)self->rows[s[2]].nbytes);
            }
            for (int64_t i = 0; i < count; i++)
                *reg(self, of[i], s[0]) = *found;
            break;
        }
        case STEP_take: { /* to, of, size of all rows, length, size of one; index */
            int64_t first = more(self, s[4], count);
            if (first < 0)
                return -1;
            size_t nbytes = (size_t)self->rows[s[4]].nbytes;
            for (int64_t i = 0; i < count; i++) {
                int64_t at = place(self, of[i], s + 5, s[3], 1);
                if (at < 0)
                    return -1;
                if (nbytes)
                    memcpy(row(self, s[4], first + i),
                           row(self, s[2], *reg(self, of[i], s[1])) + (size_t)at * nbytes, nbytes);
                *reg(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_put: { /* to, value, size of all rows, length, size of the value, rows of it; index */
            for (int64_t i = 0; i < count; i++) {
                int64_t *to = reg(self, of[i], s[0]), at = place(self, of[i], s + 6, s[3], s[5]);
                if (at < 0)
                    return -1;
                if (*to < 0) {
                    int64_t made = more(self, s[2], 1);
                    if (made < 0)
                        return -1;
                    *to = made;
                    memset(row(self, s[2], made), 0, (size_t)self->rows[s[2]].nbytes);
                }
                size_t nbytes = (size_t)self->rows[s[4]].nbytes;
                if (nbytes)
                    memcpy(row(self, s[2], *to) + (size_t)at * (nbytes / (size_t)s[5]),
                           row(self, s[4], *reg(self, of[i], s[1])), nbytes);
            }
            break;
        }
        case STEP_split:  /* condition, size, whether a float, other */
        case STEP_join: {
            if (count > *nstays) {
                char *wider = realloc(*stays, (size_t)count);
                if (!wider)
                    return PyErr_NoMemory(), -1;
                *stays = wider;
                *nstays = count;
            }
            for (int64_t i = 0; i < count; i++) {
                if (kind == STEP_split)
                    (*stays)[i] = (char)truth(row(self, s[1], *reg(self, of[i], s[0])),
                                              self->rows[s[1]].nbytes, s[2]);
                else {
                    (*stays)[i] = !self->waits[of[i]];
                    self->wakes[of[i]] = (*stays)[i] ? -1 : pc + 1;
                }
            }
            if (part_ways(self, frames, *stays, kind == STEP_split ? s[3] : -1))
                return -1;
            break;
        }
        case STEP_jump:
            if (PyErr_CheckSignals())
                return -1;
            pc = s[0] - 1;
            break;
        case STEP_call:
            if (call_function(self, pc, s, frames))
                return -1;
            break;
        case STEP_return:
            return give_back(self, frames);
        case STEP_push: { /* number, its size, how many, registers */
            int64_t first = more(self, s[1], count);
            if (first < 0 || reserve(&self->records, count * s[2]) || reserve(&self->record_at, count))
                return -1;
            for (int64_t i = 0; i < count; i++) {
                self->record_at.of[self->record_at.count++] = self->records.count;
                *(int64_t *)row(self, s[1], first + i) = self->record_at.count; /* from 1 on */
                for (int64_t k = 0; k < s[2]; k++)
                    self->records.of[self->records.count++] = *reg(self, of[i], s[3 + k]);
                *reg(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_read: /* number, its size, how many, registers */
            for (int64_t i = 0; i < count; i++) {
                int64_t number = *(int64_t *)row(self, s[1], *reg(self, of[i], s[0])) - 1;
                if (number < 0 || number >= self->record_at.count ||
                    self->record_at.of[number] + s[2] > self->records.count)
                    return refuse(self, "record", number, 0);
                for (int64_t k = 0; k < s[2]; k++)
                    *reg(self, of[i], s[3 + k]) = self->records.of[self->record_at.of[number] + k];
            }
            break;
        case STEP_add: { /* site, how many, registers */
            Site *site = &self->sites[s[0]];
            if (append(&site->frames, of, count))
                return -1;
            for (int64_t k = 0; k < s[1]; k++) {
                if (reserve(&site->rows[k], count))
                    return -1;
                for (int64_t i = 0; i < count; i++)
                    site->rows[k].of[site->rows[k].count++] = *reg(self, of[i], s[2 + k]);
            }
            break;
        }
        case STEP_check: /* condition, size, number of the step */
            for (int64_t i = 0; i < count; i++) {
                const char *p = row(self, s[1], *reg(self, of[i], s[0]));
                for (int64_t k = 0; k < self->rows[s[1]].nbytes; k++)
                    if (!p[k])
                        return refuse(self, "check", pc, 0);
            }
            break;
        default:
            return PyErr_BadArgument(), -1;
        }
        pc++;
    }
    return 0;
}

/* Where to go on: what is light first, then where most frames wait; -1 if none do. */
static int64_t choice(const LanesObject *self)
{
    int64_t best = -1;
    for (int64_t pc = 0; pc < self->nsteps; pc++) {
        if (!self->ready[pc].count)
            continue;
        if (!self->heavy[pc])
            return pc;
        if (best < 0 || self->ready[pc].count > self->ready[best].count)
            best = pc;
    }
    return best;
}

static int go(LanesObject *self, int64_t count)
{
    List frames = {0};
    char *stays = NULL;
    int64_t nstays = 0, pc;
    int failed = reserve(&self->ready[0], count);
    for (int64_t f = 0; !failed && f < count; f++)
        self->ready[0].of[self->ready[0].count++] = f;
    while (!failed && (pc = choice(self)) >= 0) {
        List now = self->ready[pc];
        self->ready[pc] = frames;
        self->ready[pc].count = 0;
        frames = now;
        failed = go_on(self, pc, &frames, &stays, &nstays) || PyErr_CheckSignals();
    }
    free(frames.of);
    free(stays);
    return -failed;
}

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
    LanesObject *self = (LanesObject *)object_of(type);
    int64_t count, *numbers = NULL;
    if (!self)
        return NULL;
    self->width = width;
    self->nshared = nshared;
    if (!(self->code = copied(code, &count)) || !(self->at = copied(at, &self->nsteps)) ||
        !(numbers = copied(heavy, &count)))
        goto failed;
    self->heavy = calloc((size_t)self->nsteps + 1, 1);
    self->ready = calloc((size_t)self->nsteps + 1, sizeof *self->ready);
    self->row_of_shared = calloc((size_t)nshared + 1, sizeof *self->row_of_shared);
    self->shared = calloc((size_t)nshared + 1, sizeof *self->shared);
    if (!self->heavy || !self->ready || !self->row_of_shared || !self->shared)
        goto no_memory;
    for (int64_t i = 0; i < count; i++)
        self->heavy[numbers[i]] = 1;
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
    return (PyObject *)self;
no_memory:
    PyErr_NoMemory();
failed:
    free(numbers);
    Py_DECREF(self);
    return NULL;
}

static void lanes_dealloc(LanesObject *self)
{
    for (int64_t i = 0; self->segments && i < self->nsegments; i++) {
        Segment *segment = &self->segments[i];
        for (int64_t k = 0; segment->parts && k < segment->ncounts; k++) {
            Py_XDECREF(segment->parts[k].program);
            free(segment->parts[k].given);
            free(segment->parts[k].left);
        }
        free(segment->parts);
        free(segment->first);
        free(segment->counts);
    }
    for (int64_t i = 0; self->sites && i < self->nsites; i++) {
        for (int64_t k = 0; self->sites[i].rows && k < self->sites[i].count; k++)
            free(self->sites[i].rows[k].of);
        free(self->sites[i].rows);
        free(self->sites[i].frames.of);
    }
    for (int64_t pc = 0; self->ready && pc < self->nsteps; pc++)
        free(self->ready[pc].of);
    int64_t *arrays[] = {self->code,  self->at,    self->row_of_shared, self->regs,      self->parent,
                         self->depth, self->site,  self->waits,         self->wakes,     self->records.of,
                         self->record_at.of};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++)
        free(arrays[i]);
    free(self->heavy);
    free(self->ready);
    free(self->shared);
    free(self->rows);
    free(self->segments);
    free(self->sites);
    free_object((PyObject *)self);
}

static PyObject *bytes_of(const int64_t *numbers, int64_t count)
{
    return PyBytes_FromStringAndSize((const char *)numbers, (Py_ssize_t)(count * (int64_t)sizeof *numbers));
}

/* What frames have said at the sites: [(frames, [rows of each operand])]. */
static PyObject *said(LanesObject *self)
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
static PyObject *lanes_run(LanesObject *self, PyObject *args)
{
    PyObject *pool, *helper, *first, *rows, *shared, *result = NULL;
    int64_t nregs = 0, nrows = 0, nshared = 0, *regs = NULL, *given = NULL, *addresses = NULL;
    if (!PyArg_ParseTuple(args, "OOOOO", &pool, &helper, &first, &rows, &shared))
        return NULL;
    if (!is_pool(pool) || self->helper)
        return PyErr_Format(PyExc_TypeError, "run takes a pool, and is not called within itself");
    self->n = self->records.count = self->record_at.count = 0;
    for (int64_t pc = 0; pc < self->nsteps; pc++)
        self->ready[pc].count = 0;
    for (int64_t i = 0; i < self->nsites; i++) {
        self->sites[i].frames.count = 0;
        for (int64_t k = 0; k < self->sites[i].count; k++)
            self->sites[i].rows[k].count = 0;
    }
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
    for (int64_t i = 0; i < nshared; i++) {
        self->row_of_shared[i] = -1;
        self->shared[i] = (char *)(intptr_t)addresses[i];
    }
    int64_t count = self->width ? nregs / self->width : 0;
    self->helper = helper;
    self->pool = (PoolObject *)pool;
    if (!make_frames(self, count)) {
        if (nregs)
            memcpy(self->regs, regs, sizeof *regs * (size_t)nregs);
        if (!go(self, count)) {
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
    self->helper = NULL;
end:
    free(regs);
    free(given);
    free(addresses);
    return result;
}

/* forget(): no program is known any more. */
static PyObject *lanes_forget(LanesObject *self, PyObject *unused)
{
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
    return Py_BuildValue("{" KINDS(FORMAT) "}" KINDS(PAIR));
}

static PyMethodDef lanes_functions[] = {
    {"lane_steps", get_steps, METH_NOARGS, "The numbers of the steps of lanes."},
    {NULL, NULL, 0, NULL}};

int lanes_init(PyObject *module)
{
    lanes_type = add_type(module, "Lanes", &lanes_spec);
    return lanes_type ? PyModule_AddFunctions(module, lanes_functions) : -1;
}
