/* Calls of host functions: descriptions, and the frame that a C function receives.
 *
 * The frame is the `mlvm_frame` of ../../mlvm.h. It answers common requests without the interpreter lock.
 * Rare requests and errors are delegated to Python, to a `HostCall` of host.py. A `Caller` makes such a
 * function callable from Python. */
#ifndef MLVM_HOST_H
#define MLVM_HOST_H

#include "value.h"

/* Host function call of a program, as in `host.Host`. The objects are borrowed from a tuple that
 * the owner keeps alive. */
typedef struct {
    PyObject *call, *attributes; /* the Python implementation and the attributes */
    PyObject *helper;            /* the `HostCall` */
    int nparams, nresults;       /* declared numbers; MLVM_ANY for any number */
    mlvm_function function;      /* NULL for a Python function */
    const char *text;            /* attributes as JSON */
    struct Number {
        const char *name;
        double value;
        int has_value; /* false if the attribute is not a number */
    } * numbers;       /* attributes by name */
    Py_ssize_t nnumbers;
    void *owner; /* data of a built-in function */
} Host;

/* Create a description. Return NULL with an exception set. */
Host *host_new(PyObject *spec);
void host_free(Host *host);

/* State of a call. Frames are never freed: C code may keep a frame's address, and the callbacks
 * fail while no call uses the frame. */
typedef struct Frame Frame;

/* Return a frame for a launch of a program with these types. The interpreter lock is held.
 * Return NULL with an exception set. */
Frame *frame_take(Types *types);
void frame_give(Frame *frame);

/* Prepare a call of a C function on these values, which must stay in place. If one of them is an
 * OBJECT, the interpreter lock must be held. Return 0, or 1 if C cannot represent a value or
 * there is no memory: Python then makes the call. */
int frame_enter(Frame *frame, const Host *host, const Value *params, int64_t count);

/* Make the call, without the interpreter lock. Return 0, or -1 if it failed. */
int frame_run(Frame *frame);

/* Return the results of a successful call, which the caller now owns. */
const Value *frame_results(const Frame *frame, int64_t *count);

/* Set the exception of a failed call. The interpreter lock must be held. */
void frame_raise(Frame *frame);

/* For built-in functions: the owner and the parameters of the frame's call; and failing with the
 * current exception, with the interpreter lock held. */
void *frame_owner(mlvm_frame *public);
const Value *frame_params(const mlvm_frame *public);
void frame_fail(mlvm_frame *public);

/* Register this file in the module. Return 0, or -1 with an exception set. */
int host_init(PyObject *module);

#endif
