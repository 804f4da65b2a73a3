/* Composed calls as lists of one-op calls: see templates.c. */
#ifndef MLVM_TEMPLATES_H
#define MLVM_TEMPLATES_H

#include "dispatch.h"

int templates_init(PyObject *module);

/* Whether this thread records a composed call. */
int is_recording(void);

/* Note a step, or that the call cannot be a template. For an UPDATE, `out` is the updated tensor. */
void note_step(StepKind kind, PyObject *call, PyObject *extra, PyObject *const *operands, int count,
               PyObject *out);
void note_opaque(void);

/* Note no steps while an update runs; returns the state before. */
int pause_recording(int paused);

/* Call a function of Python, by its template if there is one. `keywords` may be NULL. */
PyObject *call_composed(PyObject *function, PyObject *args, PyObject *keywords);

#endif
