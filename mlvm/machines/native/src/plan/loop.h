/* The machine's loop, and what lies on its stack.
 *
 * Nothing here knows Python. What is out of the ordinary, and all memory, is asked of whoever runs the
 * loop: the extension (machine/loop.c), or a step that was built without Python. */
#ifndef MLVM_LOOP_H
#define MLVM_LOOP_H

#include "bound.h"

/* A tensor's type. Types are equal if their addresses are. */
typedef struct {
    int64_t nbytes, size;
    const int64_t *shape;
    int dtype, ndim; /* dtype: a code of mlvm.h */
} Type;

typedef struct {
    int64_t references;
    char *address;
    const Type *type;
    void *array;  /* what keeps its memory; NULL where that is its own, behind this header */
    int constant; /* must not be written */
} Tensor;

/* The references of a tensor that somebody else keeps for as long as the launch lasts. */
#define IMMORTAL ((int64_t)1 << 60)

typedef enum { TENSOR, INTEGER, OBJECT } Kind;

/* An OBJECT is what only the one who runs the loop knows. */
typedef struct {
    Kind kind;
    union {
        Tensor *tensor;
        int64_t integer;
        void *object;
    } as;
} Value;

/* The steps that this loop knows, by the names of mlvm/core/machine/link.py, and two of its own: RUN, a
 * kernel on parameters with addresses that are known, and BACK, a call of what is no kernel, with no
 * parameters and no results. Python has their numbers from here. */
/* clang-format off */
#define STEPS(X)                                                                          \
    X(UNKNOWN) X(HALT) X(LOAD_ARG) X(CALL) X(PUSH) X(GET) X(SET) X(JUMP_IF_FALSE) X(JUMP) \
    X(CALL_FUNCTION) X(RETURN) X(POP) X(LOAD_GLOBAL) X(STORE_GLOBAL) X(RUN) X(BACK)
/* clang-format on */
enum Code { STEPS(NAME) };

enum { MOST_TYPES = 32, MOST_DEPTH = 10000, ALL = -1 };
#define OVER_ANYTHING UINT32_MAX /* parameter may lie anywhere over others */

/* Nanoseconds of estimated work until the clock is read; what a jump counts for. */
#define TILL_CLOCK 100000
#define JUMP_WORK 5

/* What a call does for parameters of certain types. */
typedef struct {
    const Type *types[MOST_TYPES]; /* of `count` parameters */
    int count;
    const KernelCall *call; /* NULL: whoever runs the loop calls the function */
    const Type *out;        /* of the result it makes; NULL if it writes to its first parameters */
    int nwrites;
    uint32_t over[MOST_TYPES]; /* for each it writes, which others it may lie exactly over */
} Case;

typedef struct {
    int code;
    int number;
    int nparams;
    int ncases;
    BoundCall bound;    /* RUN */
    Value value;        /* PUSH */
    const Case *cases;  /* CALL of an op */
    const void *callee; /* CALL of an op or another function, and BACK: the runner's */
    int foreign;        /* CALL: no op; the runner calls it */
} Step;

typedef struct {
    const Step *steps;
    int count;
    const int *starts, *ends; /* the pcs that each step was made of; not read without a limit of steps */
} Function;

typedef struct {
    int function, pc, base, nparams;
} Return;

typedef struct Machine Machine;

/* What the loop asks. Those that return an int return 0; 1 where the loop ends, and another goes on;
 * and -1 where it ends by an error. */
typedef struct {
    int (*more_values)(Machine *m, int64_t count);
    int (*more_frames)(Machine *m);
    int (*look)(Machine *m); /* a while has passed; `worked` is to be 0 again */
    /* Call step's function on the parameters from `first` on, and put the results in their place. */
    int (*call)(Machine *m, const Step *step, int64_t first);
    int (*back)(Machine *m, const Step *step);
    /* What to do for parameters of types that the step does not know yet; NULL: an error. */
    const Case *(*resolve)(Machine *m, const Step *step, const Value *params, int count);
    Tensor *(*make)(Machine *m, const Type *type); /* NULL without memory */
    void (*drop)(Machine *m, Value value);         /* the last of a tensor, or an object */
    void (*keep)(Machine *m, Value value);         /* an object once more */
    int (*truth)(Value value);                     /* of an object; -1 for one that is no condition */
    int (*load)(Machine *m, int64_t handle);       /* push the free store's tensor */
    int (*store)(Machine *m, int64_t handle, Tensor *tensor);
} Runner;

/* The machine while it runs. Whoever runs it has one as the first member of its own. */
struct Machine {
    const Runner *runner;
    const Function *functions;
    Pool *pool;
    char *const *addresses;          /* of the parameters of RUN */
    const volatile int64_t *version; /* counts changes of the function table */
    int64_t version_seen;
    Value *stack;
    int64_t top, room;
    Return *frames;
    int64_t depth, frames_room;
    Tensor *arguments;
    int function, pc, base, nparams, since;
    int64_t steps_left; /* instructions that the launch may still take; -1: any number */
    int64_t worked;     /* nanoseconds of estimated work since the clock was read */
};

/* Run until `halt`: returns 1. Returns 0 where another goes on: `function` and `pc` say with which
 * step. Returns -1 for an error of that step. */
int run_machine(Machine *m);

/* Whether an element of that dtype holds as a condition: if it is not zero, of either sign. `are_true` of
 * mlvm/core/ops/half.py is the same in Python. */
int is_true(const void *element, int dtype);

/* Room for so many more values, as `more_values` returns it. */
int make_room(Machine *m, int64_t count);

/* Give up the values above `first`. */
void drop_all(Machine *m, int64_t first);

/* Put the topmost `count` values in the place of those below, from `first` on. */
void replace_below(Machine *m, int64_t first, int64_t count);

static inline int look_up(Machine *m)
{
    return m->worked < TILL_CLOCK ? 0 : m->runner->look(m);
}

#endif
