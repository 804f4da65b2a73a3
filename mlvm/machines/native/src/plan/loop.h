/* The machine's loop, and the values on its stack.
 *
 * This code is independent of Python. A runner provides memory and handles rare cases: the
 * extension (machine/loop.c), or a step built without Python. */
#ifndef MLVM_LOOP_H
#define MLVM_LOOP_H

#include "bound.h"

/* Type of a tensor. Types are equal if their addresses are. */
typedef struct {
    int64_t nbytes, size;
    const int64_t *shape;
    int dtype, ndim; /* dtype: a code of mlvm.h */
} Type;

typedef struct {
    int64_t references;
    char *address;
    const Type *type;
    void *array;  /* owner of the memory; NULL if the memory follows this header */
    int constant; /* read-only */
} Tensor;

/* Reference count of a tensor that the caller keeps alive during the launch. */
#define IMMORTAL ((int64_t)1 << 60)

typedef enum { TENSOR, INTEGER, OBJECT } Kind;

/* An OBJECT is opaque to the loop; only the runner uses it. */
typedef struct {
    Kind kind;
    union {
        Tensor *tensor;
        int64_t integer;
        void *object;
    } as;
} Value;

/* Steps of this loop, named as in mlvm/core/machine/link.py, and two additional ones: RUN, a kernel call
 * with known addresses, and BACK, a call of something other than a kernel, without parameters and
 * results. Python reads the codes from here. */
/* clang-format off */
#define STEPS(X)                                                                          \
    X(UNKNOWN) X(HALT) X(LOAD_ARG) X(CALL) X(PUSH) X(GET) X(SET) X(JUMP_IF_FALSE) X(JUMP) \
    X(CALL_FUNCTION) X(RETURN) X(POP) X(LOAD_GLOBAL) X(STORE_GLOBAL) X(RUN) X(BACK)
/* clang-format on */
enum Code { STEPS(NAME) };

enum { MOST_TYPES = 32, MOST_DEPTH = 10000, ALL = -1 };
#define OVER_ANYTHING UINT32_MAX /* parameter may overlap others in any way */

/* Estimated nanoseconds between reads of the clock; estimated cost of a jump. */
#define TILL_CLOCK 100000
#define JUMP_WORK 5

typedef struct Turns Turns;

/* Resolved call for parameters of certain types. */
typedef struct {
    const Type *types[MOST_TYPES]; /* types of `count` parameters */
    int count;
    const KernelCall *call; /* NULL: the runner calls the function */
    const Type *out;        /* type of the result; NULL if the call writes to its first parameters */
    int nwrites;
    uint32_t over[MOST_TYPES]; /* for each written parameter, which others it may exactly overlap */
} Case;

typedef struct {
    int code;
    int number;
    int nparams;
    int ncases;
    BoundCall bound;    /* RUN */
    Value value;        /* PUSH */
    const Case *cases;  /* CALL of an op */
    const void *callee; /* CALL of an op or another function, and BACK; owned by the runner */
    int foreign;        /* CALL of a function that is not an op; the runner calls it */
    Turns *turns;       /* JUMP back to the start of a loop that the runner executes; otherwise NULL */
} Step;

typedef struct {
    const Step *steps;
    int count;
    const int *starts, *ends; /* first and last pc of each step; used only with a limit of steps */
} Function;

typedef struct {
    int function, pc, base, nparams;
} Return;

typedef struct Machine Machine;

/* Callbacks of the loop. Those that return an int return 0; 1 if the loop stops and the runner
 * continues; -1 for an error. */
typedef struct {
    int (*more_values)(Machine *m, int64_t count);
    int (*more_frames)(Machine *m);
    int (*look)(Machine *m); /* called periodically; it resets `worked` to 0 */
    /* Call the step's function on the parameters from `first` on, and replace the parameters by the results. */
    int (*call)(Machine *m, const Step *step, int64_t first);
    int (*back)(Machine *m, const Step *step);
    /* Resolve a call for new types of parameters; NULL for an error. */
    const Case *(*resolve)(Machine *m, const Step *step, const Value *params, int count);
    Tensor *(*make)(Machine *m, const Type *type); /* NULL if memory is exhausted */
    void (*drop)(Machine *m, Value value);         /* release an object, or a tensor without references */
    void (*keep)(Machine *m, Value value);         /* add a reference to an object */
    int (*truth)(Value value);                     /* truth of an object; -1 if it is not a condition */
    int (*turns)(Machine *m, Turns *turns);        /* run turns of a loop; return the next pc */
    int (*load)(Machine *m, int64_t handle);       /* push a tensor of the free store */
    int (*store)(Machine *m, int64_t handle, Tensor *tensor);
} Runner;

/* State of the loop during a run. The runner embeds it as the first member of a struct. */
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
    int64_t steps_left; /* remaining instructions of the launch; -1: unlimited */
    int64_t worked;     /* estimated nanoseconds since the clock was read */
};

/* Run until `halt`: return 1. Return 0 if the runner must continue at step `pc` of `function`. Return -1
 * for an error of that step. */
int run_machine(Machine *m);

/* Return whether an element of that dtype is true as a condition: nonzero. `are_true` of
 * mlvm/core/ops/half.py does the same in Python. */
int is_true(const void *element, int dtype);

/* Reserve stack space for `count` more values; returns as `more_values` does. */
int make_room(Machine *m, int64_t count);

/* Release the values above `first`. */
void drop_all(Machine *m, int64_t first);

/* Move the topmost `count` values down to `first`, replacing the values between. */
void replace_below(Machine *m, int64_t first, int64_t count);

static inline int look_up(Machine *m)
{
    return m->worked < TILL_CLOCK ? 0 : m->runner->look(m);
}

#endif
