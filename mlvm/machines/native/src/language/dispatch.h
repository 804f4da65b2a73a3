/* The short way of an eager call: see dispatch.c. */
#ifndef MLVM_DISPATCH_H
#define MLVM_DISPATCH_H

#include "../limited_api.h"

/* The fields of allocations and regions: see mlvm/arena/fields.py. */
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

extern PyTypeObject *allocation_type, *region_type;

int dispatch_init(PyObject *module);

#endif
