/* The fast path of an eager call: allocate the result, launch one op, record it on the tape.
 *
 * In:       `apply(call, *operands)`: an op with attributes, and eager tensors.
 * Out:      a tensor, and a node of the tape where an operand is tracked; or the result of the slow path,
 *           `apply_in_python` in mlvm/eager/tensor/apply.py, which defines the semantics. The slow path
 *           is taken before any side effect.
 * Must hold: for the fast path, all operands are plain tensors of types in the call's cache, on a native
 *           VM without instruments, in an arena that does not record and has a free region for the
 *           result type. On a remote VM the launch is a message in the `Outbox`.
 * Callers:  Python, by every eager function; module.c installs the types.
 * Locks:    the interpreter lock throughout, so that no other thread changes an arena, a free store or
 *           an idle VM; the VM's lock from the launch's check to its end. Whenever Python may have run in
 *           between, in this thread or another, the cache is checked again (`entry_holds`).
 */
#include "dispatch.h"

#include <stdlib.h>
#include <string.h>

/* --- the fields that C reads and writes: see mlvm/arena/fields.py and dispatch.h --- */

enum { MASKS = 16, MOST_PLACES = 512, MOST_BINS = 4096, MOST_SPARE = 1 << 18, MOST_TABLES = 4 };

/* Cache entry of a call: the kernel for operands of these types on one VM. */
typedef struct Entry {
    size_t hash;         /* hash of VM and types */
    long long fast_path; /* the number, because a reference would keep the VM's threads alive */
    long long generation;
    PyObject **types;           /* of `count` operands */
    PyObject *out;              /* the result's type */
    KernelCallObject *call;     /* NULL: Python launches the op */
    long long program;          /* on a remote VM: the number on the server; 0: use the slow path */
    PyObject *dynamic;          /* function for a result whose shape depends on values, or NULL */
    PyObject *templates[MASKS]; /* templates of tape nodes, by tracked operands, if they are few */
    int count;
} Entry;

static PyTypeObject *arena_type, *call_type, *fast_path_type;
PyTypeObject *allocation_type, *region_type, *tensor_class;

/* Objects of Python, set by `install`. */
static PyTypeObject *tape_class;
PyObject *live_tapes;
/* clang-format 14 does not find a stable layout of these lists. */
/* clang-format off */
#define OBJECTS(EACH) \
    EACH(class_of_tensors) EACH(class_of_tapes) EACH(slow_apply) EACH(slow_update) EACH(slow_launch) \
    EACH(get_context) EACH(own_arenas) EACH(default_arena) EACH(resolve) EACH(raise_stale) \
    EACH(weak_reference) EACH(view_logs)
#define NAMES(EACH) \
    EACH(op) EACH(in_place) EACH(alloc) EACH(provide) EACH(nbytes) EACH(latest) EACH(record) EACH(nodes) \
    EACH(saved_roots) EACH(template) EACH(has_lost)
/* clang-format on */
OBJECTS(DECLARE_OBJECT)
static const Installed objects[] = {OBJECTS(ROW_OF_OBJECT){"live_tapes", &live_tapes}, {NULL, NULL}};
Later later;
static PyObject *view_name; /* _late_view */
NAMES(DECLARE_NAME)

int is_quiet(void)
{
    return PyList_Size(view_logs) == 0;
}

/* --- types with plain fields --- */

#define OBJECT_FIELD(Struct, name)                          \
    {                                                       \
#name, T_OBJECT_EX, offsetof(Struct, name), 0, NULL \
    }
#define NUMBER_FIELD(Struct, name)                         \
    {                                                      \
#name, T_LONGLONG, offsetof(Struct, name), 0, NULL \
    }
#define WEAKREFS(Struct)                                                             \
    {                                                                                \
        "__weaklistoffset__", T_PYSSIZET, offsetof(Struct, weakrefs), READONLY, NULL \
    }

/* As `PyObject_TypeCheck`, faster for the subclass that Python derives first, and keeps. */
static int is_instance(PyObject *object, PyTypeObject *type, PyTypeObject **derived)
{
    if (Py_TYPE(object) == *derived)
        return 1;
    int answer = PyObject_TypeCheck(object, type);
    if (answer && !*derived)
        *derived = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(object));
    return answer;
}

int is_region(PyObject *object)
{
    static PyTypeObject *derived;
    return is_instance(object, region_type, &derived);
}

static int is_arena(PyObject *object)
{
    static PyTypeObject *derived;
    return is_instance(object, arena_type, &derived);
}

int is_call(PyObject *object)
{
    static PyTypeObject *derived;
    return is_instance(object, call_type, &derived);
}

#define FIELDS(Struct, name, first, last)             \
    OBJECT_FIELDS(Struct, name, first, last)          \
    static void name##_dealloc(Struct *self)          \
    {                                                 \
        PyObject_GC_UnTrack(self);                    \
        if (self->weakrefs)                           \
            PyObject_ClearWeakRefs((PyObject *)self); \
        name##_clear(self);                           \
        free_object((PyObject *)self);                \
    }

FIELDS(Allocation, allocation, region, is_part)
FIELDS(Region, region, storage, noted)
FIELDS(Arena, arena, fast_path, sizes)

/* --- the views of a region --- */

static void unlink_view(Allocation *view)
{
    if (!view->link)
        return;
    *view->link = view->next;
    if (view->next)
        view->next->link = view->link;
    view->link = NULL;
    view->next = NULL;
}

void link_view(Region *region, Allocation *view)
{
    unlink_view(view);
    view->next = region->first_view;
    if (view->next)
        view->next->link = &view->next;
    view->link = &region->first_view;
    region->first_view = view;
}

static void region_finalize(PyObject *self)
{
    while (((Region *)self)->first_view)
        unlink_view(((Region *)self)->first_view);
}

/* region.views: the live views of the tensor, the oldest first. */
static PyObject *region_views(Region *self, void *unused)
{
    (void)unused;
    Py_ssize_t count = 0, i = 0;
    for (Allocation *view = self->first_view; view; view = view->next)
        count++;
    PyObject *views = PyTuple_New(count);
    for (Allocation *view = self->first_view; views && view; view = view->next)
        PyTuple_SetItem(views, count - ++i, Py_NewRef((PyObject *)view));
    return views;
}

static PyObject *region_add_view(Region *self, PyObject *view)
{
    if (!PyObject_TypeCheck(view, allocation_type))
        return PyErr_Format(PyExc_TypeError, "add_view: expected an Allocation, got %R", view);
    link_view(self, (Allocation *)view);
    Py_RETURN_NONE;
}

static PyObject *region_remove_view(Region *self, PyObject *view)
{
    (void)self;
    if (!PyObject_TypeCheck(view, allocation_type))
        return PyErr_Format(PyExc_TypeError, "remove_view: expected an Allocation, got %R", view);
    unlink_view((Allocation *)view);
    Py_RETURN_NONE;
}

static PyObject *region_take_views(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *views = region_views((Region *)self, NULL);
    if (views)
        region_finalize(self);
    return views;
}

/* Free a region without a C struct, or with an arena without one, such as a queue's slot. */
static int free_in_python(PyObject *region, PyObject *arena)
{
    PyObject *nbytes = PyObject_GetAttrString(region, "nbytes");
    PyObject *used = nbytes && arena ? PyObject_GetAttrString(arena, "used") : NULL;
    PyObject *now = used ? PyNumber_Subtract(used, nbytes) : NULL;
    PyObject *bin = now && !PyObject_SetAttrString(arena, "used", now)
                        ? PyObject_GetAttrString(region, "bin")
                        : NULL;
    PyObject *done = bin ? PyObject_CallMethod(bin, "append", "O", region) : NULL;
    PyObject *parts[] = {bin, nbytes, used, now, done};
    clear_fields(parts, 5);
    return !done;
}

/* As `__del__` in mlvm/arena/fields.py: a tensor whose region was taken is freed. */
static void allocation_finalize(PyObject *object)
{
    Allocation *self = (Allocation *)object;
    unlink_view(self); /* before Python code runs, which must not find the freed view */
    PyObject *region = self->region;
    if (!region || region == Py_None)
        return;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    Py_INCREF(Py_None);
    self->region = Py_None;
    Region *its = (Region *)region;
    int failed;
    if (is_region(region) && its->bin && PyList_CheckExact(its->bin) && self->arena &&
        is_arena(self->arena)) {
        failed = PyList_Append(its->bin, region);
        ((Arena *)self->arena)->used -= its->nbytes;
    } else {
        failed = free_in_python(region, self->arena);
    }
    if (failed)
        PyErr_WriteUnraisable(object);
    Py_DECREF(region);
    PyErr_Restore(type, error, traceback);
}

int is_alive(const Allocation *x)
{
    if (x->handle)
        return PyLong_AsLong(x->handle) > 0;
    Region *home = home_of(x);
    return home && home->address;
}

Region *home_of(const Allocation *x)
{
    return region_of(root_of((Allocation *)x));
}

/* x.handle: created at the first access for a tensor that C has allocated at a known address. */
static PyObject *allocation_handle(Allocation *self, void *unused)
{
    (void)unused;
    if (self->handle)
        return Py_NewRef(self->handle);
    Region *home = home_of(self);
    if (!home || !home->handles || !self->arena || !self->type)
        return PyErr_Format(PyExc_AttributeError, "the tensor has no memory and no handle");
    PyObject *known = PyDict_GetItemWithError(home->handles, self->type);
    PyObject *handle = known ? Py_NewRef(known)
                             : PyObject_CallMethodObjArgs(self->arena, view_name, (PyObject *)home,
                                                          self->type, NULL);
    if (handle && !self->handle)
        self->handle = Py_NewRef(handle);
    return handle;
}

static int allocation_set_handle(Allocation *self, PyObject *handle, void *unused)
{
    (void)unused;
    PyObject *old = self->handle;
    self->handle = Py_XNewRef(handle);
    Py_XDECREF(old);
    return 0;
}

static PyGetSetDef allocation_getters[] = {
    {"handle", (getter)allocation_handle, (setter)allocation_set_handle, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyObject *subscript_later(PyObject *x, PyObject *key)
{
    return later.subscript(x, key);
}

static int assign_subscript_later(PyObject *x, PyObject *key, PyObject *values)
{
    return later.assign_subscript(x, key, values);
}

/* x[i] of a sequence, for `reversed`. */
static PyObject *sequence_item(PyObject *x, Py_ssize_t i)
{
    PyObject *key = PyLong_FromSsize_t(i);
    PyObject *result = key ? later.subscript(x, key) : NULL;
    Py_XDECREF(key);
    return result;
}

static PyMemberDef allocation_members[] = {OBJECT_FIELD(Allocation, region),
                                           OBJECT_FIELD(Allocation, arena),
                                           OBJECT_FIELD(Allocation, type),
                                           OBJECT_FIELD(Allocation, base),
                                           OBJECT_FIELD(Allocation, ended),
                                           OBJECT_FIELD(Allocation, tape),
                                           OBJECT_FIELD(Allocation, node),
                                           OBJECT_FIELD(Allocation, is_part),
                                           WEAKREFS(Allocation),
                                           {NULL, 0, 0, 0, NULL}};
static PyMemberDef region_members[] = {OBJECT_FIELD(Region, storage),
                                       OBJECT_FIELD(Region, offset),
                                       OBJECT_FIELD(Region, bin),
                                       OBJECT_FIELD(Region, number),
                                       OBJECT_FIELD(Region, handles),
                                       OBJECT_FIELD(Region, holder),
                                       OBJECT_FIELD(Region, holder_at_reset),
                                       OBJECT_FIELD(Region, last),
                                       OBJECT_FIELD(Region, noted),
                                       NUMBER_FIELD(Region, nbytes),
                                       NUMBER_FIELD(Region, address),
                                       {"watched", T_BOOL, offsetof(Region, watched), 0, NULL},
                                       WEAKREFS(Region),
                                       {NULL, 0, 0, 0, NULL}};
static PyMemberDef arena_members[] = {OBJECT_FIELD(Arena, fast_path),
                                      {"_bins", T_OBJECT_EX, offsetof(Arena, bins), 0, NULL},
                                      {"_refer", T_OBJECT_EX, offsetof(Arena, refer), 0, NULL},
                                      {"_sizes", T_OBJECT_EX, offsetof(Arena, sizes), 0, NULL},
                                      NUMBER_FIELD(Arena, used),
                                      NUMBER_FIELD(Arena, high_water),
                                      {"trims", T_BOOL, offsetof(Arena, trims), 0, NULL},
                                      WEAKREFS(Arena),
                                      {NULL, 0, 0, 0, NULL}};

#define SLOTS(name, ...)                                                    \
    static PyType_Slot name##_slots[] = {{Py_tp_traverse, name##_traverse}, \
                                         {Py_tp_clear, name##_clear},       \
                                         {Py_tp_dealloc, name##_dealloc},   \
                                         {Py_tp_members, name##_members},   \
                                         __VA_ARGS__{0, NULL}};
SLOTS(allocation, {Py_tp_finalize, allocation_finalize}, {Py_tp_getset, allocation_getters},
      {Py_mp_subscript, subscript_later}, {Py_mp_ass_subscript, assign_subscript_later},
      {Py_sq_item, sequence_item}, )
static PyGetSetDef region_getters[] = {
    {"views", (getter)region_views, NULL, "The live views of the tensor, the oldest first.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};
static PyMethodDef region_methods[] = {
    {"add_view", (PyCFunction)region_add_view, METH_O, "add_view(view): list a view until it is deleted."},
    {"remove_view", (PyCFunction)region_remove_view, METH_O,
     "remove_view(view): remove a view from the list."},
    {"take_views", (PyCFunction)region_take_views, METH_NOARGS, "Return all views, and clear the list."},
    {NULL, NULL, 0, NULL}};
SLOTS(region, {Py_tp_finalize, region_finalize}, {Py_tp_getset, region_getters},
      {Py_tp_methods, region_methods}, )
SLOTS(arena)

#define SPEC(name, Name, Struct)                                                                     \
    static PyType_Spec name##_spec = {"mlvm.machines.native._native." Name, sizeof(Struct), 0,       \
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, \
                                      name##_slots};
SPEC(allocation, "AllocationFields", Allocation)
SPEC(region, "RegionFields", Region)
SPEC(arena, "ArenaFields", Arena)

/* --- the cache of a call --- */

/* Freeing the old entry may run Python, which must find the new one. */
static void replace_entry(Entry *entry, Entry with)
{
    Entry old = *entry;
    *entry = with;
    for (int i = 0; i < old.count; i++)
        Py_DECREF(old.types[i]);
    PyMem_Free(old.types);
    Py_XDECREF(old.out);
    Py_XDECREF((PyObject *)old.call);
    Py_XDECREF(old.dynamic);
    clear_fields(old.templates, MASKS);
}

static void call_dealloc(Call *self)
{
    for (size_t i = 0; i < self->capacity; i++)
        if (self->entries[i]) {
            replace_entry(self->entries[i], (Entry){0});
            PyMem_Free(self->entries[i]);
        }
    PyMem_Free(self->entries);
    free_object((PyObject *)self);
}

static PyMemberDef call_members[] = {{"gives_part", T_BOOL, offsetof(Call, gives_part), 0, NULL},
                                     {NULL, 0, 0, 0, NULL}};
static PyType_Slot call_slots[] = {{Py_tp_dealloc, call_dealloc}, {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {"mlvm.machines.native._native.CallFields", sizeof(Call), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, call_slots};

static size_t hash_of(const FastPath *fast_path, Allocation *const *operands, int count)
{
    size_t hash = (size_t)fast_path->number;
    for (int i = 0; i < count; i++)
        hash = hash * 31 + ((size_t)operands[i]->type >> 5);
    return hash ^ hash >> 7;
}

static int is_of(const Entry *entry, const FastPath *fast_path, Allocation *const *operands, int count)
{
    if (entry->fast_path != fast_path->number || entry->count != count)
        return 0;
    for (int i = 0; i < count; i++)
        if (entry->types[i] != operands[i]->type)
            return 0;
    return 1;
}

static int entry_holds(const Entry *entry, const FastPath *fast_path, Allocation *const *operands,
                       int count)
{
    return entry->generation == fast_path->generation && is_of(entry, fast_path, operands, count);
}

/* Return the slot of the entry for operands of these types, or the slot for a new entry. */
static Entry **place_of(const Call *call, const FastPath *fast_path, Allocation *const *operands, int count,
                        size_t hash)
{
    Entry **unused = NULL;
    for (size_t i = 0; i < call->capacity; i++) {
        Entry **place = &call->entries[(hash + i) & (call->capacity - 1)];
        if (*place && is_of(*place, fast_path, operands, count))
            return place;
        if (!unused && (!*place || !(*place)->out))
            unused = place;
        if (!*place)
            break;
    }
    return unused;
}

/* Return the valid entry for operands of these types, or NULL. */
static Entry *entry_of(const Call *call, const FastPath *fast_path, Allocation *const *operands, int count)
{
    if (!call->capacity)
        return NULL;
    Entry *entry = *place_of(call, fast_path, operands, count, hash_of(fast_path, operands, count));
    return entry && entry_holds(entry, fast_path, operands, count) ? entry : NULL;
}

static int double_capacity(Call *call)
{
    size_t capacity = call->capacity ? 2 * call->capacity : 4;
    Entry **entries = PyMem_Calloc(capacity, sizeof *entries);
    if (!entries)
        return -1;
    for (size_t k = 0; k < call->capacity; k++)
        if (call->entries[k]) {
            size_t i = call->entries[k]->hash & (capacity - 1);
            while (entries[i])
                i = (i + 1) & (capacity - 1);
            entries[i] = call->entries[k];
        }
    PyMem_Free(call->entries);
    call->entries = entries;
    call->capacity = capacity;
    return 0;
}

/* Return an entry to fill for operands of these types. A full table is replaced by a larger one with the
 * same entries. NULL if memory is exhausted. */
static Entry *entry_to_fill(Call *call, const FastPath *fast_path, Allocation *const *operands, int count)
{
    if (2 * call->count >= call->capacity && call->capacity < MOST_PLACES && double_capacity(call))
        return NULL;
    if (2 * call->count >= call->capacity) {
        call->count = 0;
        for (size_t i = 0; i < call->capacity; i++)
            if (call->entries[i])
                replace_entry(call->entries[i], (Entry){0});
    }
    size_t hash = hash_of(fast_path, operands, count);
    Entry **place = place_of(call, fast_path, operands, count, hash);
    if (!*place && !(*place = PyMem_Calloc(1, sizeof **place)))
        return NULL;
    (*place)->hash = hash;
    return *place;
}

PyObject *tuple_of(PyObject *const *objects, Py_ssize_t count)
{
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++)
        PyTuple_SetItem(tuple, i, Py_NewRef(objects[i]));
    return tuple;
}

static PyObject *types_of(Allocation *const *operands, int count)
{
    PyObject *types[MOST_OPERANDS];
    for (int i = 0; i < count; i++)
        types[i] = operands[i]->type;
    return tuple_of(types, count);
}

PyObject *present_context(void)
{
    return PyObject_CallNoArgs(get_context);
}

PyObject *present_tape(void)
{
    PyObject *context = present_context();
    PyObject *tape = context ? Py_XNewRef(PyTuple_GetItem(context, TAPE)) : NULL;
    Py_XDECREF(context);
    return tape;
}

/* Resolve the call for operands of these types in Python. Ignore errors, since the slow path has just
 * succeeded; keep a pending KeyboardInterrupt. */
static void fill_cache(Call *call, FastPath *fast_path, Allocation *const *operands, int count)
{
    Entry *entry = entry_to_fill(call, fast_path, operands, count);
    Entry fresh = {.hash = hash_of(fast_path, operands, count),
                   .fast_path = fast_path->number,
                   .generation = fast_path->generation};
    PyObject *types = entry ? types_of(operands, count) : NULL;
    PyObject *answer = types ? PyObject_CallFunctionObjArgs(resolve, (PyObject *)call, types,
                                                            (PyObject *)fast_path, NULL)
                             : NULL;
    PyObject *run = NULL, *out = NULL;
    if (answer && PyArg_ParseTuple(answer, "OO", &run, &out) &&
        (fresh.types = PyMem_Malloc(sizeof *fresh.types * (size_t)(count + 1)))) {
        for (; fresh.count < count; fresh.count++)
            fresh.types[fresh.count] = Py_NewRef(PyTuple_GetItem(types, fresh.count));
        if (is_kernel_call(run))
            fresh.call = (KernelCallObject *)Py_NewRef(run);
        else if (PyLong_Check(run))
            fresh.program = PyLong_AsLongLong(run);
        else if (run != Py_None)
            fresh.dynamic = Py_NewRef(run);
        fresh.out = Py_NewRef(out);
        call->count += !entry->out;
        replace_entry(entry, fresh);
    }
    Py_XDECREF(types);
    Py_XDECREF(answer);
    clear_nonfatal_error();
}

/* Return the entry for operands of these types; fill a new one if there is none. NULL if Python must run
 * the call; an exception may be set. */
static Entry *filled_entry(Call *call, FastPath *fast_path, Allocation *const *operands, int count)
{
    Entry *entry = entry_of(call, fast_path, operands, count);
    if (entry)
        return entry;
    fill_cache(call, fast_path, operands, count);
    return PyErr_Occurred() ? NULL : entry_of(call, fast_path, operands, count);
}

KernelCallObject *kernel_of(PyObject *call, FastPath *fast_path, Allocation *const *operands, int count)
{
    Entry *entry = is_call(call) ? filled_entry((Call *)call, fast_path, operands, count) : NULL;
    return entry && entry->call ? (KernelCallObject *)Py_NewRef((PyObject *)entry->call) : NULL;
}

/* --- FastPath --- */

static PyObject *fast_path_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"find", "prepare", "bound", "lock", "pool", "outbox", "flush", NULL};
    PyObject *find = NULL, *prepare = NULL, *bound = NULL, *lock = NULL, *pool = NULL, *outbox = NULL,
             *flush = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOOOOOO:FastPath", names, &find, &prepare, &bound,
                                     &lock, &pool, &outbox, &flush))
        return NULL;
    if (!prepare || (outbox ? !is_outbox(outbox) || !flush
                            : !find || !bound || !lock || !is_lock(lock) || !pool || !is_pool(pool)))
        return PyErr_Format(PyExc_TypeError,
                            "FastPath: expected find, bound, Lock and Pool, or Outbox and flush");
    FastPath *self = (FastPath *)object_of(type);
    if (!self)
        return NULL;
    self->find = Py_XNewRef(find);
    self->prepare = Py_NewRef(prepare);
    self->bound = Py_XNewRef(bound);
    self->flush = Py_XNewRef(flush);
    self->lock = (LockObject *)Py_XNewRef(lock);
    self->pool = (PoolObject *)Py_XNewRef(pool);
    self->outbox = (Outbox *)Py_XNewRef(outbox);
    static long long number = 0;
    self->number = ++number;
    self->room = 256;
    self->places = PyMem_Calloc((size_t)self->room, sizeof *self->places);
    if (!self->places) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

OBJECT_FIELDS(FastPath, fast_path, find, flush)

static void fast_path_dealloc(FastPath *self)
{
    PyObject_GC_UnTrack(self);
    fast_path_clear(self);
    Py_XDECREF((PyObject *)self->lock);
    Py_XDECREF((PyObject *)self->pool);
    Py_XDECREF((PyObject *)self->outbox);
    PyMem_Free(self->places);
    free_object((PyObject *)self);
}

static PyObject *fast_path_forget(FastPath *self, PyObject *unused)
{
    (void)unused;
    self->generation++;
    Py_RETURN_NONE;
}

static PyObject *fast_path_forget_places(FastPath *self, PyObject *unused)
{
    (void)unused;
    if (self->occupied)
        memset(self->places, 0, sizeof *self->places * (size_t)self->room);
    self->occupied = 0;
    Py_RETURN_NONE;
}

static Place *find_place(Place *places, int64_t room, int64_t handle)
{
    int64_t i = handle & (room - 1);
    while (places[i].handle && places[i].handle != handle)
        i = (i + 1) & (room - 1);
    return &places[i];
}

/* Return the cached address of a tensor of that type; NULL if there is none. */
static char *cached_address(const FastPath *self, PyObject *handle, PyObject *type)
{
    const Place *place = find_place(self->places, self->room, PyLong_AsLongLong(handle));
    return place->handle && place->type == type ? place->address : NULL;
}

static void enlarge(FastPath *self)
{
    Place *places = PyMem_Calloc((size_t)self->room * 2, sizeof *places);
    for (int64_t i = 0; places && i < self->room; i++)
        if (self->places[i].handle)
            *find_place(places, self->room * 2, self->places[i].handle) = self->places[i];
    if (places) {
        PyMem_Free(self->places);
        self->places = places;
        self->room *= 2;
    }
}

/* Ask Python for the address of a handle's tensor, and cache it. There may be none; only an interrupt
 * remains as an exception. Python may run any code. */
static void find_address(FastPath *self, PyObject *handle)
{
    long long number = PyLong_AsLongLong(handle); /* the tensor may be freed meanwhile */
    PyObject *answer = PyObject_CallFunctionObjArgs(self->find, handle, self, NULL);
    PyObject *array, *type;
    char *address;
    if (answer && answer != Py_None && number > 0 && PyArg_ParseTuple(answer, "OO", &array, &type) &&
        !address_of(array, &address, NULL)) {
        if (2 * (self->occupied + 1) > self->room)
            enlarge(self);
        Place *place = find_place(self->places, self->room, number);
        if (!place->handle && 2 * (self->occupied + 1) <= self->room) {
            *place = (Place){number, address, type};
            self->occupied++;
        }
    }
    Py_XDECREF(answer);
    clear_nonfatal_error();
}

char *address_in(FastPath *fast_path, const Allocation *x, int ask)
{
    if (!x->handle) {
        Region *home = home_of(x);
        int is_here = x->arena && is_arena(x->arena) &&
                      ((Arena *)x->arena)->fast_path == (PyObject *)fast_path;
        return home && is_here && !fast_path->closed ? (char *)(intptr_t)home->address : NULL;
    }
    char *address = cached_address(fast_path, x->handle, x->type);
    if (!address && ask) {
        find_address(fast_path, x->handle);
        address = PyErr_Occurred() ? NULL : cached_address(fast_path, x->handle, x->type);
    }
    return address;
}

static PyObject *fast_path_address_of(FastPath *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "address_of: expected (handle, type), got %zd args", nargs);
    if (self->outbox)
        return PyLong_FromLong(0);
    find_address(self, args[0]);
    return PyErr_Occurred() ? NULL : PyLong_FromVoidPtr(cached_address(self, args[0], args[1]));
}

static PyObject *fast_path_is_running(const FastPath *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(self->running == process_number());
}

static PyMemberDef fast_path_members[] = {
    {"prepare", T_OBJECT_EX, offsetof(FastPath, prepare), READONLY, NULL},
    {"observed", T_BOOL, offsetof(FastPath, observed), 0, NULL},
    {"instrumented", T_BOOL, offsetof(FastPath, instrumented), 0, NULL},
    {"closed", T_BOOL, offsetof(FastPath, closed), 0, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyMethodDef fast_path_methods[] = {
    {"forget", (PyCFunction)fast_path_forget, METH_NOARGS, "The function table has changed."},
    {"clear", (PyCFunction)fast_path_forget_places, METH_NOARGS,
     "A handle may refer to a different array."},
    {"address_of", (PyCFunction)(void (*)(void))fast_path_address_of, METH_FASTCALL,
     "address_of(handle, type): the address of a tensor in this process, or 0."},
    {"is_running", (PyCFunction)fast_path_is_running, METH_NOARGS,
     "is_running(): whether a captured call runs now; the caller has the VM's lock."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot fast_path_slots[] = {{Py_tp_new, fast_path_new},
                                        {Py_tp_traverse, fast_path_traverse},
                                        {Py_tp_clear, fast_path_clear},
                                        {Py_tp_dealloc, fast_path_dealloc},
                                        {Py_tp_members, fast_path_members},
                                        {Py_tp_methods, fast_path_methods},
                                        {Py_tp_doc, "FastPath(find, prepare, bound, lock, pool), "
                                                    "FastPath(prepare=, outbox=, flush=): the fast "
                                                    "path of a VM for one-op launches."},
                                        {0, NULL}};
static PyType_Spec fast_path_spec = {"mlvm.machines.native._native.FastPath", sizeof(FastPath), 0,
                                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, fast_path_slots};

/* --- apply --- */

/* Call a function for its effect. Returns 0, or -1 with an exception set. */
static int call_without_result(PyObject *function)
{
    PyObject *result = PyObject_CallNoArgs(function);
    Py_XDECREF(result);
    return result ? 0 : -1;
}

FastPath *fast_path_of(PyObject *arena)
{
    if (!is_arena(arena))
        return NULL;
    const Arena *its = (Arena *)arena;
    int is_plain = its->fast_path && Py_TYPE(its->fast_path) == fast_path_type &&
                   its->refer == weak_reference;
    return is_plain ? (FastPath *)its->fast_path : NULL;
}

/* The bytes of a region for a tensor of that size, as `size_class` and `rounded` in mlvm/arena/placement.py. */
static long long region_size(const Arena *arena, long long nbytes)
{
    long long step = 64;
    while (arena->trims && nbytes >> (nbytes <= 1 << 20 ? 4 : 7) >= step)
        step *= 2;
    return (nbytes + step - 1) / step * step;
}

/* Return a bin with a free region for a type, borrowed. The bin is for the size of the type, or, if sizes are
 * classes, for a class that is larger by at most `spare_bytes` in mlvm/arena/placement.py. The bin is remembered
 * until it is empty. NULL: no such bin. */
static PyObject *bin_of(const Arena *arena, PyObject *type)
{
    PyObject *bin = arena->bins ? PyDict_GetItemWithError(arena->bins, type) : NULL;
    if (!arena->bins || !arena->sizes || !PyDict_Check(arena->sizes) || (bin && PyList_Size(bin) > 0))
        return bin;
    PyObject *nbytes = PyObject_GetAttr(type, nbytes_name);
    long long size = nbytes && PyLong_CheckExact(nbytes) ? PyLong_AsLongLong(nbytes) : -1;
    size = size < 0 ? -1 : region_size(arena, size);
    long long spare = !arena->trims || size <= 0 ? 0
                      : size >= MOST_SPARE       ? size / 8
                      : size < 512               ? 512
                                                 : size;
    Py_XDECREF(nbytes);
    bin = NULL;
    for (long long most = size + spare; size >= 0 && size <= most && !bin;
         size = region_size(arena, size + 1)) {
        PyObject *key = PyLong_FromLongLong(size);
        bin = key ? PyDict_GetItemWithError(arena->sizes, key) : NULL;
        bin = bin && PyList_Size(bin) > 0 ? bin : NULL;
        Py_XDECREF(key);
    }
    if (bin && PyDict_Size(arena->bins) >= MOST_BINS)
        PyDict_Clear(arena->bins); /* they are found again by size */
    if (bin && PyDict_SetItem(arena->bins, type, bin))
        bin = NULL;
    PyErr_Clear();
    return bin;
}

Region *next_region(const Arena *arena, PyObject *type, PyObject **handle)
{
    PyObject *bin = bin_of(arena, type);
    Py_ssize_t count = bin ? PyList_Size(bin) : 0;
    Region *region = count > 0 ? (Region *)PyList_GetItem(bin, count - 1) : NULL;
    *handle = NULL;
    if (!region || region->bin != bin || region->address)
        return region && region->bin == bin ? region : NULL;
    *handle = region->handles ? PyDict_GetItemWithError(region->handles, type) : NULL;
    return *handle ? region : NULL;
}

int is_tape(PyObject *object)
{
    return Py_TYPE(object) == tape_class;
}

int add_node(PyObject *tape, PyObject *template, Allocation *const *operands, Allocation *out)
{
    PyObject *tracked = PyTuple_GetItem(template, 0), *pulls = PyTuple_GetItem(template, 1);
    PyObject *saves = PyTuple_GetItem(template, 2);
    Py_ssize_t ntracked = PyTuple_Size(tracked), nsaves = PyTuple_Size(saves);
    if (!ntracked)
        return PyObject_SetAttr(tape, has_lost_name, Py_True);
    PyObject *nodes = PyObject_GetAttr(tape, nodes_name);
    PyObject *kept_ids = nsaves ? PyObject_GetAttr(tape, saved_roots_name) : NULL;
    PyObject *origins = PyTuple_New(ntracked), *saved = PyTuple_New(nsaves), *node = NULL;
    int failed = !nodes || !origins || !saved || (nsaves && !kept_ids);
    for (Py_ssize_t i = 0; !failed && i < ntracked; i++) {
        PyObject *origin = operands[PyLong_AsLong(PyTuple_GetItem(tracked, i))]->node;
        failed = !origin || PyTuple_SetItem(origins, i, Py_NewRef(origin));
    }
    for (Py_ssize_t i = 0; !failed && i < nsaves; i++) {
        long which = PyLong_AsLong(PyTuple_GetItem(saves, i));
        Allocation *value = which < 0 ? out : operands[which];
        PyTuple_SetItem(saved, i, Py_NewRef((PyObject *)value));
        PyObject *id = PyLong_FromVoidPtr(root_of(value));
        failed = !id || PySet_Add(kept_ids, id);
        Py_XDECREF(id);
    }
    if (!failed) {
        PyObject *number = PyLong_FromSsize_t(PyList_Size(nodes));
        node = PyTuple_Pack(3, pulls, origins, saved);
        failed = !number || !node;
        if (!failed) {
            set(&out->tape, tape);
            set(&out->node, number);
            failed = PyList_Append(nodes, node);
        }
        Py_XDECREF(number);
    }
    Py_XDECREF(node);
    Py_XDECREF(origins);
    Py_XDECREF(saved);
    Py_XDECREF(nodes);
    Py_XDECREF(kept_ids);
    return failed ? -1 : 0;
}

/* Add a node to the tape, as `Tape.record` does. Return 0, or -1 with an exception set. */
static int record(PyObject *tape, Call *call, Entry *entry, const FastPath *fast_path,
                  Allocation *const *operands, int count, Allocation *out)
{
    uint64_t mask = 0;
    for (int i = 0; i < count; i++)
        mask |= (uint64_t)(operands[i]->tape == tape) << i;
    PyObject *types = NULL, *others = NULL, *template = NULL;
    entry = mask < MASKS ? entry : NULL;
    if (is_tape(tape) && entry && entry->templates[mask]) {
        /* freeing an object may run Python, which may drop the entry */
        template = Py_NewRef(entry->templates[mask]);
    } else if ((types = types_of(operands, count)) && is_tape(tape)) {
        others = PyTuple_New(count); /* which operands are tracked */
        for (int i = 0; others && i < count; i++)
            PyTuple_SetItem(others, i, PyBool_FromLong(mask >> i & 1));
        if (others)
            template = PyObject_CallMethodObjArgs(tape, template_name, call, types, out->type, others,
                                                  NULL);
        if (template && entry && entry_holds(entry, fast_path, operands, count))
            set(&entry->templates[mask], template);
    } else if (types && (others = tuple_of((PyObject *const *)operands, count))) {
        template = PyObject_CallMethodObjArgs(tape, record_name, call, others, types, out, NULL);
        mask = 0;
    }
    int failed = !template || (mask && add_node(tape, template, operands, out));
    Py_XDECREF(types);
    Py_XDECREF(others);
    Py_XDECREF(template);
    return failed ? -1 : 0;
}

int record_call(PyObject *call, FastPath *fast_path, Allocation *const *operands, int count,
                Allocation *out)
{
    PyObject *tape = present_tape();
    int failed = !tape;
    if (tape && tape != Py_None) {
        Entry *entry = entry_of((Call *)call, fast_path, operands, count);
        failed = record(tape, (Call *)call, entry, fast_path, operands, count, out);
        if (!failed && !entry && count <= MOST_OPERANDS)
            fill_cache((Call *)call, fast_path, operands, count);
        failed |= PyErr_Occurred() != NULL;
    }
    Py_XDECREF(tape);
    return failed ? -1 : 0;
}

/* Let Python find a region. Return 1; 0 if the arena has none until the tensor exists; -1 with an exception set. */
static int provide_region(Arena *arena, PyObject *type)
{
    PyObject *done = PyObject_CallMethodObjArgs((PyObject *)arena, provide_name, type, NULL);
    int is_provided = done ? done == Py_True : -1;
    Py_XDECREF(done);
    return is_provided;
}

void take(Region *region, PyObject *handle, PyObject *type, Arena *arena, Allocation *out, PyObject *holder)
{
    /* Pop the last region of the bin: the tensor takes over the bin's reference. */
    Py_SET_SIZE((PyVarObject *)region->bin, PyList_Size(region->bin) - 1);
    out->region = (PyObject *)region;
    arena->used += region->nbytes;
    if (arena->used > arena->high_water)
        arena->high_water = arena->used;
    set(&out->arena, (PyObject *)arena);
    set(&out->type, type);
    set(&out->base, Py_None);
    set(&out->is_part, Py_False);
    if (handle)
        set(&out->handle, handle);
    set(&region->holder, holder);
}

Allocation *tensor_in(PyObject *arena, PyObject *type)
{
    PyObject *handle;
    Allocation *out = (Allocation *)object_of(tensor_class);
    PyObject *holder = out ? PyWeakref_NewRef((PyObject *)out, NULL) : NULL;
    Region *region = holder ? next_region((Arena *)arena, type, &handle) : NULL;
    if (holder && !region && provide_region((Arena *)arena, type) > 0)
        region = next_region((Arena *)arena, type, &handle);
    if (region)
        take(region, handle, type, (Arena *)arena, out, holder);
    Py_XDECREF(holder);
    if (!region) {
        Py_XDECREF((PyObject *)out);
        if (clear_nonfatal_error())
            return NULL;
        out = (Allocation *)PyObject_CallMethodObjArgs(arena, alloc_name, type, (PyObject *)tensor_class,
                                                       NULL);
    }
    if (out && Py_TYPE((PyObject *)out) == tensor_class && !out->tape)
        out->tape = Py_NewRef(Py_None);
    return out;
}

int run_kernel(KernelCallObject *call, FastPath *fast_path, long long generation,
               Allocation *const *tensors, int count, const Number *numbers, Py_ssize_t nnumbers)
{
    char *p[MOST_PLACED];
    int done = 0;
    for (int asks = 0; asks < 2 && !done; asks++) { /* Python is asked for unknown addresses */
        int known = 1;
        for (int i = 0; asks && i < count; i++)
            if (!address_in(fast_path, tensors[i], 1))
                return PyErr_Occurred() ? -1 : 0;
        if (acquire_lock(fast_path->lock))
            return -1;
        /* Another thread may have changed the state while this thread waited for the lock. */
        int holds = !fast_path->observed && !fast_path->instrumented && fast_path->generation == generation;
        for (int i = 0; holds && known && i < count; i++)
            known = (p[i] = address_in(fast_path, tensors[i], 0)) != NULL;
        if (holds && known && !(done = numbers ? write_call(numbers, nnumbers, call) : 0)) {
            int refused = run_in_pool(fast_path->pool, &call->call, p);
            done = refused < 0 ? -1 : !refused;
        }
        release_lock(fast_path->lock);
        if (!holds || known)
            break;
    }
    return done;
}

/* Post a launch to a remote VM; return 1, 0 for the slow path, or -1 with an exception set. The server runs the message
 * later, so errors are raised later as well. */
static int post(long long program, FastPath *fast_path, Allocation *const *tensors, int count)
{
    int64_t handles[MOST_OPERANDS + 1];
    for (int i = 0; i < count; i++) {
        PyObject *its = tensors[i]->arena;
        if (!its || !is_arena(its) || ((Arena *)its)->fast_path != (PyObject *)fast_path)
            return 0;
        handles[i] = tensors[i]->handle ? PyLong_AsLongLong(tensors[i]->handle) : 0;
        if (handles[i] <= 0)
            return 0;
    }
    int due = outbox_launch(fast_path->outbox, program, handles, count);
    return due < 0 || (due && call_without_result(fast_path->flush)) ? -1 : 1;
}

/* Let Python launch a call that has no kernel, such as a call that numpy executes. Return 1, or -1 with an exception
 * set. */
static int launch_in_python(Allocation *out, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *all[MOST_OPERANDS + 2] = {(PyObject *)out};
    memcpy(all + 1, args, sizeof *args * (size_t)nargs);
    PyObject *tuple = tuple_of(all, nargs + 1),
             *done = tuple ? PyObject_Call(slow_launch, tuple, NULL) : NULL;
    Py_XDECREF(tuple);
    Py_XDECREF(done);
    return done ? 1 : -1;
}

static PyObject *long_way(PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *tuple = tuple_of(args, nargs);
    PyObject *result = tuple ? PyObject_Call(slow_apply, tuple, NULL) : NULL;
    Py_XDECREF(tuple);
    return result;
}

PyObject *arena_of(PyObject *context)
{
    PyObject *arena = PyTuple_GetItem(context, ARENA);
    if (arena != Py_None)
        return Py_XNewRef(arena);
    /* The arena of the last thread that asked outside of `use` blocks, weakly. */
    static uint64_t own_thread;
    static PyObject *own;
    PyObject *vms = PyTuple_GetItem(context, VMS);
    uint64_t thread = PyTuple_Size(vms) ? 0 : PyThreadState_GetID(PyThreadState_Get());
    if (thread && thread == own_thread && (arena = PyWeakref_GetObject(own)) != Py_None)
        return Py_NewRef(arena);
    PyObject *latest = PyObject_GetAttr(own_arenas, latest_name);
    int is_latest = latest && PyTuple_GetItem(latest, 0) == vms;
    arena = is_latest ? Py_NewRef(PyTuple_GetItem(latest, 1)) : NULL;
    Py_XDECREF(latest);
    if (!is_latest)
        return PyErr_Occurred() ? NULL : PyObject_CallNoArgs(default_arena);
    PyObject *reference = thread ? PyWeakref_NewRef(arena, NULL) : NULL;
    if (reference) {
        Py_XDECREF(own); /* without a callback: this runs no Python */
        own = reference;
        own_thread = thread;
    }
    PyErr_Clear();
    return arena;
}

PyObject *present_arena(void)
{
    PyObject *context = present_context();
    PyObject *arena = context ? arena_of(context) : NULL;
    Py_XDECREF(context);
    return arena;
}

/* Apply a call to operands in a context, without recording it. */
static PyObject *applied(PyObject *context, PyObject *const *args, Py_ssize_t nargs)
{
    int count = (int)nargs - 1;
    if (!slow_apply)
        return PyErr_Format(PyExc_RuntimeError, "apply: expected a call of install before it");
    if (count < 0 || count > MOST_OPERANDS || !is_call(args[0]))
        return long_way(args, nargs);
    Allocation *const *operands = (Allocation *const *)(args + 1);
    for (int i = 0; i < count; i++)
        if (Py_TYPE(args[i + 1]) != tensor_class || !operands[i]->type || !is_alive(operands[i]))
            return long_way(args, nargs);
    Call *call = (Call *)args[0];
    PyObject *scope = arena_of(context);
    if (!scope)
        return NULL;
    PyObject *result = NULL;
    FastPath *fast_path = fast_path_of(scope);
    if (!fast_path) {
        result = long_way(args, nargs);
        Py_DECREF(scope);
        return result;
    }
    Py_INCREF((PyObject *)fast_path);
    Allocation *out = NULL;
    Entry *entry = entry_of(call, fast_path, operands, count);
    int open = !fast_path->observed && !fast_path->instrumented, done = 0;
    int learns = open && !entry && fast_path->outbox, shows = 0;
    if (open && !entry && !learns) {
        result = later.apply_in_family(args[0], fast_path, scope, operands, count, &shows, 0);
        if (result || PyErr_Occurred())
            goto end;

        entry = filled_entry(call, fast_path, operands, count);
        if (PyErr_Occurred())
            goto end;
    }
    if (open && entry && entry->dynamic && PyTuple_GetItem(context, TAPE) == Py_None) {
        PyObject *function = Py_NewRef(entry->dynamic);
        result = PyObject_CallFunctionObjArgs(function, args[1], count > 1 ? args[2] : NULL, NULL);
        Py_DECREF(function);
        if (result != Py_None)
            goto end;
        Py_CLEAR(result);
    }
    if (open && entry && (entry->call || entry->program || (entry->out != Py_None && !fast_path->outbox))) {
        Allocation *tensors[MOST_OPERANDS + 1];
        KernelCallObject *kernel = (KernelCallObject *)Py_XNewRef((PyObject *)entry->call);
        long long generation = entry->generation, program = entry->program;
        PyObject *type = Py_NewRef(entry->out);
        tensors[0] = out = tensor_in(scope, type); /* this may run Python, which may drop the entry */
        Py_DECREF(type);
        for (int i = 0; i < count; i++)
            tensors[1 + i] = operands[i];
        if (out && Py_TYPE((PyObject *)out) == tensor_class)
            done = kernel    ? run_kernel(kernel, fast_path, generation, tensors, 1 + count, NULL, 0)
                   : program ? post(program, fast_path, tensors, 1 + count)
                             : launch_in_python(out, args, nargs);
        Py_XDECREF((PyObject *)kernel);
        if (done < 0 || PyErr_Occurred())
            goto end;
    }
    if (!done) {
        Py_XDECREF((PyObject *)out); /* returns the region, if any */
        out = NULL;
        result = long_way(args, nargs);
        if (result && learns)
            fill_cache(call, fast_path, operands, count);
        goto end;
    }
    for (int i = 0; i < count; i++) /* check whether another thread freed it while the kernel ran */
        if (operands[i]->handle && PyLong_AsLong(operands[i]->handle) == 0) {
            PyObject *never = PyObject_CallFunctionObjArgs(raise_stale, (PyObject *)operands[i], NULL);
            Py_XDECREF(never);
            goto end;
        }
    PyObject *tape = PyTuple_GetItem(context, TAPE);
    if (!entry_holds(entry, fast_path, operands, count))
        entry = NULL; /* a different call uses the slot now */
    if (tape && (tape == Py_None || !record(tape, call, entry, fast_path, operands, count, out)))
        result = Py_NewRef((PyObject *)out);
    if (result && shows)
        later.apply_in_family(args[0], fast_path, scope, operands, count, &shows, 1);
end:
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    if (result && call->gives_part && Py_TYPE(result) == tensor_class)
        set(&((Allocation *)result)->is_part, Py_True);
    Py_XDECREF((PyObject *)out);
    Py_DECREF((PyObject *)fast_path);
    Py_DECREF(scope);
    return result;
}

PyObject *apply_in(PyObject *context, PyObject *const *args, Py_ssize_t nargs)
{
    PyObject *out = applied(context, args, nargs);
    if (out && later.is_recording())
        later.note_step(APPLY, args[0], NULL, args + 1, (int)nargs - 1, out);
    return out;
}

static PyObject *apply(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    PyObject *context = present_context(), *out = context ? apply_in(context, args, nargs) : NULL;
    Py_XDECREF(context);
    return out;
}

/* Return whether an op may overwrite each operand that is `out`. */
static int may_overwrite(PyObject *call, Allocation *out, Allocation *const *operands, int count)
{
    int first = 0;
    while (first < count && operands[first] != out)
        first++;
    if (first == count)
        return 1;
    PyObject *op = PyObject_GetAttr(call, op_name);
    PyObject *most = op ? PyObject_GetAttr(op, in_place_name) : NULL;
    long allowed = most && PyLong_Check(most) ? PyLong_AsLong(most) : 0;
    Py_XDECREF(op);
    Py_XDECREF(most);
    PyErr_Clear();
    for (int i = first; i < count; i++)
        if (operands[i] == out && i >= allowed)
            return 0;
    return 1;
}

/* Try the fast path of an update: write the result over the bytes of `out`. Return 1 on success, 0 if
 * the slow path must be used, -1 with an exception set. */
static int overwrite(PyObject *call, Allocation *out, Allocation *const *operands, int count)
{
    if (Py_TYPE((PyObject *)out) != tensor_class || !is_quiet() || PySet_Size(live_tapes) || !out->region ||
        !is_region(out->region) || !out->arena || count < 1 || count > MOST_OPERANDS)
        return 0;
    Region *region = (Region *)out->region;
    FastPath *fast_path = fast_path_of(out->arena);
    if (!fast_path || !is_unwatched(fast_path) || region->first_view || region->watched || !is_call(call) ||
        !may_overwrite(call, out, operands, count))
        return 0;
    for (int i = 0; i < count; i++)
        if (Py_TYPE((PyObject *)operands[i]) != tensor_class || !operands[i]->type ||
            !is_alive(operands[i]) || !address_in(fast_path, operands[i], 1))
            return PyErr_Occurred() ? -1 : 0;
    Entry *entry = filled_entry((Call *)call, fast_path, operands, count);
    if (!entry || !entry->call || entry->out != out->type || !address_in(fast_path, out, 1))
        return PyErr_Occurred() ? -1 : 0;
    if (acquire_lock(fast_path->lock))
        return -1;
    /* Another thread may have changed the state while this thread waited for the lock. */
    int done = 0;
    char *p[MOST_OPERANDS + 2];
    int holds = !fast_path->observed && !fast_path->instrumented && out->region == (PyObject *)region &&
                !region->first_view && entry_holds(entry, fast_path, operands, count) && entry->call &&
                entry->out == out->type && (p[0] = address_in(fast_path, out, 0));
    for (int i = 0; holds && i < count; i++)
        holds = (p[i + 1] = address_in(fast_path, operands[i], 0)) != NULL;
    if (holds) {
        KernelCallObject *kernel = entry->call;
        Py_INCREF((PyObject *)kernel);
        int refused = run_in_pool(fast_path->pool, &kernel->call, p);
        Py_DECREF((PyObject *)kernel);
        done = refused < 0 ? -1 : !refused;
    }
    release_lock(fast_path->lock);
    return done;
}

PyObject *apply_into(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs < 2)
        return PyErr_Format(PyExc_TypeError, "expected (tensor, op, *operands), got %zd args", nargs);
    Allocation *const *operands = (Allocation *const *)(args + 2);
    int count = (int)nargs - 2, paused = later.pause_recording(1);
    int done = overwrite(args[1], (Allocation *)args[0], operands, count);
    PyObject *out = done > 0 ? Py_NewRef(args[0]) : NULL;
    if (!done) {
        PyObject *tuple = tuple_of(args, nargs);
        out = tuple ? PyObject_Call(slow_update, tuple, NULL) : NULL;
        Py_XDECREF(tuple);
    }
    later.pause_recording(paused);
    if (out && later.is_recording()) {
        PyObject *values[MOST_OPERANDS + 1] = {args[0]};
        int fits = count <= MOST_OPERANDS;
        for (int i = 0; fits && i < count; i++)
            values[1 + i] = args[2 + i];
        if (fits)
            later.note_step(UPDATE, args[1], NULL, values, count + 1, out);
        else
            later.note_opaque();
    }
    return out;
}

static const Installed *tables[MOST_TABLES];
static int ntables;

void expect_objects(const Installed *table)
{
    tables[ntables++] = table;
}

static PyObject **place_of_name(PyObject *name)
{
    for (int i = 0; i < ntables; i++)
        for (const Installed *each = tables[i]; each->name; each++)
            if (!PyUnicode_CompareWithASCIIString(name, each->name))
                return each->object;
    return NULL;
}

/* install(name=object, ...): set objects of Python that C uses, which are never freed. */
static PyObject *install(PyObject *module, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *object;
    Py_ssize_t at = 0;
    (void)module, (void)args;
    while (kwargs && PyDict_Next(kwargs, &at, &name, &object)) {
        PyObject **place = place_of_name(name);
        if (!place)
            return PyErr_Format(PyExc_TypeError, "install: unknown name %R", name);
        *place = Py_NewRef(object);
    }
    tensor_class = (PyTypeObject *)class_of_tensors;
    tape_class = (PyTypeObject *)class_of_tapes;
    Py_RETURN_NONE;
}

static PyMethodDef dispatch_functions[] = {
    {"apply", (PyCFunction)(void (*)(void))apply, METH_FASTCALL,
     "apply(call, *operands): run one op on tensors, as `apply_in_python` does."},
    {"apply_into", (PyCFunction)(void (*)(void))apply_into, METH_FASTCALL,
     "apply_into(out, call, *operands): update a tensor, as `apply_into_in_python` does."},
    {"install", (PyCFunction)(void (*)(void))install, METH_VARARGS | METH_KEYWORDS,
     "install(name=object, ...): set objects of Python that C uses."},
    {NULL, NULL, 0, NULL}};

int dispatch_init(PyObject *module)
{
    allocation_type = add_type(module, "AllocationFields", &allocation_spec);
    region_type = add_type(module, "RegionFields", &region_spec);
    arena_type = add_type(module, "ArenaFields", &arena_spec);
    call_type = add_type(module, "CallFields", &call_spec);
    fast_path_type = add_type(module, "FastPath", &fast_path_spec);
    view_name = PyUnicode_InternFromString("_late_view");
    expect_objects(objects);
    NAMES(INTERN_NAME)
    if (!allocation_type || !region_type || !arena_type || !call_type || !fast_path_type ||
        PyErr_Occurred())
        return -1;
    return PyModule_AddFunctions(module, dispatch_functions);
}
