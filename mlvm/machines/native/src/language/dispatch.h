/* The fast path of an eager call: see dispatch.c.
 *
 * C functions that repeat Python. The function in Python is the definition; most C functions leave all cases
 * but the common one to it. tests/machines/native/test_definitions.py checks that both exist and agree.
 *
 *     language/dispatch.c    apply                 -> mlvm/eager/tensor/apply.py: apply_in_python
 *     language/dispatch.c    apply_into            -> mlvm/eager/tensor/update.py: apply_into_in_python
 *     language/dispatch.c    record                -> mlvm/eager/autodiff/tape.py: Tape.record
 *     language/dispatch.c    take                  -> mlvm/arena/arena.py: Arena.alloc
 *     language/dispatch.c    bin_of                -> mlvm/arena/placement.py: Reuse.find
 *     language/dispatch.c    allocation_finalize   -> mlvm/arena/fields.py: _AllocationSlots.__del__
 *     language/dispatch.c    region_views          -> mlvm/arena/fields.py: _RegionSlots.views
 *     language/dispatch.c    present_arena         -> mlvm/eager/tensor/context.py: current_arena
 *     language/dispatch.c    post                  -> mlvm/machines/remote/client.py: RemoteVM.launch
 *     language/views.c       alias                 -> mlvm/eager/tensor/apply.py: alias_in_python
 *     language/views.c       view_as_python        -> mlvm/eager/tensor/tensor.py: untracked
 *     language/views.c       subscript             -> mlvm/eager/functions/indexing.py: getitem
 *     language/views.c       assign_subscript      -> mlvm/eager/functions/indexing.py: setitem
 *     language/views.c       scalar                -> mlvm/eager/tensor/tensor.py: Tensor.item
 *     language/views.c       chosen_in_python      -> mlvm/eager/tensor/apply.py: _apply_dynamic
 *     language/views.c       positions             -> mlvm/eager/tensor/apply.py: _apply_dynamic
 *     language/views.c       nested                -> mlvm/eager/tensor/tensor.py: Tensor.tolist
 *     language/views.c       array                 -> mlvm/eager/tensor/tensor.py: Tensor.numpy
 *     language/views.c       number                -> mlvm/eager/tensor/constants.py: constant
 *     language/views.c       operand               -> mlvm/eager/tensor/operands.py: as_operand
 *     language/views.c       are_alive             -> mlvm/eager/tree.py: require_live
 *     language/views.c       filled                -> mlvm/eager/functions/creation.py: _filled
 *     language/views.c       copied                -> mlvm/eager/tensor/tensor.py: from_array
 *     language/views.c       listed                -> mlvm/eager/tensor/operands.py: tensor_of
 *     language/views.c       next_key              -> mlvm/eager/functions/random.py: _draw
 *     language/templates.c   call_composed         -> mlvm/eager/tensor/templates.py: _call
 *     language/families.c    call_into             -> mlvm/eager/tensor/templates.py: _call_into
 *     language/templates.c   next_key_of           -> mlvm/eager/tensor/templates.py: _next_key_of
 *     language/families.c    call_in_family        -> mlvm/eager/tensor/templates.py: _call
 *     language/families.c    apply_in_family       -> mlvm/eager/tensor/apply.py: apply_in_python
 *     language/guards.c      checklist_holds       -> mlvm/eager/capture/guards/checker.py: GuardChecker._holds
 *     language/guards.c      pattern_match         -> mlvm/eager/capture/guards/signature.py: Signatures.of
 *     language/guards.c      exclusive             -> mlvm/eager/capture/cache.py: CacheEntry.make_exclusive
 *     language/replay.c      replay_run            -> mlvm/eager/capture/launch.py: Launch.run
 *     language/posts.c       outbox_add            -> mlvm/machines/remote/outbox.py: PythonOutbox.add
 *     language/posts.c       outbox_take           -> mlvm/machines/remote/outbox.py: PythonOutbox.take
 *     language/posts.c       run_launches          -> mlvm/core/vm.py: VM.launch
 *     language/lock.c        lock_acquire          -> mlvm/core/locks.py: new_lock
 *     language/lock.c        lock_release          -> mlvm/core/locks.py: new_lock
 *     language/lock.c        lock_enter            -> mlvm/core/locks.py: new_lock
 *     language/lock.c        lock_exit             -> mlvm/core/locks.py: new_lock
 *     language/lock.c        lock_is_owned         -> mlvm/core/locks.py: new_lock
 *     language/lock.c        lock_reinitialize     -> mlvm/core/locks.py: new_lock
 *     plan/loop.c            run_machine           -> mlvm/core/machine/run.py: run
 *     machine/lanes.c        lanes_run             -> mlvm/machines/lane_runs.py: Lanes.run
 *     machine/records.c      records_begin         -> mlvm/machines/residuals.py: Stack.begin
 *     machine/records.c      records_end           -> mlvm/machines/residuals.py: Stack.end
 */
#ifndef MLVM_DISPATCH_H
#define MLVM_DISPATCH_H

#include "../limited_api.h"
#include "../machine/call.h"
#include "../machine/formulas.h"
#include "lock.h"
#include "posts.h"

/* The fields of allocations, regions and arenas: see mlvm/arena/fields.py. */
/* `is_part` is True if NumPy would return a view of a different tensor, until the first update. */
typedef struct Allocation {
    PyObject_HEAD PyObject *region, *arena, *type, *base, *handle, *ended, *tape, *node, *is_part;
    PyObject *weakrefs;
    /* of the region's list of views, if this is a view: the next view, and the pointer to this view */
    struct Allocation *next, **link;
} Allocation;

typedef struct {
    PyObject_HEAD PyObject *storage, *offset, *bin, *number, *handles, *holder, *holder_at_reset, *last,
        *noted;
    long long nbytes;
    long long address; /* address of the first byte in this process, 0 if unknown */
    char watched;      /* launches count writes to it: see mlvm/arena/writes.py */
    PyObject *weakrefs;
    Allocation *first_view; /* the newest live view of the region's tensor; views unlink themselves */
} Region;

typedef struct {
    PyObject_HEAD PyObject *fast_path, *bins, *refer, *sizes;
    long long used, high_water;
    char trims; /* sizes are rounded to size classes: see `size_class` in mlvm/arena/placement.py */
    PyObject *weakrefs;
} Arena;

/* Cached addresses of a VM's tensors by handle, valid until any handle may refer to another array. */
typedef struct {
    int64_t handle; /* 0: free */
    char *address;
    PyObject *type; /* the free store keeps it alive */
} Place;

typedef struct {
    PyObject_HEAD PyObject *find; /* find(handle, fast_path) -> (array, type), or None */
    PyObject *prepare; /* prepare(program, name, types, attributes) -> KernelCall, number or None */
    PyObject *bound;   /* bound(program, handles, cache) -> (Program, helper, resume, handles), or None */
    PyObject *flush;   /* flush(): send the messages, unless a different thread is sending */
    LockObject *lock;
    PoolObject *pool;
    Outbox *outbox;              /* of a remote VM, which has neither pool nor lock */
    long long number;            /* unique, not 0 */
    long long generation;        /* counts changes of the function table */
    char observed, instrumented; /* if set, the slow path is used */
    char closed;                 /* set under the VM's lock: no tensor has an address from then on */
    int running;                 /* process in which a captured call is running, else 0 */
    Place *places;
    int64_t room, occupied;
} FastPath;

/* The fields of an op with its attributes. The entries are an open-addressing hash table by VM and types. They are not
 * moved or freed while the call lives, since a launch refers to an entry while other threads run. */
typedef struct {
    PyObject_HEAD struct Entry **entries;
    size_t capacity, count; /* slots, a power of two, and the number of used slots, at most half */
    char gives_part;        /* NumPy returns a view: see `Op.is_view` */
} Call;

extern PyTypeObject *allocation_type, *region_type, *tensor_class;

static inline void set(PyObject **field, PyObject *value)
{
    PyObject *old = *field;
    *field = Py_NewRef(value);
    Py_XDECREF(old);
}

int dispatch_init(PyObject *module);

/* Whether C may launch ops on a VM: it is local, and nothing observes the launches. */
static inline int is_unwatched(const FastPath *fast_path)
{
    return !fast_path->outbox && !fast_path->observed && !fast_path->instrumented;
}

/* Return the fast path of a plain arena; NULL for another object. */
FastPath *fast_path_of(PyObject *arena);

/* Whether a tensor has memory: it has a handle, or the address of the region is known. In the
 * latter case the handle is created when Python requests it. */
int is_alive(const Allocation *x);

/* Return the region of a tensor or the base of a view, borrowed; NULL if it has no C struct. */
Region *home_of(const Allocation *x);

/* The tensor that owns the bytes: the base of a view, else the tensor itself. */
static inline Allocation *root_of(Allocation *x)
{
    return x->base && x->base != Py_None ? (Allocation *)x->base : x;
}

/* The free region that the next tensor of a type would get, borrowed, and the handle for this type,
 * NULL if the address suffices. NULL if Python must find a region. */
Region *next_region(const Arena *arena, PyObject *type, PyObject **handle);

/* Make `out` a tensor in the arena's next region. */
void take(Region *region, PyObject *handle, PyObject *type, Arena *arena, Allocation *out,
          PyObject *holder);

/* Create a tensor in an arena, by C where the arena has a free region. NULL with an exception set, or without one. */
Allocation *tensor_in(PyObject *arena, PyObject *type);

/* Run a kernel of that generation of the function table on its results and operands, whose integers are first computed
 * from numbers, if there are any. Returns 1; 0 if Python must run the call; -1 with an exception set. */
enum { MOST_OPERANDS = 32, MOST_PLACED = MOST_OPERANDS + 2 };
int run_kernel(KernelCallObject *call, FastPath *fast_path, long long generation,
               Allocation *const *tensors, int count, const Number *numbers, Py_ssize_t nnumbers);

/* Add a view to the list of a region. */
void link_view(Region *region, Allocation *view);

/* Whether an object is a region with a C struct. */
int is_region(PyObject *object);

/* The region of a tensor, borrowed; NULL for a view, and for a region without a C struct. */
static inline Region *region_of(const Allocation *x)
{
    return x->region && is_region(x->region) ? (Region *)x->region : NULL;
}

/* Return whether an object is an op with its attributes, the first argument of `apply`. */
int is_call(PyObject *object);

/* Return the arena in scope, or the thread's own arena; a new reference, NULL with an exception set. */
PyObject *present_arena(void);

/* Fields of a context that C reads: the first fields of `Context` in mlvm/arena/context.py, in order. */
enum ContextField { ARENA, ARENA_BLOCKS, VMS, TAPE, DEFAULT_DTYPE, AUTOCAST_DTYPE };

/* The context of this thread or task; a new reference, NULL with an exception set. */
PyObject *present_context(void);

/* The arena of a context, otherwise the arena of the thread; a new reference, NULL with an
 * exception set. */
PyObject *arena_of(PyObject *context);

/* The current tape or None; a new reference, NULL with an exception set. */
PyObject *present_tape(void);

/* Return a tuple of these objects, a new reference. */
PyObject *tuple_of(PyObject *const *objects, Py_ssize_t count);

/* Return the address of a tensor of this VM; NULL if unknown. `ask`: ask Python for it first. */
char *address_in(FastPath *fast_path, const Allocation *x, int ask);

/* Add a node for a call to the current tape, if it tracks an operand. Return 0, or -1 with an exception
 * set. */
int record_call(PyObject *call, FastPath *fast_path, Allocation *const *operands, int count,
                Allocation *out);

/* Whether an object is a tape whose nodes C adds. */
int is_tape(PyObject *object);

/* Add a node to a tape that tracks an operand: `template` is (tracked operands, vjps, saved operands) as in
 * mlvm/eager/autodiff/tape.py. Return 0, or -1 with an exception set. */
int add_node(PyObject *tape, PyObject *template, Allocation *const *operands, Allocation *out);

/* Functions of Python, which defines them: `apply_in_python` in a context, and `apply_into_in_python`. */
PyObject *apply_in(PyObject *context, PyObject *const *args, Py_ssize_t nargs);
PyObject *apply_into(PyObject *module, PyObject *const *args, Py_ssize_t nargs);

/* Return the kernel of a call on operands of these types, a new reference. NULL if Python must run the
 * call; an exception may be set. */
KernelCallObject *kernel_of(PyObject *call, FastPath *fast_path, Allocation *const *operands, int count);

/* Whether no thread has a recorder. Otherwise C performs only single calls with a launch. */
int is_quiet(void);

extern PyObject *live_tapes; /* set of tapes that may still be used for a backward pass */

/* What a step of a recorded call does: `apply(call, *operands)`, `alias(call, x, type)` where `extra` is the
 * type, x[extra], `apply_into(x, call, *operands)`, or `call()` of Python that returns the next key. */
typedef enum { APPLY, ALIAS, SUBSCRIPT, UPDATE, NEXT_KEY } StepKind;

struct Key;
struct Template;

/* Functions that views.c, templates.c and families.c set. */
typedef struct {
    PyObject *(*subscript)(PyObject *x, PyObject *key);
    int (*assign_subscript)(PyObject *x, PyObject *key, PyObject *values);
    PyObject *(*alias)(PyObject *module, PyObject *const *args, Py_ssize_t nargs);
    PyObject *(*next_key_in)(PyObject *arena, PyObject *call, Allocation *state, PyObject *type,
                             PyObject *locked);
    int (*is_recording)(void);
    int (*pause_recording)(int paused);
    void (*note_opaque)(void);
    void (*note_step)(StepKind kind, PyObject *call, PyObject *extra, PyObject *const *operands, int count,
                      PyObject *out);
    PyObject *(*call_composed)(PyObject *function, PyObject *args, PyObject *keywords);
    /* Run a call as calls of other numbers have shown, with its key, or by its op and operands: NULL without an
     * exception if it must run otherwise. The result of one op is written to `into`, unless it is NULL. `*learns`: it may
     * show how to run others. Then, once it has run, `generalize` gets it, which returns 0, or -1 with an exception set,
     * or `apply_in_family` with `has_run`. */
    PyObject *(*call_in_family)(PyObject *function, const struct Key *key, int *learns, Allocation *into);
    PyObject *(*apply_in_family)(PyObject *call, FastPath *fast_path, PyObject *arena,
                                 Allocation *const *operands, int count, int *learns, int has_run);
    int (*generalize)(struct Template *template, PyObject *args, PyObject *keywords, const struct Key *key);
} Later;
extern Later later;

/* A Python string `NAME_name` that is made once, for `LIST(DECLARE_NAME)` and `LIST(INTERN_NAME)`. */
#define DECLARE_NAME(NAME) static PyObject *NAME##_name;
#define INTERN_NAME(NAME) NAME##_name = PyUnicode_InternFromString(#NAME);

/* Objects of Python that a file uses, by name, up to a name NULL: `install` sets them. */
typedef struct {
    const char *name;
    PyObject **object;
} Installed;
void expect_objects(const Installed *table);

/* The declarations and the table of a LIST of objects, for `LIST(DECLARE_OBJECT)` and `TABLE_OF(LIST)`. */
#define DECLARE_OBJECT(NAME) static PyObject *NAME;
#define ROW_OF_OBJECT(NAME) {#NAME, &NAME},
#define TABLE_OF(LIST)      \
    {                       \
        LIST(ROW_OF_OBJECT) \
        {                   \
            NULL, NULL      \
        }                   \
    }

#endif
