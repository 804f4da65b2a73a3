/* Calls of host functions: what is known of each, and the frame that a C function sees.
 *
 * The frame is the `mlvm_frame` of ../../mlvm.h. It answers what functions commonly ask without the
 * interpreter lock. What is out of the ordinary, and every error, it asks of Python: of a
 * `HostCall` of host.py. A `Caller` is what Python calls such a function by. */
#ifndef MLVM_HOST_H
#define MLVM_HOST_H

#include "value.h"

/* A call in a program, as `host.Host` has it. It borrows its objects from a tuple that its owner
 * keeps. */
typedef struct {
    PyObject *call, *attributes; /* what does it in Python, and with which attributes */
    PyObject *helper;            /* the `HostCall` */
    int nparams, nresults;       /* what it is held to; MLVM_ANY for any number */
    mlvm_function function;      /* NULL: it is in Python */
    const char *text;            /* the attributes as JSON */
    struct Number {
        const char *name;
        double value;
        int has_value; /* else it is no number */
    } * numbers;       /* the attributes by name */
    Py_ssize_t nnumbers;
    void *owner; /* what the function works on besides, if it is one of our own */
} Host;

/* Returns NULL with an exception set. */
Host *host_new(PyObject *spec);
void host_free(Host *host);

/* What a call works with. Frames are never freed: C may have kept the address of one, whose
 * callbacks fail while no call has it. */
typedef struct Frame Frame;

/* A frame for a launch of the program with these types. The lock must be held. Returns NULL with an
 * exception set. */
Frame *frame_take(Types *types);
void frame_give(Frame *frame);

/* Prepare a call of a function in C on these values, which stay where they are. If one of them is an
 * OBJECT, the lock must be held. Returns 0, or 1 for values that C cannot have or if there is no
 * memory: Python then makes the call. */
int frame_enter(Frame *frame, const Host *host, const Value *params, int64_t count);

/* Make the call, without the lock. Returns 0, or -1 if it has failed. */
int frame_run(Frame *frame);

/* What the call has left, if it has not failed. The values are the caller's now. */
const Value *frame_results(const Frame *frame, int64_t *count);

/* Set the exception of a call that has failed. The lock must be held. */
void frame_raise(Frame *frame);

/* For functions of our own, of the call that has this frame: its owner; its parameters; and to fail with the exception
 * that is set, with the lock held. */
void *frame_owner(mlvm_frame *public);
const Value *frame_params(const mlvm_frame *public);
void frame_fail(mlvm_frame *public);

/* Add what this file has to the module. Returns 0, or -1 with an exception set. */
int host_init(PyObject *module);

#endif
