/* The lock of a VM: see lock.c. */
#ifndef MLVM_LOCK_H
#define MLVM_LOCK_H

#include "../limited_api.h"

typedef struct {
    PyObject_HEAD PyThread_type_lock gate;
    unsigned long owner; /* thread that has the lock, if `count` is not 0 */
    long count;          /* acquisitions by the owner */
    int waiting;         /* threads at the gate */
    int is_open;         /* a release has opened the gate, and the thread that passes has not run since */
    PyObject *weakrefs;
} LockObject;

int lock_init(PyObject *module);
int is_lock(PyObject *object);

/* Acquire the lock; release it. The first returns 0, or -1 with the exception of a signal's handler. */
int acquire_lock(LockObject *self);
void release_lock(LockObject *self);

#endif
