/* Composed calls as lists of one-op calls.
 *
 * In:        `call(function, args, keywords)`: a function of mlvm and a call's arguments: tensors, numbers,
 *            strings, dtypes, None, slices, and tuples and lists of these.
 * Out:       what `function(*args, **keywords)` returns. The second call on such arguments is recorded: the
 *            steps are the one-op calls, views, selections, updates and next random keys of the call.
 *            Later calls with the same key run these steps in C, in order, instead of the function, which
 *            remains the definition.
 * Must hold: the key contains everything that a result depends on except values: the function, the tensors' types and
 *            whether the tape tracks each, all other arguments, the VM, and the dtypes of the context.
 *            A call that does anything else has no template: a call that reads a value, allocates a tensor
 *            from an array, uses a tensor that is not an argument, step or constant, adds other nodes to
 *            the tape, or issues a warning.
 * Callers:   the wrapper of public functions, and the slots for x[key] in views.c.
 * Locks:     the interpreter lock. Only one thread records at a time; other threads call the function.
 */
#include "templates.h"

#include "views.h"

#include <string.h>

/* Fields of a context after the fields in dispatch.h. */
enum { KEY_SOURCE = AUTOCAST_DTYPE + 1, KEY_STATE };

enum { MOST_CODES = 64, SETS = 1024, PER_SET = 4, MARKS = 16, MOST_FAILURES = 3, MOST_CHAINED = 12 };

/* Successive elementwise steps that one kernel computes, with the same bits: the numbers of the results, whose types
 * are `types`, then of the operands. `end` is the step after the last one. */
typedef struct Chain {
    KernelCallObject *call;
    PyObject *types;
    long long generation; /* of the function table */
    short values[MOST_CHAINED], count, end;
} Chain;

/* Codes of a result: the number of a value, or NOTHING for None; or a different code followed by
 * the number of parts. */
enum { NOTHING = -999, A_TUPLE = -1000, A_LIST = -1001, A_NAMED_TUPLE = -1002 };

static struct {
    int active, failed, paused, nsteps, nconstants;
    int is_dynamic; /* the shape of the last step's result depends on values */
    unsigned long thread;
    const Key *key;
    TemplateStep steps[MOST_STEPS];
    /* Results are weak references, so that the function frees them as it does without a recording;
     * in a trace, in which tensors have no memory, they are strong references (`keeps`). */
    PyObject *results[MOST_STEPS], *constants[MOST_STEPS];
    int made, keeps; /* nodes on the tape */
} recording;

/* Templates by hash, in sets; the most recently used one is the first of its set. */
static Template *templates[SETS][PER_SET];

/* Keys of calls that have no template: a hash, and the number of calls. */
typedef struct {
    uint64_t hash;
    int count;
} Mark;
static Mark seen[SETS][MARKS];
int templates_enabled = 1;
/* Runs of a template before its chains are planned: planning takes 0.2 ms, and a chain saves about 2 us per run and
 * several us for each result of `CHAINED_BYTES`, which count as a run. */
static int runs_before = 100;
#define CHAINED_BYTES 65536
static PyObject *make_name, *fields_name;
#define OBJECTS(EACH) EACH(is_constant) EACH(with_keys) EACH(find_rows) EACH(dtype_class)
OBJECTS(DECLARE_OBJECT)
static const Installed objects[] = TABLE_OF(OBJECTS);
#define NAMES(EACH) EACH(nodes) EACH(op) EACH(dynamic)
NAMES(DECLARE_NAME)

/* --- keys --- */

static int add_item(Key *key, ItemKind kind, PyObject *object, uint64_t bits)
{
    if (key->nitems == MOST_ITEMS)
        return 0;
    key->items[key->nitems++] = (Item){kind, object, bits};
    key->hash = (key->hash ^ bits ^ (uint64_t)kind << 56) * 0x9E3779B97F4A7C15u;
    key->hash ^= key->hash >> 29;
    return 1;
}

static uint64_t bits_of_pointer(const void *pointer)
{
    return (uintptr_t)pointer >> 4;
}

int add_argument(Key *key, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == tensor_class) {
        Allocation *x = (Allocation *)value;
        if (key->ntensors == MOST_TENSORS || !x->type || !x->arena || !x->tape ||
            fast_path_of(x->arena) != key->fast_path || !is_alive(x))
            return 0;
        for (int i = 0; i < key->ntensors; i++)
            if (key->tensors[i] == x) /* operands that are the same tensor stay the same */
                return add_item(key, SAME_TENSOR, NULL, (uint64_t)i);
        key->tensors[key->ntensors++] = x;
        int is_tracked = x->tape != Py_None && x->tape == key->tape;
        return add_item(key, is_tracked ? TRACKED_TYPE : TYPE, x->type, bits_of_pointer(x->type));
    }
    if (value == Py_None || value == Py_True || value == Py_False || value == Py_Ellipsis ||
        (PyObject *)type == dtype_class || type == &PyType_Type)
        return add_item(key, POINTER, value, bits_of_pointer(value));
    if (PyLong_CheckExact(value)) {
        int overflow;
        long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
        return !overflow && add_item(key, NUMBER, (PyObject *)type, (uint64_t)number);
    }
    if (PyFloat_CheckExact(value)) {
        double number = PyFloat_AsDouble(value);
        uint64_t bits;
        memcpy(&bits, &number, sizeof bits);
        return add_item(key, NUMBER, (PyObject *)type, bits);
    }
    if (PyUnicode_CheckExact(value))
        return add_item(key, TEXT, value, (uint64_t)PyObject_Hash(value));
    if (depth > 3)
        return 0;
    if (type == &PyTuple_Type || type == &PyList_Type) {
        int is_tuple = type == &PyTuple_Type;
        Py_ssize_t count = is_tuple ? PyTuple_Size(value) : PyList_Size(value);
        int fits = count < MOST_ITEMS && add_item(key, is_tuple ? TUPLE : LIST, NULL, (uint64_t)count);
        for (Py_ssize_t i = 0; fits && i < count; i++)
            fits = add_argument(key, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i),
                                depth + 1);
        return fits;
    }
    if (type == &PySlice_Type) {
        static const char *const names[] = {"start", "stop", "step"};
        int fits = add_item(key, POINTER, (PyObject *)type, bits_of_pointer(type));
        for (int i = 0; fits && i < 3; i++) {
            PyObject *bound = PyObject_GetAttrString(value, names[i]);
            fits = bound && (bound == Py_None || PyLong_CheckExact(bound)) &&
                   add_argument(key, bound, depth + 1);
            Py_XDECREF(bound); /* a NUMBER holds no reference */
        }
        return fits;
    }
    return 0;
}

int add_context(Key *key, PyObject *context)
{
    key->tape = PyTuple_GetItem(context, TAPE);
    return add_item(key, POINTER, Py_None, key->tape != Py_None) &&
           add_argument(key, PyTuple_GetItem(context, AUTOCAST_DTYPE), 0) &&
           add_argument(key, PyTuple_GetItem(context, DEFAULT_DTYPE), 0);
}

int add_keywords(Key *key, PyObject *keywords)
{
    PyObject *name, *value;
    Py_ssize_t at = 0;
    while (keywords && PyDict_CheckExact(keywords) && PyDict_Next(keywords, &at, &name, &value))
        if (!add_item(key, KEYWORD, name, (uint64_t)PyObject_Hash(name)) || !add_argument(key, value, 0))
            return 0;
    return 1;
}

int is_same_item(const Item *a, const Item *b)
{
    if (a->kind != b->kind || a->bits != b->bits)
        return 0;
    if (a->object == b->object)
        return 1;
    return (a->kind == TEXT || a->kind == KEYWORD) && PyUnicode_Compare(a->object, b->object) == 0;
}

/* Create the key of a call in a context. Returns 0 if it has no key; an exception may be set. */
static int make_key(PyObject *context, Key *key, PyObject *function, PyObject *args, PyObject *keywords)
{
    PyObject *arena = arena_of(context);
    if (!arena)
        return 0;
    key->fast_path = fast_path_of(arena);
    key->arena = arena;
    Py_DECREF(arena); /* the thread or a block keeps it alive, and it keeps the VM's fast path alive */
    FastPath *fast_path = key->fast_path;
    if (!fast_path || !is_unwatched(fast_path))
        return 0;
    key->nitems = key->ntensors = 0;
    key->hash = bits_of_pointer(function) ^ (uint64_t)fast_path->number << 40;
    int fits = add_context(key, context);
    for (Py_ssize_t i = 0; fits && i < PyTuple_Size(args); i++)
        fits = add_argument(key, PyTuple_GetItem(args, i), 0);
    return fits && add_keywords(key, keywords);
}

/* Hold the objects of a key while Python runs: another thread may change the argument lists. */
static void hold_key(const Key *key)
{
    for (int i = 0; i < key->nitems; i++)
        Py_XINCREF(key->items[i].object);
    for (int i = 0; i < key->ntensors; i++)
        Py_INCREF((PyObject *)key->tensors[i]);
}

static void release_key(const Key *key)
{
    for (int i = 0; i < key->nitems; i++)
        Py_XDECREF(key->items[i].object);
    for (int i = 0; i < key->ntensors; i++)
        Py_DECREF((PyObject *)key->tensors[i]);
}

/* --- templates --- */

static void free_chain(Chain *chain)
{
    if (!chain)
        return;
    Py_XDECREF((PyObject *)chain->call);
    Py_XDECREF(chain->types);
    PyMem_Free(chain);
}

void release_template(Template *old)
{
    if (!old || --old->users > 0)
        return;
    for (int i = 0; i < old->nitems; i++)
        Py_XDECREF(old->items[i].object);
    for (int i = 0; i < old->nsteps; i++) {
        Py_XDECREF(old->steps[i].call);
        Py_XDECREF(old->steps[i].extra);
        free_chain(old->steps[i].chain);
    }
    for (int i = 0; i < old->nconstants; i++) {
        Py_XDECREF(old->constants[i]);
        Py_XDECREF(old->constant_types[i]);
    }
    Py_XDECREF(old->constant_arena);
    Py_XDECREF(old->named);
    Py_XDECREF(old->function);
    PyMem_Free(old->items);
    PyMem_Free(old->steps);
    PyMem_Free(old->constants);
    PyMem_Free(old->constant_types);
    PyMem_Free(old->codes);
    PyMem_Free(old);
}

static int is_template_of(const Template *template, PyObject *function, const Key *key)
{
    int same = template && template->hash == key->hash && template->function == function &&
               template->nitems == key->nitems && template->fast_path == key->fast_path->number;
    for (int i = 0; same && i < key->nitems; i++)
        same = is_same_item(&template->items[i], &key->items[i]);
    return same;
}

static Template *find_template(PyObject *function, const Key *key)
{
    Template **set = templates[key->hash % SETS];
    for (int i = 0; i < PER_SET; i++) {
        Template *found = set[i];
        if (!is_template_of(found, function, key))
            continue;
        memmove(set + 1, set, sizeof *set * (size_t)i);
        return set[0] = found;
    }
    return NULL;
}

/* Replace the template of that key, or the least recently used one of its set. */
static void replace_template(PyObject *function, const Key *key, Template *with)
{
    Template **set = templates[key->hash % SETS];
    Template *old = find_template(function, key) ? set[0] : set[PER_SET - 1];
    if (old != set[0])
        memmove(set + 1, set, sizeof *set * (PER_SET - 1));
    set[0] = with;
    release_template(old); /* this may run Python */
}

static void *copy_of(const void *source, size_t nbytes)
{
    void *copy = PyMem_Malloc(nbytes ? nbytes : 1);
    if (copy)
        memcpy(copy, source, nbytes);
    return copy;
}

Template *new_template(PyObject *function, const Key *key, int nsteps, int nconstants, int ncodes)
{
    Template *fresh = PyMem_Calloc(1, sizeof *fresh);
    if (!fresh)
        return NULL;
    fresh->users = 1;
    fresh->items = copy_of(key->items, sizeof *key->items * (size_t)key->nitems);
    fresh->steps = PyMem_Calloc((size_t)nsteps + 1, sizeof *fresh->steps);
    fresh->constants = PyMem_Calloc((size_t)nconstants + 1, sizeof *fresh->constants);
    fresh->constant_types = PyMem_Calloc((size_t)nconstants + 1, sizeof *fresh->constant_types);
    fresh->codes = PyMem_Calloc((size_t)ncodes + 1, sizeof *fresh->codes);
    if (!fresh->items || !fresh->steps || !fresh->constants || !fresh->constant_types || !fresh->codes) {
        release_template(fresh);
        return NULL;
    }
    fresh->hash = key->hash;
    fresh->fast_path = key->fast_path->number;
    fresh->function = Py_NewRef(function);
    fresh->nitems = key->nitems;
    fresh->nsteps = nsteps;
    fresh->nconstants = nconstants;
    fresh->ncodes = ncodes;
    for (int i = 0; i < fresh->nitems; i++)
        Py_XINCREF(fresh->items[i].object);
    return fresh;
}

/* Store the recorded steps, or that the function must always be called. */
static void keep_template(PyObject *function, const Key *key, const short *codes, int ncodes,
                          PyObject *named, int failures)
{
    int nsteps = ncodes ? recording.nsteps : 0, nconstants = ncodes ? recording.nconstants : 0;
    Template *fresh = new_template(function, key, nsteps, nconstants, ncodes);
    if (!fresh)
        return;
    memcpy(fresh->steps, recording.steps, sizeof *fresh->steps * (size_t)nsteps);
    memcpy(fresh->codes, codes, sizeof *codes * (size_t)ncodes);
    for (int i = 0; i < nsteps; i++) {
        Py_XINCREF(fresh->steps[i].call);
        Py_XINCREF(fresh->steps[i].extra);
    }
    for (int i = 0; i < nconstants; i++) {
        const Allocation *constant = (Allocation *)recording.constants[i];
        fresh->constants[i] = PyWeakref_NewRef((PyObject *)constant, NULL);
        fresh->constant_types[i] = Py_NewRef(constant->type);
        if (!fresh->constant_arena) /* the VM's arena of constants */
            fresh->constant_arena = PyWeakref_NewRef(constant->arena, NULL);
    }
    if (clear_nonfatal_error() || (nconstants && !fresh->constant_arena)) {
        release_template(fresh);
        PyErr_Clear();
        return;
    }
    fresh->named = named ? Py_NewRef(named) : NULL;
    fresh->failures = failures;
    replace_template(function, key, fresh);
}

PyObject *referent(PyObject *reference)
{
    PyObject *object = PyWeakref_GetObject(reference);
    return object == Py_None ? NULL : Py_NewRef(object);
}

/* Get a reference to each constant of a template. Returns 0, without any, if the VM has freed one. */
static int hold_constants(const Template *template, PyObject **constants)
{
    for (int i = 0; i < template->nconstants; i++) {
        constants[i] = referent(template->constants[i]);
        if (!constants[i]) {
            while (i-- > 0)
                Py_DECREF(constants[i]);
            return 0;
        }
    }
    return 1;
}

/* --- recording --- */

int is_recording(void)
{
    return recording.active && !recording.paused && recording.thread == PyThread_get_thread_ident();
}

int pause_recording(int paused)
{
    int before = recording.paused;
    if (recording.active && recording.thread == PyThread_get_thread_ident())
        recording.paused = paused;
    return before;
}

void note_opaque(void)
{
    if (is_recording())
        recording.failed = 1;
}

/* Whether a tensor is a Python number's, which no call changes. */
static int holds_constant(PyObject *tensor)
{
    int before = pause_recording(1);
    PyObject *answer = PyObject_CallFunctionObjArgs(is_constant, tensor, NULL);
    pause_recording(before);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer == Py_True;
}

static int is_result(int step, PyObject *value)
{
    PyObject *result = recording.results[step];
    return (recording.keeps ? result : PyWeakref_GetObject(result)) == value;
}

/* The number of a value; other tensors become constants. MOST_VALUES if this is impossible. */
static short number_of(PyObject *value)
{
    for (int i = recording.nsteps; i-- > 0;)
        if (is_result(i, value))
            return (short)(recording.key->ntensors + i);
    for (int i = 0; i < recording.key->ntensors; i++)
        if ((PyObject *)recording.key->tensors[i] == value)
            return (short)i;
    for (int i = 0; i < recording.nconstants; i++)
        if (recording.constants[i] == value)
            return (short)(-1 - i);
    if (!holds_constant(value) || recording.nconstants == MOST_STEPS)
        return MOST_VALUES;
    recording.constants[recording.nconstants++] = Py_NewRef(value);
    return (short)-recording.nconstants;
}

/* Whether the shape of a call's result depends on values. */
static int is_dynamic(PyObject *call)
{
    PyObject *op = PyObject_GetAttr(call, op_name);
    PyObject *answer = op ? PyObject_GetAttr(op, dynamic_name) : NULL;
    Py_XDECREF(op);
    Py_XDECREF(answer);
    PyErr_Clear();
    return answer != Py_False;
}

void note_step(StepKind kind, PyObject *call, PyObject *extra, PyObject *const *operands, int count,
               PyObject *out)
{
    if (!is_recording() || recording.failed)
        return;
    PyObject *tape = present_tape();
    int is_elsewhere = (kind == APPLY || kind == NEXT_KEY) &&
                       ((Allocation *)out)->arena != recording.key->arena;
    /* Steps may depend on the length of a dynamic result, except for selections along the other axes. */
    int depends = recording.is_dynamic &&
                  (kind != SUBSCRIPT || !PyTuple_Check(extra) || !PyTuple_Size(extra) ||
                   Py_TYPE(PyTuple_GetItem(extra, 0)) != &PySlice_Type);
    recording.is_dynamic |= kind == APPLY && is_dynamic(call);
    recording.failed = depends || is_elsewhere || tape != recording.key->tape ||
                       recording.nsteps == MOST_STEPS || count > MOST_OPERANDS + 1;
    Py_XDECREF(tape);
    if (recording.failed)
        return;
    TemplateStep step = {.kind = kind, .count = (short)count, .last = -1};
    for (int i = 0; i < count; i++) {
        step.operands[i] = number_of(operands[i]);
        recording.failed |= step.operands[i] == MOST_VALUES;
    }
    PyObject *result = recording.failed  ? NULL
                       : recording.keeps ? Py_NewRef(out)
                                         : PyWeakref_NewRef(out, NULL);
    if (!result) {
        PyErr_Clear();
        recording.failed = 1;
        return;
    }
    recording.made += kind != UPDATE && recording.key->tape != Py_None &&
                      ((Allocation *)out)->tape == recording.key->tape;
    step.call = call ? Py_NewRef(call) : NULL;
    step.extra = extra ? Py_NewRef(extra) : NULL;
    recording.results[recording.nsteps] = result;
    recording.steps[recording.nsteps++] = step;
}

/* Describe a result by codes. Returns 0 unless it is a tensor, None, or a tuple or list of such. */
static int describe(PyObject *result, short *codes, int *ncodes, PyObject **named, int depth)
{
    if (*ncodes + 2 > MOST_CODES || depth > 3)
        return 0;
    if (Py_TYPE(result) == tensor_class) {
        short number = number_of(result);
        if (number < 0 || number == MOST_VALUES)
            return 0;
        codes[(*ncodes)++] = number;
        return 1;
    }
    if (result == Py_None) {
        codes[(*ncodes)++] = NOTHING;
        return 1;
    }
    int is_list = PyList_CheckExact(result);
    if (!is_list && !PyTuple_Check(result))
        return 0;
    Py_ssize_t count = is_list ? PyList_Size(result) : PyTuple_Size(result);
    short code = is_list ? A_LIST : A_TUPLE;
    if (!is_list && !PyTuple_CheckExact(result)) {
        PyObject *class = (PyObject *)Py_TYPE(result);
        if (!PyObject_HasAttr(class, fields_name) || (*named && *named != class))
            return 0;
        *named = class;
        code = A_NAMED_TUPLE;
    }
    codes[(*ncodes)++] = code;
    codes[(*ncodes)++] = (short)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *part = is_list ? PyList_GetItem(result, i) : PyTuple_GetItem(result, i);
        if (!describe(part, codes, ncodes, named, depth + 1))
            return 0;
    }
    return 1;
}

static Py_ssize_t count_nodes(PyObject *tape)
{
    PyObject *nodes = tape == Py_None ? NULL : PyObject_GetAttr(tape, nodes_name);
    Py_ssize_t count = nodes && PyList_Check(nodes) ? PyList_Size(nodes) : 0;
    Py_XDECREF(nodes);
    PyErr_Clear();
    return count;
}

/* Release each result after the last step that uses it, and the call's results at the end. */
static void find_last_uses(const short *codes, int ncodes)
{
    int first = recording.key->ntensors;
    for (int i = 0; i < recording.nsteps; i++) {
        for (int j = 0; j < recording.steps[i].count; j++)
            if (recording.steps[i].operands[j] >= first)
                recording.steps[recording.steps[i].operands[j] - first].last = (short)i;
        if (recording.steps[i].last < i)
            recording.steps[i].last = (short)i;
    }
    for (int i = 0; i < ncodes; i++) {
        if (codes[i] >= first)
            recording.steps[codes[i] - first].last = MOST_STEPS;
        i += codes[i] <= A_TUPLE; /* a count follows */
    }
    for (int i = 0; i < recording.nsteps; i++) {
        recording.steps[i].freed = -1;
        if (recording.steps[i].kind == NEXT_KEY) /* after an error, the function receives this key */
            recording.steps[i].last = MOST_STEPS;
    }
    for (int i = 0; i < recording.nsteps; i++) {
        TemplateStep *step = &recording.steps[i];
        if (step->last == MOST_STEPS)
            continue;
        step->next = recording.steps[step->last].freed;
        recording.steps[step->last].freed = (short)i;
    }
}

static void begin_recording(const Key *key, int keeps)
{
    recording.active = 1;
    recording.failed = recording.paused = recording.nsteps = recording.nconstants = recording.made = 0;
    recording.is_dynamic = 0;
    recording.keeps = keeps;
    recording.thread = PyThread_get_thread_ident();
    recording.key = key;
}

static void end_recording(void)
{
    recording.active = 0;
    int nsteps = recording.nsteps, nconstants = recording.nconstants;
    PyObject *results[MOST_STEPS], *constants[MOST_STEPS];
    TemplateStep steps[MOST_STEPS];
    memcpy(results, recording.results, sizeof results);
    memcpy(constants, recording.constants, sizeof constants);
    memcpy(steps, recording.steps, sizeof steps);
    for (int i = 0; i < nsteps; i++) { /* these may run Python, which may record */
        Py_XDECREF(steps[i].call);
        Py_XDECREF(steps[i].extra);
        Py_XDECREF(results[i]);
    }
    for (int i = 0; i < nconstants; i++)
        Py_XDECREF(constants[i]);
}

/* Call a function and store the steps, unless a call is already being recorded, or an operand is
 * the tensor of a number: a step with this tensor could mean the number. */
static PyObject *call_and_record(PyObject *function, PyObject *args, PyObject *keywords, const Key *key,
                                 int failures)
{
    int has_constant = 0;
    for (int i = 0; i < key->ntensors; i++)
        has_constant |= holds_constant((PyObject *)key->tensors[i]);
    Py_ssize_t before = count_nodes(key->tape);
    /* Check this after all calls of Python: a different thread may have started to record during them. */
    if (recording.active || has_constant)
        return PyObject_Call(function, args, keywords);
    begin_recording(key, 0);
    PyObject *result = PyObject_Call(function, args, keywords);
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    short codes[MOST_CODES];
    int ncodes = 0;
    PyObject *named = NULL;
    recording.failed = !result || recording.failed || !describe(result, codes, &ncodes, &named, 0) ||
                       count_nodes(key->tape) - before != recording.made;
    if (result) {
        find_last_uses(codes, recording.failed ? 0 : ncodes);
        keep_template(function, key, codes, recording.failed ? 0 : ncodes, named, failures + 1);
    }
    end_recording();
    PyErr_Restore(error_type, error, traceback);
    return result;
}

/* Whether the recorded steps equal the steps of the template, except for numbers and types. */
static int has_steps_of(const Template *template, const short *codes, int ncodes)
{
    int same = recording.nsteps == template->nsteps && recording.nconstants == template->nconstants &&
               ncodes == template->ncodes &&
               !memcmp(codes, template->codes, sizeof *codes * (size_t)ncodes);
    for (int i = 0; same && i < template->nsteps; i++) {
        const TemplateStep *a = &recording.steps[i], *b = &template->steps[i];
        same = a->kind == b->kind && a->count == b->count &&
               !memcmp(a->operands, b->operands, sizeof *a->operands * (size_t)a->count);
        if (!b->call) /* the step of a single op */
            continue;
        PyObject *op = same ? PyObject_GetAttr(a->call, op_name) : NULL;
        PyObject *expected = op ? PyObject_GetAttr(b->call, op_name) : NULL;
        same = op && op == expected;
        Py_XDECREF(op);
        Py_XDECREF(expected);
    }
    return same;
}

PyObject *steps_of_trace(PyObject *function, PyObject *args, PyObject *keywords, PyObject *tensors,
                         const Template *expected)
{
    Key key = {.tape = Py_None, .ntensors = (int)PyTuple_Size(tensors), .arena = present_arena()};
    for (int i = 0; i < key.ntensors && i < MOST_TENSORS; i++)
        key.tensors[i] = (Allocation *)PyTuple_GetItem(tensors, i);
    Py_XDECREF(key.arena); /* a block keeps it alive */
    if (!key.arena || key.ntensors > MOST_TENSORS || recording.active)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    begin_recording(&key, 1);
    PyObject *result = PyObject_Call(function, args, keywords), *named = NULL, *steps = NULL;
    short codes[MOST_CODES];
    int ncodes = 0;
    recording.paused = 1;
    if (result && !recording.failed && describe(result, codes, &ncodes, &named, 0) &&
        has_steps_of(expected, codes, ncodes))
        steps = PyList_New(recording.nsteps);
    for (int i = 0; steps && i < recording.nsteps; i++) {
        const TemplateStep *step = &recording.steps[i];
        PyObject *operands = PyTuple_New(step->count);
        for (int j = 0; operands && j < step->count; j++) {
            int number = step->operands[j];
            PyTuple_SetItem(operands, j,
                            Py_NewRef(number < 0              ? recording.constants[-1 - number]
                                      : number < key.ntensors ? (PyObject *)key.tensors[number]
                                                              : recording.results[number - key.ntensors]));
        }
        PyObject *entry = operands ? Py_BuildValue("OOO", step->call, operands, recording.results[i])
                                   : NULL;
        Py_XDECREF(operands);
        if (!entry || PyList_SetItem(steps, i, entry))
            Py_CLEAR(steps);
    }
    PyObject *constants = steps ? tuple_of(recording.constants, recording.nconstants) : NULL;
    PyObject *both = constants ? PyTuple_Pack(2, steps, constants) : NULL;
    Py_XDECREF(constants);
    Py_XDECREF(steps);
    Py_XDECREF(result);
    PyObject *error_type, *error, *traceback;
    PyErr_Fetch(&error_type, &error, &traceback);
    end_recording();
    PyErr_Restore(error_type, error, traceback);
    return both || PyErr_Occurred() ? both : Py_NewRef(Py_None);
}

/* --- calls by a template --- */

static PyObject *build(const Template *template, PyObject *const *values, int *at)
{
    short code = template->codes[(*at)++];
    if (code > A_TUPLE)
        return Py_NewRef(code == NOTHING ? Py_None : values[code]);
    short count = template->codes[(*at)++];
    PyObject *parts = code == A_TUPLE ? PyTuple_New(count) : PyList_New(count);
    for (short i = 0; parts && i < count; i++) {
        PyObject *part = build(template, values, at);
        if (!part || (code == A_TUPLE ? PyTuple_SetItem(parts, i, part) : PyList_SetItem(parts, i, part)))
            Py_CLEAR(parts);
    }
    if (!parts || code != A_NAMED_TUPLE)
        return parts;
    PyObject *whole = PyObject_CallMethodObjArgs(template->named, make_name, parts, NULL);
    Py_DECREF(parts);
    return whole;
}

PyObject *result_of(const Template *template, PyObject *const *values)
{
    int at = 0;
    return build(template, values, &at);
}

/* next_key_of(source) -> source(), a step of a recorded call. */
static PyObject *next_key_of(PyObject *module, PyObject *source)
{
    (void)module;
    int before = pause_recording(1);
    PyObject *key = PyObject_CallNoArgs(source);
    pause_recording(before);
    if (key && Py_TYPE(key) == tensor_class)
        note_step(NEXT_KEY, source, NULL, NULL, 0, key);
    else
        note_opaque();
    return key;
}

/* The global keys of a VM: operands of `next_key` in views.c. The state is a weak reference, because a
 * tensor keeps the VM alive. */
static struct {
    long long fast_path; /* number of the VM; 0: Python draws */
    PyObject *call, *state, *type, *locked;
} keys;

/* The next key, as `_next` in functions/random.py; NULL with no exception set if Python must draw it. */
static PyObject *drawn_key(PyObject *context)
{
    PyObject *arena = keys.fast_path ? arena_of(context) : NULL;
    FastPath *fast_path = arena ? fast_path_of(arena) : NULL;
    int is_ours = fast_path && fast_path->number == keys.fast_path &&
                  PyTuple_GetItem(context, KEY_SOURCE) == Py_None &&
                  PyTuple_GetItem(context, KEY_STATE) == Py_None;
    PyObject *state = is_ours ? Py_XNewRef(PyWeakref_GetObject(keys.state)) : NULL;
    PyObject *locked = Py_XNewRef(keys.locked), *key = NULL;
    if (state && state != Py_None)
        key = later.next_key_in(arena, keys.call, (Allocation *)state, keys.type, locked);
    Py_XDECREF(state);
    Py_XDECREF(locked);
    Py_XDECREF(arena);
    return key;
}

/* draw_keys(fast_path, call, state, type, lock): steps draw the keys of this VM in C; draw_keys(): in Python. */
static PyObject *draw_keys(PyObject *module, PyObject *args)
{
    PyObject *path = NULL, *lock = NULL;
    PyObject *old[] = {keys.call, keys.state, keys.type, keys.locked};
    (void)module;
    memset(&keys, 0, sizeof keys);
    if (PyTuple_Size(args) &&
        !PyArg_ParseTuple(args, "OOOOO:draw_keys", &path, &keys.call, &keys.state, &keys.type, &lock))
        return NULL;
    if (lock) {
        Py_INCREF(keys.call);
        Py_INCREF(keys.type);
        keys.state = PyWeakref_NewRef(keys.state, NULL);
        keys.locked = PyObject_GetAttrString(lock, "locked");
        keys.fast_path = keys.state && keys.locked ? ((FastPath *)path)->number : 0;
    }
    for (size_t i = 0; i < sizeof old / sizeof *old; i++)
        Py_XDECREF(old[i]);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *run_step(PyObject *context, const TemplateStep *step, PyObject *const *operands)
{
    PyObject *args[MOST_OPERANDS + 2] = {step->call};
    switch (step->kind) {
    case APPLY:
        memcpy(args + 1, operands, sizeof *operands * (size_t)step->count);
        return apply_in(context, args, step->count + 1);
    case ALIAS:
        if (!step->call)
            return (PyObject *)view_as((Allocation *)operands[0], step->extra);
        args[1] = operands[0];
        args[2] = step->extra;
        return later.alias(NULL, args, 3);
    case SUBSCRIPT: return PyObject_GetItem(operands[0], step->extra);
    case NEXT_KEY: {
        PyObject *key = is_recording() ? NULL : drawn_key(context);
        return key || PyErr_Occurred() ? key : next_key_of(NULL, step->call);
    }
    default:
        args[0] = operands[0];
        args[1] = step->call;
        memcpy(args + 2, operands + 1, sizeof *operands * (size_t)(step->count - 1));
        return apply_into(NULL, args, step->count + 1);
    }
}

/* --- chains of a template --- */

/* Add the chain (first step, end, kernel, types of results, numbers of values) to a template. */
static void add_chain(Template *template, PyObject *row, long long generation)
{
    int first, end;
    PyObject *call, *types, *values;
    Chain *chain = PyMem_Calloc(1, sizeof *chain);
    if (!chain ||
        !PyArg_ParseTuple(row, "iiOO!O!", &first, &end, &call, &PyTuple_Type, &types, &PyTuple_Type,
                          &values) ||
        !is_kernel_call(call) || first < 0 || end <= first || end > template->nsteps ||
        template->steps[first].chain || PyTuple_Size(values) > MOST_CHAINED) {
        PyMem_Free(chain);
        return;
    }
    chain->call = (KernelCallObject *)Py_NewRef(call);
    chain->types = Py_NewRef(types);
    chain->generation = generation;
    chain->end = (short)end;
    chain->count = (short)PyTuple_Size(values);
    for (int i = 0; i < chain->count; i++)
        chain->values[i] = (short)PyLong_AsLong(PyTuple_GetItem(values, i));
    template->steps[first].chain = chain;
}

/* Ask Python for the chains of a template. */
static void find_chains(Template *template, const Key *key, PyObject *const *constants)
{
    const long long generation = key->fast_path->generation;
    PyObject *types = PyTuple_New(key->ntensors + template->nconstants);
    PyObject *steps = PyTuple_New(template->nsteps);
    for (int i = 0; types && i < key->ntensors + template->nconstants; i++) {
        PyObject *x = i < key->ntensors ? (PyObject *)key->tensors[i]
                                        : constants[template->nconstants - 1 - i + key->ntensors];
        PyTuple_SetItem(types, i, Py_NewRef(((Allocation *)x)->type));
    }
    for (int i = 0; steps && i < template->nsteps; i++) {
        const TemplateStep *step = &template->steps[i];
        PyObject *operands = PyTuple_New(step->count);
        for (int j = 0; operands && j < step->count; j++)
            PyTuple_SetItem(operands, j, PyLong_FromLong(step->operands[j]));
        PyTuple_SetItem(steps, i,
                        Py_BuildValue("iOONi", (int)step->kind, step->call ? step->call : Py_None,
                                      step->extra ? step->extra : Py_None, operands, (int)step->last));
    }
    PyObject *rows = types && steps ? PyObject_CallFunction(find_rows, "OOi", types, steps, key->ntensors)
                                    : NULL;
    for (Py_ssize_t i = 0; rows && PyList_Check(rows) && i < PyList_Size(rows); i++)
        add_chain(template, PyList_GetItem(rows, i), generation);
    Py_XDECREF(rows);
    Py_XDECREF(types);
    Py_XDECREF(steps);
}

/* Compute the steps of a chain. Returns 1; 0 if they must run one by one; -1 with an exception set. */
static int run_chain(const Chain *chain, const Key *key, PyObject *const *constants, PyObject **values)
{
    Allocation *tensors[MOST_CHAINED] = {NULL};
    int nresults = (int)PyTuple_Size(chain->types), done = chain->generation == key->fast_path->generation;
    for (int i = nresults; i < chain->count; i++)
        tensors[i] = (Allocation *)(chain->values[i] < 0 ? constants[-1 - chain->values[i]]
                                                         : values[chain->values[i]]);
    for (int i = 0; i < nresults && done; i++) {
        tensors[i] = tensor_in(key->arena, PyTuple_GetItem(chain->types, i));
        done = tensors[i] != NULL;
    }
    if (done)
        done = run_kernel(chain->call, key->fast_path, chain->generation, tensors, chain->count, NULL, 0);
    for (int i = 0; i < nresults; i++)
        if (done > 0)
            values[chain->values[i]] = (PyObject *)tensors[i];
        else
            Py_XDECREF((PyObject *)tensors[i]);
    return clear_nonfatal_error() ? -1 : done > 0;
}

/* Run the steps. After an error, the function runs with the same keys and raises the error, unless a tensor was
 * updated: then `*is_final`. */
static PyObject *run_template(Template *template, PyObject *context, const Key *key,
                              PyObject *const *constants, PyObject **keys, int *is_final)
{
    PyObject *values[MOST_VALUES], *operands[MOST_OPERANDS + 1], *result = NULL;
    int first = key->ntensors, failed = 0;
    memset(values + first, 0, sizeof *values * (size_t) template->nsteps);
    for (int i = 0; i < first; i++)
        values[i] = Py_NewRef((PyObject *)key->tensors[i]); /* a list of tensors may change meanwhile */
    int may_chain = key->tape == Py_None && template->nsteps > 1;
    if (may_chain && template->runs <= runs_before && template->runs++ == runs_before) {
        find_chains(template, key, constants);
        failed = clear_nonfatal_error();
    }
    for (int i = 0; i < template->nsteps && !failed; i++) {
        const TemplateStep *step = &template->steps[i];
        if (step->chain && !is_recording()) { /* a recorded outer call must record each step */
            int done = run_chain(step->chain, key, constants, values);
            failed = done < 0;
            for (int end = step->chain->end; done > 0 && i < end; i++)
                for (int j = template->steps[i].freed; j >= 0; j = template->steps[j].next)
                    Py_CLEAR(values[first + j]);
            if (done) {
                i--;
                continue;
            }
        }
        for (int j = 0; j < step->count; j++)
            operands[j] = step->operands[j] < 0 ? constants[-1 - step->operands[j]]
                                                : values[step->operands[j]];
        values[first + i] = run_step(context, step, operands);
        failed = !values[first + i];
        *is_final |= !failed && step->kind == UPDATE;
        Layout out;
        if (may_chain && template->runs < runs_before && step->kind == APPLY && !failed &&
            layout_of(((Allocation *)values[first + i])->type, &out)) {
            int64_t runs = template->runs + out.size * out.itemsize / CHAINED_BYTES;
            template->runs = runs < runs_before ? (int)runs : runs_before;
        }
        for (int j = step->freed; !failed && j >= 0; j = template->steps[j].next)
            Py_CLEAR(values[first + j]);
    }
    if (!failed)
        result = result_of(template, values);
    for (int i = 0; !result && i < template->nsteps; i++)
        if (template->steps[i].kind == NEXT_KEY && values[first + i] && (*keys || (*keys = PyList_New(0))))
            PyList_Append(*keys, values[first + i]);
    for (int i = 0; i < first + template->nsteps; i++)
        Py_XDECREF(values[i]);
    return result;
}

int *calls_of(uint64_t hash)
{
    Mark *set = seen[hash % SETS], *mark = set;
    while (mark < set + MARKS && mark->hash != hash)
        mark++;
    if (mark == set + MARKS) {
        memmove(set + 1, set, sizeof *set * (MARKS - 1));
        *(mark = set) = (Mark){hash, 0};
    }
    return &mark->count;
}

PyObject *call_composed(PyObject *function, PyObject *args, PyObject *keywords)
{
    Key key;
    PyObject *context = templates_enabled && is_constant && is_quiet() ? present_context() : NULL;
    if (!context || !make_key(context, &key, function, args, keywords)) {
        Py_XDECREF(context);
        if (PyErr_Occurred())
            return NULL;
        return PyObject_Call(function, args, keywords);
    }
    Template *template = find_template(function, &key);
    PyObject *constants[MOST_STEPS];
    if (template && template->ncodes && !hold_constants(template, constants))
        template = NULL; /* a new recording replaces it */
    if (template && template->ncodes) {
        int is_final = 0;
        PyObject *keys = NULL;
        template->users++; /* a step may run Python, which may replace the template */
        PyObject *result = run_template(template, context, &key, constants, &keys, &is_final);
        Py_DECREF(context);
        for (int i = 0; i < template->nconstants; i++)
            Py_DECREF(constants[i]);
        release_template(template);
        if (!result && !is_final && !clear_nonfatal_error())
            result = keys ? PyObject_CallFunctionObjArgs(with_keys, keys, function, args, keywords, NULL)
                          : PyObject_Call(function, args, keywords);
        Py_XDECREF(keys);
        return result;
    }
    Py_DECREF(context); /* the thread or task keeps its tape */
    int failures = template ? template->failures : 0;
    if (failures >= MOST_FAILURES)
        return PyObject_Call(function, args, keywords);
    hold_key(&key);
    int learns = 0;
    PyObject *result = template ? NULL : later.call_in_family(function, &key, &learns, NULL);
    if (!result && !PyErr_Occurred()) {
        int records = (*calls_of(key.hash))++ || learns;
        result = records ? call_and_record(function, args, keywords, &key, failures)
                         : PyObject_Call(function, args, keywords);
        if (result && learns && later.generalize(find_template(function, &key), args, keywords, &key))
            Py_CLEAR(result);
    }
    release_key(&key);
    return result;
}

/* call(function, args, keywords) */
static PyObject *call(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3 || !PyTuple_Check(args[1]) || !PyDict_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "call: expected (function, tuple, dict), got %zd args", nargs);
    return call_composed(args[0], args[1], PyDict_Size(args[2]) ? args[2] : NULL);
}

static PyObject *opaque(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    note_opaque();
    Py_RETURN_NONE;
}

/* pause(paused) -> the previous state: while paused, a recorded call records no steps. */
static PyObject *pause_in_python(PyObject *module, PyObject *paused)
{
    (void)module;
    int now = PyObject_IsTrue(paused);
    return now < 0 ? NULL : PyBool_FromLong(pause_recording(now));
}

/* use_templates(enabled) -> the previous setting */
static PyObject *use_templates(PyObject *module, PyObject *enabled)
{
    (void)module;
    int before = templates_enabled;
    templates_enabled = enabled == Py_True;
    return PyBool_FromLong(before);
}

/* chain_after(runs) -> the previous number */
static PyObject *chain_after(PyObject *module, PyObject *runs)
{
    (void)module;
    int before = runs_before;
    runs_before = (int)PyLong_AsLong(runs);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(before);
}

static PyMethodDef templates_functions[] = {
    {"call", (PyCFunction)(void (*)(void))call, METH_FASTCALL,
     "call(function, args, keywords): call the function, by a template if one exists."},
    {"opaque", opaque, METH_NOARGS, "The composed call that runs in this thread cannot be a template."},
    {"next_key_of", next_key_of, METH_O, "next_key_of(source) -> source(), a step of a recorded call."},
    {"pause", pause_in_python, METH_O,
     "pause(paused) -> the previous state: while paused, a recorded call records no steps."},
    {"use_templates", use_templates, METH_O, "use_templates(enabled) -> the previous setting."},
    {"draw_keys", draw_keys, METH_VARARGS,
     "draw_keys(fast_path, call, state, type, lock): steps draw keys by next_key(call, state, type)."},
    {"chain_after", chain_after, METH_O,
     "chain_after(runs) -> the previous number: runs of a template before elementwise steps are chained."},
    {NULL, NULL, 0, NULL}};

int templates_init(PyObject *module)
{
    later.is_recording = is_recording;
    later.pause_recording = pause_recording;
    later.note_opaque = note_opaque;
    later.note_step = note_step;
    later.call_composed = call_composed;
    make_name = PyUnicode_InternFromString("_make");
    fields_name = PyUnicode_InternFromString("_fields");
    NAMES(INTERN_NAME)
    expect_objects(objects);
    return PyErr_Occurred() ? -1 : PyModule_AddFunctions(module, templates_functions);
}
