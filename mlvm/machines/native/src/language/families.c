/* Calls that differ from other calls only by numbers: lengths of operands, or integers among the arguments.
 *
 * In:        the key of a call that has no template, from templates.c.
 * Out:       the call's result, computed by an open template: the steps of such calls, with formulas of the
 *            numbers for the types of results and for the integers of kernels.
 * Must hold: an open template is made of a trace in which the numbers are open
 *            (mlvm/eager/recording/families.py); its guards are all that the trace and the planners have seen of
 *            them. All else in the key is compared. Its steps are those of a recorded template, one by one.
 *            The numbers from -1 to 1 are not open: for 0 and 1 the type rules make exceptions. Under a tape each
 *            step with a tracked operand adds the node that `Tape.record` would add.
 * Callers:   `call_composed` in templates.c.
 * Locks:     the interpreter lock; the VM's lock while a kernel's integers are written and it runs.
 */
#include "templates.h"
#include "views.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_NUMBERS = 32, MOST_OPEN = 8, MOST_FAILURES = 4, FAMILIES = 512, LEAST_OPEN = 2, RECENT = 4 };
/* MOST_FAILURES: after this number of failed traces and replaced templates, traces do not become less frequent.
 * MOST_CALLS: calls with one key by open templates, before the key gets a separate template, and gets it again after
 * other keys have replaced it: making one takes as long as it saves in this number of calls. */
enum { MOST_CALLS = 100, MOST_FORMULAS = 1024 };

/* A step: `call` is NULL for a view. The lengths of its result are formulas. `node` is the template of its node on a
 * tape, NULL if no operand is tracked. With `places`, it is a function that returns the template for the types of the
 * operands and the numbers at these places of formulas. */
typedef struct {
    KernelCallObject *call;
    PyObject *dtype, *node, *places;
    int ndim, dims[MOST_AXES];
} OpenStep;

typedef struct {
    PyObject_HEAD FormulasObject *formulas;
    int *guards; /* places of formulas */
    Number *guarded;
    OpenStep *steps;
    Template *template; /* the template with these steps, the key and the result */
    int *scalars;       /* for each constant of the template: the formula of the value, or -1 */
    int64_t numbers[MOST_NUMBERS];
    int inputs[MOST_NUMBERS]; /* for each number of the key: the number of the input, or -1 */
    int nguards, nsteps, nnumbers, nscalars;
    long long generation;
} OpenTemplate;

/* Calls that differ only by numbers. */
typedef struct {
    uint64_t hash;
    int64_t before[RECENT][MOST_NUMBERS]; /* numbers of the last calls */
    int ncalls, nfailures, nopen;
    OpenTemplate *open[MOST_OPEN];
} Family;

static long long open_calls; /* calls that open templates ran */
static int calls_before = 6; /* calls with different numbers before a trace */
static Family families[FAMILIES];
static PyTypeObject *open_type;
static PyObject *trace; /* of Python, which returns an open template */
static const Installed objects[] = {{"trace", &trace}, {NULL, NULL}};
#define NAMES(EACH) EACH(op) EACH(attributes)
NAMES(DECLARE_NAME)
static const Template *generalized; /* the template that the trace must repeat */

/* --- numbers of a key --- */

/* List the numbers of a key: lengths of operands, and arguments (floats as bits); hash everything
 * else. Returns the number of numbers; -1 if no other key can belong to the same family. */
static int numbers_of(const Key *key, PyObject *function, int64_t *numbers, char *is_float, uint64_t *hash)
{
    int count = 0;
    *hash = (uintptr_t)function ^ (uint64_t)key->fast_path->number << 40;
    for (int i = 0; i < key->nitems; i++) {
        const Item *item = &key->items[i];
        uint64_t bits = item->bits;
        if (item->kind == TYPE || item->kind == TRACKED_TYPE) {
            Layout layout;
            if (!layout_of(item->object, &layout) || count + layout.ndim > MOST_NUMBERS)
                return -1;
            memcpy(numbers + count, layout.dims, sizeof *numbers * (size_t)layout.ndim);
            memset(is_float + count, 0, (size_t)layout.ndim);
            count += layout.ndim;
            bits = (uintptr_t)layout.dtype + (uint64_t)layout.ndim;
        } else if (item->kind == NUMBER) {
            if (count == MOST_NUMBERS)
                return -1;
            is_float[count] = item->object == (PyObject *)&PyFloat_Type;
            numbers[count++] = (int64_t)bits;
            bits = (uint64_t)is_float[count - 1];
        }
        *hash = (*hash ^ bits ^ (uint64_t)item->kind << 56) * 0x9E3779B97F4A7C15u;
        *hash ^= *hash >> 29;
    }
    return count;
}

/* Whether a key differs from the key of a template at most by open numbers. */
static int is_of(const OpenTemplate *self, PyObject *function, const Key *key, const int64_t *numbers,
                 const char *is_float, int count)
{
    const Template *template = self->template;
    if (template->function != function || template->nitems != key->nitems || self->nnumbers != count ||
        template->fast_path != key->fast_path->number || self->generation != key->fast_path->generation)
        return 0;
    for (int i = 0; i < count; i++)
        if (self->inputs[i] < 0 ? numbers[i] != self->numbers[i]
                                : !is_float[i] && llabs(numbers[i]) < LEAST_OPEN)
            return 0;
    for (int i = 0; i < key->nitems; i++) {
        const Item *ours = &template->items[i], *theirs = &key->items[i];
        Layout a, b;
        if (ours->kind != theirs->kind)
            return 0;
        if (ours->kind == TYPE || ours->kind == TRACKED_TYPE) {
            if (!layout_of(ours->object, &a) || !layout_of(theirs->object, &b) || a.dtype != b.dtype ||
                a.ndim != b.ndim)
                return 0;
        } else if (ours->kind == NUMBER) {
            if (theirs->object != ours->object)
                return 0;
        } else if (!is_same_item(ours, theirs)) {
            return 0;
        }
    }
    return 1;
}

/* Compute all formulas for these numbers. Returns whether the guards hold. */
static int holds(const OpenTemplate *self, const int64_t *numbers, const char *is_float, Number *values)
{
    const FormulasObject *formulas = self->formulas;
    memcpy(values, formulas->numbers, sizeof *values * (size_t)formulas->count);
    for (Py_ssize_t i = 0; i < formulas->inputs; i++)
        values[i].kind = UNDEFINED;
    for (int i = 0; i < self->nnumbers; i++) {
        int input = self->inputs[i];
        if (input < 0)
            continue;
        Number value = {INTEGRAL, numbers[i], 0};
        if (is_float[i]) {
            value = (Number){REAL, 0, 0};
            memcpy(&value.real, &numbers[i], sizeof value.real);
        }
        if (values[input].kind != UNDEFINED && !is_same_number(&values[input], &value))
            return 0; /* numbers that are the same input stay the same */
        values[input] = value;
    }
    evaluate(formulas->formulas, values, formulas->count);
    for (int i = 0; i < self->nguards; i++)
        if (!is_same_number(&values[self->guards[i]], &self->guarded[i]))
            return 0;
    return 1;
}

/* --- calls --- */

/* Get the tensor of each constant; the tensors of numbers are new. Returns 0, with some of the
 * tensors, if the VM has freed a constant or Python must run the call. */
static int find_constants(const OpenTemplate *self, const Number *values, PyObject **constants)
{
    const Template *template = self->template;
    PyObject *arena = template->nconstants ? referent(template->constant_arena) : NULL;
    int done = arena || !template->nconstants;
    for (int i = 0; i < self->nscalars && done; i++) {
        const Number *value = &values[self->scalars[i] < 0 ? 0 : self->scalars[i]];
        PyObject *number = self->scalars[i] < 0      ? NULL
                           : value->kind == INTEGRAL ? PyLong_FromLongLong(value->integer)
                           : value->kind == REAL     ? PyFloat_FromDouble(value->real)
                                                     : NULL;
        if (number)
            constants[i] = (PyObject *)tensor_of_number(arena, template->constant_types[i], number);
        else if (self->scalars[i] < 0)
            constants[i] = referent(template->constants[i]);
        Py_XDECREF(number);
        done = constants[i] != NULL;
    }
    Py_XDECREF(arena);
    return done;
}

/* Whether the VM has freed a constant, which makes the template unusable. */
static int has_lost_constants(const OpenTemplate *self)
{
    for (int i = 0; i < self->nscalars; i++)
        if (self->scalars[i] < 0 && PyWeakref_GetObject(self->template->constants[i]) == Py_None)
            return 1;
    return 0;
}

/* Add the node of a step with `count` operands. Returns 1; 0 if Python must run the call. */
static int note_node(const OpenStep *step, const Key *key, const Number *values,
                     Allocation *const *operands, int count, Allocation *out)
{
    int nplaces = step->places ? (int)PyTuple_Size(step->places) : 0, done = 1;
    PyObject *parts = PyTuple_New(count + nplaces), *node = NULL;
    for (int i = 0; parts && i < count; i++)
        PyTuple_SetItem(parts, i, Py_NewRef(operands[i]->type));
    for (int i = 0; parts && done && i < nplaces; i++) {
        const Number *value = &values[PyLong_AsLong(PyTuple_GetItem(step->places, i))];
        done = value->kind == INTEGRAL &&
               !PyTuple_SetItem(parts, count + i, PyLong_FromLongLong(value->integer));
    }
    if (parts && done)
        node = step->places ? PyObject_CallFunctionObjArgs(step->node, parts, NULL) : Py_NewRef(step->node);
    done = node && !add_node(key->tape, node, operands, out);
    Py_XDECREF(parts);
    Py_XDECREF(node);
    return done;
}

/* Run the steps, or one step that writes to `into`. NULL with no exception set if Python must run the call. */
static PyObject *run_open(OpenTemplate *self, const Key *key, const Number *values, Allocation *into)
{
    const Template *template = self->template;
    PyObject *tensors[MOST_VALUES], *constants[MOST_STEPS], *result = NULL;
    int first = key->ntensors;
    memset(tensors + first, 0, sizeof *tensors * (size_t)self->nsteps);
    memset(constants, 0, sizeof *constants * (size_t)self->nscalars);
    int done = (!into || self->nsteps == 1) && find_constants(self, values, constants);
    for (int i = 0; i < first; i++)
        tensors[i] = Py_NewRef((PyObject *)key->tensors[i]); /* a list may change meanwhile */
    for (int i = 0; i < self->nsteps && done > 0; i++) {
        const OpenStep *open = &self->steps[i];
        const TemplateStep *step = &template->steps[i];
        int64_t dims[MOST_AXES];
        for (int j = 0; j < open->ndim; j++) {
            const Number *length = &values[open->dims[j]];
            done &= length->kind == INTEGRAL && length->integer >= 0;
            dims[j] = length->integer;
        }
        PyObject *type = done ? type_of(open->dtype, dims, open->ndim) : NULL;
        Allocation *places[MOST_OPERANDS + 2], *out = NULL;
        for (int j = 0; j < step->count; j++)
            places[1 + j] = (Allocation *)(step->operands[j] < 0 ? constants[-1 - step->operands[j]]
                                                                 : tensors[step->operands[j]]);
        if (type && open->call) {
            out = into ? (Allocation *)(into->type == type ? Py_NewRef((PyObject *)into) : NULL)
                       : tensor_in(key->arena, type);
            places[0] = out;
            done = out ? run_kernel(open->call, key->fast_path, self->generation, places, 1 + step->count,
                                    values, self->formulas->count)
                       : 0;
        } else if (type && !into) {
            out = (Allocation *)view_as(places[1], type);
        }
        Py_XDECREF(type);
        tensors[first + i] = (PyObject *)out;
        done = out ? done : 0;
        if (done > 0 && step->call && ((Call *)step->call)->gives_part)
            set(&out->is_part, Py_True);
        if (done > 0 && open->node && !into) /* the caller records an update */
            done = note_node(open, key, values, places + 1, step->count, out);
        for (int j = step->freed; done > 0 && j >= 0; j = template->steps[j].next)
            Py_CLEAR(tensors[first + j]);
    }
    if (done > 0)
        result = result_of(template, tensors);
    for (int i = 0; i < first + self->nsteps; i++)
        Py_XDECREF(tensors[i]);
    for (int i = 0; i < self->nscalars; i++)
        Py_XDECREF(constants[i]);
    if (!result)
        clear_nonfatal_error(); /* the function raises it again */
    return result;
}

/* Create a family. Freeing the templates of the old family may run Python, which must find the new
 * family. */
static void begin_family(Family *family, uint64_t hash)
{
    Family old = *family;
    memset(family, 0, sizeof *family);
    family->hash = hash;
    for (int i = 0; i < old.nopen; i++)
        Py_DECREF((PyObject *)old.open[i]);
}

/* Return the family with the hash, else the one to replace: of two slots, the slot that was not used last. A function
 * and an op inside it may have the same two slots. */
static Family *family_of(uint64_t hash)
{
    static char last[FAMILIES / 2];
    size_t pair = hash % (FAMILIES / 2);
    Family *family = &families[2 * pair];
    int which = family[0].hash == hash ? 0 : family[1].hash == hash ? 1 : !last[pair];
    last[pair] = (char)which;
    return family + which;
}

static PyObject *call_in_family(PyObject *function, const Key *key, int *learns, Allocation *into)
{
    int64_t numbers[MOST_NUMBERS];
    char is_float[MOST_NUMBERS];
    Number values[MOST_FORMULAS];
    uint64_t hash;
    /* If an outer call is being recorded, the recording needs each step. */
    if (!templates_enabled || (key->tape != Py_None && !is_tape(key->tape)) || is_recording())
        return NULL;
    int *calls = into ? NULL : calls_of(key->hash);
    if (calls && *calls % MOST_CALLS == MOST_CALLS - 1)
        return ++*calls, NULL;
    int count = numbers_of(key, function, numbers, is_float, &hash);
    if (count <= 0)
        return NULL;
    Family *family = family_of(hash);
    if (family->hash != hash)
        begin_family(family, hash);
    /* Comparing types may free a type, which runs Python: a different thread may recreate the family. */
    for (int i = 0; i < family->nopen && family->hash == hash; i++) {
        OpenTemplate *open = (OpenTemplate *)Py_NewRef((PyObject *)family->open[i]);
        int fits = is_of(open, function, key, numbers, is_float, count) &&
                   holds(open, numbers, is_float, values);
        PyObject *result = fits ? run_open(open, key, values, into) : NULL;
        if (fits && !result && has_lost_constants(open))
            begin_family(family, hash);
        if (result && family->hash == hash && family->open[i] == open) { /* the last one is replaced */
            memmove(family->open + 1, family->open, sizeof *family->open * (size_t)i);
            family->open[0] = open;
        }
        Py_DECREF((PyObject *)open);
        if (!fits)
            continue;
        if (result) {
            open_calls++;
            *calls_of(key->hash) += !into;
        }
        return result;
    }
    size_t nbytes = sizeof *numbers * (size_t)count;
    if (!family->ncalls || memcmp(numbers, family->before[0], nbytes)) {
        memmove(family->before[1], family->before[0], sizeof family->before - sizeof family->before[0]);
        memcpy(family->before[0], numbers, nbytes);
        family->ncalls++;
    }
    *learns = trace && family->ncalls >= calls_before << (2 * family->nfailures);
    return NULL;
}

/* The key of a call of an op, whose keywords are the attributes. Returns 0 if it has none. */
static int key_of(Key *key, PyObject *op, PyObject *attributes, FastPath *fast_path, PyObject *arena,
                  Allocation *const *operands, int count)
{
    key->nitems = key->ntensors = 0;
    key->hash = (uintptr_t)op;
    key->fast_path = fast_path;
    key->arena = arena;
    PyObject *context = present_context();
    int fits = context && add_context(key, context);
    Py_XDECREF(context); /* the thread or task keeps its tape */
    for (int i = 0; fits && i < count; i++)
        fits = add_argument(key, (PyObject *)operands[i], 0);
    return fits && add_keywords(key, attributes);
}

/* Assign inputs to the numbers that differ from an earlier call; equal numbers share an input.
 * Returns the number of inputs. */
static int inputs_of(const int64_t *numbers, const int64_t *before, const char *is_float, int count,
                     int *inputs)
{
    int ninputs = 0;
    for (int i = 0; i < count; i++) {
        inputs[i] = -1;
        if (numbers[i] == before[i])
            continue;
        if (!is_float[i] && llabs(numbers[i]) < LEAST_OPEN)
            return 0;
        for (int j = 0; j < i && inputs[i] < 0; j++)
            if (inputs[j] >= 0 && is_float[j] == is_float[i] && numbers[j] == numbers[i] &&
                before[j] == before[i])
                inputs[i] = inputs[j];
        if (inputs[i] < 0)
            inputs[i] = ninputs++;
    }
    return ninputs;
}

/* Compare with the call of an open template in the same way; the open numbers of this template stay open. */
static int inputs_beside(const OpenTemplate *open, const int64_t *numbers, const char *is_float, int count,
                         int *inputs)
{
    int64_t before[MOST_NUMBERS];
    for (int i = 0; i < count; i++)
        before[i] = open->inputs[i] < 0 || open->numbers[i] != numbers[i] ? open->numbers[i] : ~numbers[i];
    return inputs_of(numbers, before, is_float, count, inputs);
}

/* Trace the call with these numbers open. Returns NULL without an open template that has the steps of the template. */
static OpenTemplate *traced(Template *template, PyObject *args, PyObject *keywords, const int64_t *numbers,
                            const char *is_float, const int *inputs, int count)
{
    Number values[MOST_FORMULAS];
    PyObject *list = PyList_New(count), *open = NULL;
    for (int i = 0; list && i < count; i++)
        if (PyList_SetItem(list, i, PyLong_FromLong(inputs[i])))
            Py_CLEAR(list);
    generalized = template;
    if (list)
        open = PyObject_CallFunctionObjArgs(trace, template->function, args, keywords ? keywords : Py_None,
                                            list, NULL);
    generalized = NULL;
    Py_XDECREF(list);
    OpenTemplate *made = (OpenTemplate *)open;
    if (open && Py_TYPE(open) == open_type && made->nsteps == template->nsteps &&
        made->nscalars == template->nconstants) {
        made->template = template;
        template->users++;
        memcpy(made->numbers, numbers, sizeof made->numbers);
        memcpy(made->inputs, inputs, sizeof made->inputs);
        made->nnumbers = count;
        if (holds(made, numbers, is_float, values))
            return made;
    }
    Py_XDECREF(open);
    return NULL;
}

static int generalize(Template *template, PyObject *args, PyObject *keywords, const Key *key)
{
    if (!template)
        return 0;
    PyObject *function = template->function;
    int64_t numbers[MOST_NUMBERS];
    char is_float[MOST_NUMBERS];
    int inputs[MOST_NUMBERS];
    uint64_t hash;
    int count = numbers_of(key, function, numbers, is_float, &hash);
    Family *family = count > 0 ? family_of(hash) : NULL;
    if (!family || family->hash != hash || generalized)
        return 0;
    int fits = template->ncodes, nrecent = family->ncalls < RECENT ? family->ncalls : RECENT, failed = 0;
    for (int i = 0; fits && i < template->nsteps; i++)
        fits = template->steps[i].kind == APPLY ||
               (template->steps[i].kind == ALIAS && template->steps[i].call);
    family->ncalls = 0; /* start counting for the next attempt */
    family->nfailures += family->nfailures < MOST_FAILURES;
    OpenTemplate *made = NULL;
    template->users++;
    /* Open what differs from the call of an open template; if this fails, what differs from a recent call. Calls of
     * several kinds may alternate, so the call with the most equal numbers is selected. */
    for (int recent = !family->nopen; fits && !made && !failed && recent < 2; recent++) {
        int ninputs = 0, ncalls = recent ? nrecent : family->nopen;
        for (int i = recent; i < ncalls; i++) { /* before[0] is this call */
            int others[MOST_NUMBERS];
            int nothers = recent ? inputs_of(numbers, family->before[i], is_float, count, others)
                                 : inputs_beside(family->open[i], numbers, is_float, count, others);
            if (nothers && (!ninputs || nothers < ninputs)) {
                memcpy(inputs, others, sizeof inputs);
                ninputs = nothers;
            }
        }
        made = ninputs ? traced(template, args, keywords, numbers, is_float, inputs, count) : NULL;
        failed = clear_nonfatal_error();
    }
    if (made && family->hash == hash) {
        int is_full = family->nopen == MOST_OPEN;
        OpenTemplate *last = is_full ? family->open[MOST_OPEN - 1] : NULL;
        made->generation = key->fast_path->generation;
        family->nopen += !is_full;
        family->nfailures -= !is_full && family->nfailures; /* a family begun meanwhile has none */
        memmove(family->open + 1, family->open, sizeof *family->open * (size_t)(family->nopen - 1));
        family->open[0] = (OpenTemplate *)Py_NewRef((PyObject *)made);
        Py_XDECREF((PyObject *)last);
    }
    release_template(template);
    Py_XDECREF((PyObject *)made);
    return failed ? -1 : 0;
}

/* As `generalize`, with the template of the one step. */
static int generalize_op(PyObject *op, PyObject *attributes, const Key *key, Allocation *const *operands,
                         int count)
{
    Template *template = new_template(op, key, 1, 0, 1);
    PyObject *args = template ? tuple_of((PyObject *const *)operands, count) : NULL;
    int failed = 0;
    if (args) {
        TemplateStep *step = template->steps;
        *step = (TemplateStep){
            .kind = APPLY, .count = (short)count, .last = MOST_STEPS, .freed = -1, .next = -1};
        template->codes[0] = (short)key->ntensors;
        for (int i = 0; i < count; i++)
            while (key->tensors[step->operands[i]] != operands[i])
                step->operands[i]++;
        failed = generalize(template, args, PyDict_CheckExact(attributes) ? attributes : NULL, key);
    }
    release_template(template);
    Py_XDECREF(args);
    return failed;
}

/* Run a call of an op by an open template, or learn from a call that has run. */
static PyObject *apply_in_family(PyObject *call, FastPath *fast_path, PyObject *arena,
                                 Allocation *const *operands, int count, int *learns, int has_run)
{
    Key key;
    PyObject *op = PyObject_GetAttr(call, op_name), *result = NULL;
    PyObject *attributes = op ? PyObject_GetAttr(call, attributes_name) : NULL;
    if (attributes && is_quiet() && key_of(&key, op, attributes, fast_path, arena, operands, count)) {
        if (has_run)
            generalize_op(op, attributes, &key, operands, count);
        else
            result = call_in_family(op, &key, learns, NULL);
    }
    Py_XDECREF(op);
    Py_XDECREF(attributes);
    return result;
}

/* call_into(out, op, operands, attributes): write the result of an op to the bytes of `out`, which nothing else needs, by
 * an open template. False if there is none: this call may show how to make one. */
static PyObject *call_into(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 4 || Py_TYPE(args[0]) != tensor_class || !PyTuple_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "expected (tensor, op, tuple, mapping), got %zd args", nargs);
    Key key;
    int count = (int)PyTuple_Size(args[2]), learns = 0;
    Allocation *out = (Allocation *)args[0], *operands[MOST_OPERANDS];
    Region *home = home_of(out);
    FastPath *fast_path = out->arena && count <= MOST_OPERANDS && is_quiet() ? fast_path_of(out->arena)
                                                                             : NULL;
    PyObject *result = NULL;
    for (int i = 0; fast_path && i < count; i++)
        operands[i] = (Allocation *)PyTuple_GetItem(args[2], i);
    if (fast_path && is_unwatched(fast_path) && home && !home->watched &&
        key_of(&key, args[1], args[3], fast_path, out->arena, operands, count)) {
        result = call_in_family(args[1], &key, &learns, out);
        if (learns && !PyErr_Occurred())
            generalize_op(args[1], args[3], &key, operands, count);
    }
    Py_XDECREF(result);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(result != NULL);
}

/* --- open templates --- */

static void open_dealloc(OpenTemplate *self)
{
    for (int i = 0; i < self->nsteps; i++) {
        Py_XDECREF((PyObject *)self->steps[i].call);
        Py_XDECREF(self->steps[i].dtype);
        Py_XDECREF(self->steps[i].node);
        Py_XDECREF(self->steps[i].places);
    }
    release_template(self->template);
    Py_XDECREF((PyObject *)self->formulas);
    PyMem_Free(self->guards);
    PyMem_Free(self->guarded);
    PyMem_Free(self->scalars);
    PyMem_Free(self->steps);
    free_object((PyObject *)self);
}

static int read_step(OpenStep *step, PyObject *entry, Py_ssize_t count)
{
    PyObject *call, *dtype, *dims, *node, *places;
    if (!PyArg_ParseTuple(entry, "OOO!OO", &call, &dtype, &PyTuple_Type, &dims, &node, &places))
        return -1;
    step->ndim = (int)PyTuple_Size(dims);
    if ((call != Py_None && !is_kernel_call(call)) || step->ndim > MOST_AXES)
        return PyErr_Format(PyExc_TypeError, "expected a KernelCall of 0..8 axes, got %R", entry), -1;
    for (int i = 0; i < step->ndim; i++) {
        step->dims[i] = (int)PyLong_AsLong(PyTuple_GetItem(dims, i));
        if (PyErr_Occurred() || step->dims[i] < 0 || step->dims[i] >= count)
            return PyErr_Format(PyExc_IndexError, "expected dims below %d, got %R", (int)count, dims), -1;
    }
    step->call = call == Py_None ? NULL : (KernelCallObject *)Py_NewRef(call);
    step->dtype = Py_NewRef(dtype);
    step->node = node == Py_None ? NULL : Py_NewRef(node);
    step->places = places == Py_None ? NULL : Py_NewRef(places);
    return 0;
}

/* open_template(formulas, guards, steps, scalars): guards are (number, value, ...), a step is (kernel call or None,
 * dtype, numbers of the lengths of its result, node, places), scalars are the numbers of constants, -1 for those that
 * are fixed. */
static PyObject *open_template(PyObject *module, PyObject *args)
{
    PyObject *formulas, *guards, *steps, *scalars;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!O!O!:open_template", &formulas, &PyTuple_Type, &guards, &PyList_Type,
                          &steps, &PyList_Type, &scalars))
        return NULL;
    if (!is_formulas(formulas) || ((FormulasObject *)formulas)->count > MOST_FORMULAS)
        return PyErr_Format(PyExc_TypeError, "expected 0 to %d Formulas, got %R", MOST_FORMULAS, formulas);
    OpenTemplate *self = (OpenTemplate *)object_of(open_type);
    if (!self)
        return NULL;
    self->formulas = (FormulasObject *)Py_NewRef(formulas);
    Py_ssize_t count = self->formulas->count, nguards = PyTuple_Size(guards) / 2,
               nsteps = PyList_Size(steps);
    self->guards = PyMem_Calloc((size_t)nguards + 1, sizeof *self->guards);
    self->guarded = PyMem_Calloc((size_t)nguards + 1, sizeof *self->guarded);
    self->steps = PyMem_Calloc((size_t)nsteps + 1, sizeof *self->steps);
    self->nscalars = (int)PyList_Size(scalars);
    self->scalars = PyMem_Calloc((size_t)self->nscalars + 1, sizeof *self->scalars);
    int failed = !self->guards || !self->guarded || !self->steps || !self->scalars;
    for (int i = 0; !failed && i < self->nscalars; i++) {
        self->scalars[i] = (int)PyLong_AsLong(PyList_GetItem(scalars, i));
        failed = PyErr_Occurred() || self->scalars[i] < -1 || self->scalars[i] >= count;
    }
    for (Py_ssize_t i = 0; !failed && i < nguards; i++) {
        long place = PyLong_AsLong(PyTuple_GetItem(guards, 2 * i));
        failed = number_from(PyTuple_GetItem(guards, 2 * i + 1), &self->guarded[i]) || place < 0 ||
                 place >= count;
        self->guards[i] = (int)place;
        self->nguards = (int)i + 1;
    }
    for (Py_ssize_t i = 0; !failed && i < nsteps; i++) {
        failed = read_step(&self->steps[i], PyList_GetItem(steps, i), count);
        self->nsteps = (int)i + 1;
    }
    if (!failed)
        return (PyObject *)self;
    Py_DECREF((PyObject *)self);
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_IndexError, "a guard is unknown, got %R", guards);
}

/* traced_steps(function, args, keywords, tensors): see `steps_of_trace`. */
static PyObject *traced_steps(PyObject *module, PyObject *args)
{
    PyObject *function, *own, *keywords, *tensors;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO!OO!:traced_steps", &function, &PyTuple_Type, &own, &keywords,
                          &PyTuple_Type, &tensors))
        return NULL;
    if (!generalized)
        return Py_NewRef(Py_None);
    return steps_of_trace(function, own, keywords == Py_None ? NULL : keywords, tensors, generalized);
}

static PyObject *count_open_calls(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLongLong(open_calls);
}

/* open_after(calls) -> the number before */
static PyObject *open_after(PyObject *module, PyObject *calls)
{
    (void)module;
    long now = PyLong_AsLong(calls), before = calls_before;
    if (PyErr_Occurred() || now < 2 || now > 1000)
        return PyErr_Occurred() ? NULL
                                : PyErr_Format(PyExc_ValueError, "expected 2 to 1000 calls, got %ld", now);
    calls_before = (int)now;
    return PyLong_FromLong(before);
}

static PyType_Slot open_slots[] = {
    {Py_tp_dealloc, open_dealloc}, {Py_tp_doc, "Steps of calls that differ only by numbers."}, {0, NULL}};
static PyType_Spec open_spec = {"mlvm.machines.native._native.OpenTemplate", sizeof(OpenTemplate), 0,
                                Py_TPFLAGS_DEFAULT, open_slots};

static PyMethodDef families_functions[] = {
    {"call_into", (PyCFunction)(void (*)(void))call_into, METH_FASTCALL,
     "call_into(out, op, operands, attributes): write a result to `out` by an open template, or return "
     "False."},
    {"open_template", open_template, METH_VARARGS,
     "open_template(formulas, guards, steps, scalars): the steps of calls that differ only by numbers."},
    {"traced_steps", traced_steps, METH_VARARGS,
     "traced_steps(function, args, keywords, tensors): the steps (call, operands, result) of a call in a "
     "recorder, or None if they differ from the steps of the generalized call."},
    {"open_after", open_after, METH_O,
     "open_after(calls) -> the number before: calls with different numbers before one is generalized."},
    {"open_calls", count_open_calls, METH_NOARGS, "The number of calls that open templates ran."},
    {NULL, NULL, 0, NULL}};

int families_init(PyObject *module)
{
    later.call_in_family = call_in_family;
    later.generalize = generalize;
    later.apply_in_family = apply_in_family;
    open_type = add_type(module, "OpenTemplate", &open_spec);
    expect_objects(objects);
    NAMES(INTERN_NAME)
    return open_type ? PyModule_AddFunctions(module, families_functions) : -1;
}
