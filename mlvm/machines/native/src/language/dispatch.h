/* The short way of an eager call: see dispatch.c. */
#ifndef MLVM_DISPATCH_H
#define MLVM_DISPATCH_H

#include "../limited_api.h"
#include "../machine/call.h"
#include "posts.h"

/* The fields of allocations, regions and arenas: see mlvm/arena/fields.py. */
typedef struct {
    PyObject_HEAD PyObject *region, *arena, *type, *base, *handle, *ended, *tape, *node;
    PyObject *weakrefs;
} Allocation;

typedef struct {
    PyObject_HEAD PyObject *storage, *offset, *bin, *number, *handles, *holder, *holder_at_reset, *last,
        *noted, *views;
    long long nbytes;
    PyObject *weakrefs;
} Region;

typedef struct {
    PyObject_HEAD PyObject *fast_path, *bins, *refer;
    long long used, high_water;
    PyObject *weakrefs;
} Arena;

/* The addresses of a VM's tensors, by handle, until any handle may name another array. */
typedef struct {
    int64_t handle; /* 0: free */
    char *address;
    PyObject *type; /* the free store keeps it */
} Place;

typedef struct {
    PyObject_HEAD PyObject *find; /* find(handle, fast_path) -> (array, type), or None */
    PyObject *prepare; /* prepare(program, name, types, attributes) -> KernelCall, number or None */
    PyObject *bound;   /* bound(program, handles, cache) -> (Program, helper, resume, handles), or None */
    PyObject *acquire, *release; /* of the VM's lock */
    PoolObject *pool;
    Outbox *outbox;              /* of a remote VM, which has no pool nor lock */
    PyObject *flush;             /* flush(): send its messages, unless another thread does */
    long long number;            /* unique, not 0 */
    long long generation;        /* counts changes of the function table */
    char observed, instrumented; /* then the slow path is taken */
    int running;                 /* a captured call: the process that it runs in, else 0 */
    Place *places;
    int64_t room, occupied;
} FastPath;

extern PyTypeObject *allocation_type, *region_type, *tensor_class;

int dispatch_init(PyObject *module);

/* The fast path of a plain arena; NULL for another object. */
FastPath *fast_path_of(PyObject *arena);

/* The free region that the next tensor of that type would get, borrowed, and the handle of that
 * type there. NULL if Python must look for one. */
Region *next_region(const Arena *arena, PyObject *type, PyObject **handle);

/* Make `out` a tensor in the arena's next region. Returns 0, or -1 with an exception set. */
int take(Region *region, PyObject *handle, PyObject *type, Arena *arena, Allocation *out, PyObject *holder);

/* Call a function for its effect. Returns 0, or -1 with an exception set. */
int call_without_result(PyObject *function);

/* Release the VM's lock; an exception that is set stays. */
void release_vm(FastPath *fast_path);

#endif
