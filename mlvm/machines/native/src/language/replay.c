/* Launches of a captured program on a call's tensors, without Python.
 *
 * In:        `Replay(operands, states, check)`: the tensors that a program runs on, by role and number, the
 *            states among them, and None or a function that returns, under the VM's lock, whether the
 *            program may run on some handles.
 * Out:       `run` allocates the outputs and runs the program on them and a call's inputs; or returns None
 *            before any side effect. In this case Python launches it, as `Launch.run` in
 *            mlvm/eager/capture/launch.py does, and passes the launch to `learn`.
 * Must hold: as for eager calls (dispatch.c): a native VM without instruments, an arena with free regions.
 *            The program has only kernel calls and jumps, and is bound to these handles; `Replay` has a dict of
 *            bound programs by handle bytes, which the free store clears when a handle may refer to a
 *            different array.
 * Callers:   `Captured`, from any thread.
 * Locks:     the interpreter lock; the VM's lock from the launch's check to its end. Everything that
 *            was looked up before acquiring the VM's lock is looked up again under the lock, because
 *            acquiring it may have waited.
 */
#include "replay.h"

#include "../machine/loop.h"
#include "dispatch.h"

#include <string.h>

enum { MOST_KNOWN = 16, MOST_VAIN = 64, NUMBERS = 2, ON_STACK = 64 };

/* Operand of a program: the role (input, output, state), the number in this role, and the type. */
typedef struct {
    Py_ssize_t role, place;
    PyObject *type;
} Operand;

typedef struct {
    PyObject_HEAD PyObject *operands, *states, *check, *runs;
    Operand *operand;
    Py_ssize_t count;
    int vain; /* cached launches that have not run again */
} Replay;

static PyTypeObject *replay_type;
static PyObject *nbytes_name;

/* Return whether two types have the same size; -1 with an exception set. */
static int is_as_large(PyObject *x, PyObject *y)
{
    PyObject *mine = PyObject_GetAttr(x, nbytes_name),
             *others = mine ? PyObject_GetAttr(y, nbytes_name) : NULL;
    int answer = others ? PyObject_RichCompareBool(mine, others, Py_EQ) : -1;
    Py_XDECREF(mine);
    Py_XDECREF(others);
    return answer;
}

/* Return the handle of an operand, borrowed; NULL if the tensor is missing or freed, or has no
 * handle of the type with which it is used. */
static PyObject *handle_of(const Replay *self, const Operand *operand, PyObject *inputs, PyObject *outputs)
{
    PyObject *list = operand->role == 0 ? inputs : operand->role == 1 ? outputs : self->states;
    if (operand->place >= PyList_Size(list))
        return NULL;
    Allocation *x = (Allocation *)PyList_GetItem(list, operand->place);
    if (!PyObject_TypeCheck((PyObject *)x, allocation_type) || !x->type)
        return NULL;
    if (x->handle && x->type == operand->type)
        return x->handle;
    Region *region = home_of(x); /* the region has one handle per type of view */
    int is_there = region && region->handles && is_alive(x) &&
                   (x->type == operand->type || is_as_large(x->type, operand->type) > 0);
    return is_there ? PyDict_GetItemWithError(region->handles, operand->type) : NULL;
}

/* Return the handles of the operands, followed by `rest`, as a tuple; NULL if one requires Python, or
 * with an exception set. */
static PyObject *handles_of(const Replay *self, PyObject *inputs, PyObject *outputs, PyObject *rest)
{
    Py_ssize_t nrest = rest ? PyTuple_Size(rest) : 0;
    PyObject *handles = PyTuple_New(self->count + nrest);
    for (Py_ssize_t i = 0; handles && i < self->count; i++) {
        PyObject *handle = handle_of(self, &self->operand[i], inputs, outputs);
        if (!handle) {
            Py_DECREF(handles);
            return NULL;
        }
        PyTuple_SetItem(handles, i, Py_NewRef(handle));
    }
    for (Py_ssize_t i = 0; handles && i < nrest; i++)
        PyTuple_SetItem(handles, self->count + i, Py_NewRef(PyTuple_GetItem(rest, i)));
    return handles;
}

/* handles(inputs, outputs, scratch) -> tuple, or None if one requires Python. */
static PyObject *replay_handles(Replay *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_Check(args[0]) || !PyList_Check(args[1]) || !PyTuple_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "handles: expected (list, list, tuple), got %zd args", nargs);
    PyObject *handles = handles_of(self, args[0], args[1], args[2]);
    return handles || PyErr_Occurred() ? handles : Py_NewRef(Py_None);
}

/* Return the key of a launch: the VM, the functions and the handles of the operands. NULL with an
 * exception set if memory is missing. */
static PyObject *key_of(const Replay *self, const FastPath *fast_path, PyObject *handles)
{
    int64_t on_stack[ON_STACK], *numbers = on_stack;
    size_t nbytes = (size_t)(self->count + NUMBERS) * sizeof *numbers;
    if (self->count + NUMBERS > ON_STACK && !(numbers = PyMem_Malloc(nbytes)))
        return PyErr_NoMemory();
    numbers[0] = fast_path->number;
    numbers[1] = fast_path->generation;
    for (Py_ssize_t i = 0; i < self->count; i++)
        numbers[NUMBERS + i] = PyLong_AsLongLong(PyTuple_GetItem(handles, i));
    PyObject *key = PyBytes_FromStringAndSize((char *)numbers, (Py_ssize_t)nbytes);
    if (numbers != on_stack)
        PyMem_Free(numbers);
    return key;
}

/* Allocate tensors of these types in the arena. NULL if one has no free region; an exception may be set. */
static PyObject *alloc_tensors(Arena *arena, PyObject *types)
{
    Py_ssize_t count = PyTuple_Size(types);
    PyObject *outputs = PyList_New(count);
    for (Py_ssize_t i = 0; outputs && i < count; i++) {
        PyObject *type = PyTuple_GetItem(types, i), *handle;
        Allocation *out = (Allocation *)object_of(tensor_class);
        if (!out || PyList_SetItem(outputs, i, (PyObject *)out)) {
            Py_DECREF(outputs);
            return NULL;
        }
        PyObject *holder = PyWeakref_NewRef((PyObject *)out, NULL);
        Region *region = holder ? next_region(arena, type, &handle) : NULL;
        if (region && !handle)
            handle = region->handles ? PyDict_GetItemWithError(region->handles, type) : NULL;
        if (region && handle) {
            take(region, handle, type, arena, out, holder);
            out->tape = Py_NewRef(Py_None);
        } else {
            Py_CLEAR(outputs); /* frees the tensors */
        }
        Py_XDECREF(holder);
    }
    return outputs;
}

/* Return whether `check` allows a run on these handles; -1 with an exception set. */
static int is_allowed(const Replay *self, PyObject *handles)
{
    PyObject *answer = self->check == Py_None ? Py_NewRef(Py_True)
                                              : PyObject_CallFunctionObjArgs(self->check, handles, NULL);
    int allowed = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return allowed;
}

/* Run the program bound to the key's handles, if it is cached. Return 1 if it ran, 0 if it is not
 * cached, -1 with an exception set. The VM's lock is held. */
static int run_bound_to(Replay *self, FastPath *fast_path, PyObject *key, int64_t generation)
{
    PyObject *run = PyDict_GetItemWithError(self->runs, key), *program, *helper, *resume, *handles, *arrays;
    if (fast_path->running == process_number()) /* these handles refer to scratch memory of that launch */
        return 0;
    if (!run || !PyTuple_Check(run) || generation != fast_path->generation || !is_unwatched(fast_path))
        return PyErr_Occurred() ? -1 : 0;
    if (!PyArg_ParseTuple(run, "OOOOO", &program, &helper, &resume, &handles, &arrays))
        return -1;
    Py_INCREF(run);
    int done = is_allowed(self, handles);
    if (done > 0) {
        fast_path->running = process_number(); /* a signal's handler may call the VM */
        PyObject *state = program_launch(program, fast_path->pool, helper, arrays, -1);
        if (state && PyTuple_Check(state)) {
            PyObject *rest = PyObject_CallFunctionObjArgs(resume, state, NULL);
            Py_DECREF(state);
            state = rest;
        }
        fast_path->running = 0;
        done = state ? 1 : -1;
        Py_XDECREF(state);
    }
    Py_DECREF(run);
    return done;
}

/* run(arena, inputs, types) -> outputs of these types, or None without side effects. */
static PyObject *replay_run(Replay *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyList_Check(args[1]) || !PyTuple_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "run: expected (arena, list, tuple), got %zd args", nargs);
    FastPath *fast_path = fast_path_of(args[0]);
    if (!fast_path || !is_unwatched(fast_path) || !PyDict_Size(self->runs))
        Py_RETURN_NONE;
    Py_INCREF((PyObject *)fast_path);
    int64_t generation = fast_path->generation;
    PyObject *outputs = alloc_tensors((Arena *)args[0], args[2]);
    PyObject *handles = outputs ? handles_of(self, args[1], outputs, NULL) : NULL;
    PyObject *key = handles ? key_of(self, fast_path, handles) : NULL;
    int done = PyErr_Occurred() ? -1 : 0;
    if (key && PyDict_GetItemWithError(self->runs, key) && !(done = acquire_lock(fast_path->lock))) {
        done = run_bound_to(self, fast_path, key, generation);
        release_lock(fast_path->lock);
    }
    Py_XDECREF(key);
    Py_XDECREF(handles);
    Py_DECREF((PyObject *)fast_path);
    if (done > 0) {
        self->vain -= self->vain > 0;
        return outputs;
    }
    Py_XDECREF(outputs);
    return done < 0 || PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* learn(arena, program, handles): remember a launch that Python has just sent. A signal handler may
 * have moved the tensors since then, so the current handles of the tensors are not used. */
static PyObject *replay_learn(Replay *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !PyTuple_Check(args[2]) || PyTuple_Size(args[2]) < self->count)
        return PyErr_Format(PyExc_TypeError, "learn: expected (arena, program, handles), got %zd", nargs);
    FastPath *fast_path = fast_path_of(args[0]);
    if (!fast_path || !is_unwatched(fast_path) || self->vain >= MOST_VAIN)
        Py_RETURN_NONE;
    self->vain++;
    Py_INCREF((PyObject *)fast_path);
    if (PyDict_Size(self->runs) >= MOST_KNOWN)
        PyDict_Clear(self->runs);
    PyObject *key = key_of(self, fast_path, args[2]), *run = NULL;
    /* While the mark is present, nothing has cleared the dict: `bound` runs Python, and other threads. */
    PyObject *mark = key ? PyList_New(0) : NULL;
    if (mark && !PyDict_SetItem(self->runs, key, mark))
        run = PyObject_CallFunctionObjArgs(fast_path->bound, args[1], args[2], self->runs, NULL);
    if (run && PyDict_GetItemWithError(self->runs, key) == mark) {
        int is_closed = PyTuple_Check(run) && program_is_closed(PyTuple_GetItem(run, 0));
        if (is_closed ? PyDict_SetItem(self->runs, key, run) : PyDict_DelItem(self->runs, key))
            Py_CLEAR(run);
    }
    Py_XDECREF(mark);
    Py_XDECREF(key);
    Py_XDECREF(run);
    Py_DECREF((PyObject *)fast_path);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Replay(operands, states, check) */
static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)kwargs;
    PyObject *operands, *states, *check;
    if (!PyArg_ParseTuple(args, "O!O!O:Replay", &PyTuple_Type, &operands, &PyList_Type, &states, &check))
        return NULL;
    Replay *self = (Replay *)object_of(type);
    if (!self)
        return NULL;
    Py_ssize_t count = PyTuple_Size(operands);
    self->operand = PyMem_Calloc((size_t)count + 1, sizeof *self->operand);
    self->runs = PyDict_New();
    int failed = !self->operand || !self->runs;
    if (failed)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count && !failed; i++) {
        Operand *its = &self->operand[i];
        failed = !PyArg_ParseTuple(PyTuple_GetItem(operands, i), "nnO", &its->role, &its->place,
                                   &its->type);
    }
    if (failed) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    self->operands = Py_NewRef(operands);
    self->states = Py_NewRef(states);
    self->check = Py_NewRef(check);
    self->count = count;
    return (PyObject *)self;
}

OBJECT_FIELDS(Replay, fields, operands, runs)

static int replay_clear(Replay *self)
{
    self->count = 0;
    if (self->runs)
        PyDict_Clear(self->runs); /* the free store keeps the dict */
    return fields_clear(self);
}

static void replay_dealloc(Replay *self)
{
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    PyMem_Free(self->operand);
    free_object((PyObject *)self);
}

static PyMethodDef replay_methods[] = {
    {"handles", (PyCFunction)(void (*)(void))replay_handles, METH_FASTCALL,
     "handles(inputs, outputs, scratch): the handles to launch the program on."},
    {"run", (PyCFunction)(void (*)(void))replay_run, METH_FASTCALL,
     "run(arena, inputs, types): the outputs of a launch, or None if Python must launch the program."},
    {"learn", (PyCFunction)(void (*)(void))replay_learn, METH_FASTCALL,
     "learn(arena, program, handles): remember a launch."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot replay_slots[] = {
    {Py_tp_new, replay_new},
    {Py_tp_dealloc, replay_dealloc},
    {Py_tp_traverse, fields_traverse},
    {Py_tp_clear, replay_clear},
    {Py_tp_methods, replay_methods},
    {Py_tp_doc, "Replay(operands, states, check): launches of a captured program."},
    {0, NULL}};
static PyType_Spec replay_spec = {"mlvm.machines.native._native.Replay", sizeof(Replay), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, replay_slots};

int replay_init(PyObject *module)
{
    replay_type = add_type(module, "Replay", &replay_spec);
    nbytes_name = PyUnicode_InternFromString("nbytes");
    return replay_type && nbytes_name ? 0 : -1;
}
