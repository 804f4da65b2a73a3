/* Composed calls as lists of one-op calls: see templates.c. */
#ifndef MLVM_TEMPLATES_H
#define MLVM_TEMPLATES_H

#include "dispatch.h"

enum { MOST_ITEMS = 96, MOST_TENSORS = 64, MOST_STEPS = 96 };
enum { MOST_VALUES = MOST_TENSORS + MOST_STEPS };

/* A part of a key: the kind says what the object is compared by. */
typedef enum { TYPE, TRACKED_TYPE, SAME_TENSOR, POINTER, NUMBER, TEXT, TUPLE, LIST, KEYWORD } ItemKind;
typedef struct {
    ItemKind kind;
    PyObject *object;
    uint64_t bits; /* of a NUMBER; the length of a TUPLE or LIST */
} Item;

typedef struct Key {
    Item items[MOST_ITEMS];
    int nitems, ntensors;
    Allocation *tensors[MOST_TENSORS];
    uint64_t hash;
    FastPath *fast_path;
    PyObject *arena, *tape; /* the current ones; only compared */
} Key;

/* A step. Operands are values by number: first the call's tensors, then the results of steps; constants are
 * -1, -2, ... */
typedef struct {
    StepKind kind;
    PyObject *call, *extra;
    short operands[MOST_OPERANDS + 1], count;
    short last;          /* the last step that uses the result */
    short freed, next;   /* list of steps whose results are last used by this step; -1 at the end */
    struct Chain *chain; /* the chain that begins with this step, or NULL */
} TemplateStep;

typedef struct Template {
    uint64_t hash;
    long long fast_path;
    PyObject *function;
    Item *items;
    TemplateStep *steps;
    /* Weak references, because a tensor keeps the VM alive, and the VM keeps constants alive. */
    PyObject **constants, *constant_arena;
    PyObject **constant_types;
    PyObject *named; /* the class of named tuples in the result */
    short *codes;
    int nitems, nsteps, nconstants, ncodes; /* without codes, the function is called */
    int users;                              /* references: calls that run the steps, and the table */
    int failures;                           /* recordings without success */
    int runs;                               /* until the chains are planned */
} Template;

int templates_init(PyObject *module);

extern int templates_enabled;

int is_same_item(const Item *a, const Item *b);

/* Add an argument to a key. Returns 0 for an argument without a key. */
int add_argument(Key *key, PyObject *value, int depth);

/* Add the tape and the settings of a context. Return 0 if there is no room. */
int add_context(Key *key, PyObject *context);

/* Add the names and values of a dict; NULL and other mappings are empty. Returns 0 if it has no key. */
int add_keywords(Key *key, PyObject *keywords);

/* The counter of calls with a key without a template. */
int *calls_of(uint64_t hash);

/* A template of these items without steps; NULL if memory is exhausted. */
Template *new_template(PyObject *function, const Key *key, int nsteps, int nconstants, int ncodes);

/* End a use of a template, and free it after the last one. */
void release_template(Template *old);

/* Return what a weak reference refers to, a new reference; NULL if it was freed. */
PyObject *referent(PyObject *reference);

/* The result of a template, given the values of tensors and steps. NULL with an exception set. */
PyObject *result_of(const Template *template, PyObject *const *values);

/* Call a function inside a recorder on these tensors. Returns the steps as (call, operands,
 * result), and the constants; None if the steps are not those of the template, or NULL with an
 * exception set. */
PyObject *steps_of_trace(PyObject *function, PyObject *args, PyObject *keywords, PyObject *tensors,
                         const Template *expected);

/* Whether this thread records a composed call. */
int is_recording(void);

/* Record a step, or that the call cannot be a template. For an UPDATE, `out` is the updated tensor. */
void note_step(StepKind kind, PyObject *call, PyObject *extra, PyObject *const *operands, int count,
               PyObject *out);
void note_opaque(void);

/* Record no steps while an update runs; returns the previous state. */
int pause_recording(int paused);

/* Call a function of Python, by a template if one exists. `keywords` may be NULL. */
PyObject *call_composed(PyObject *function, PyObject *args, PyObject *keywords);

#endif
