/* What a build writes as tables, and step.c runs. */
#ifndef MLVM_BUILT_H
#define MLVM_BUILT_H

#include "../../machines/mlvm.h"
#include "../../machines/native/src/plan/formulas.h"
#include "../../machines/native/src/plan/loop.h"
#include "lanes.h"

#include <stddef.h>

/* A call, and from which byte on it has its scratch memory: each thread's, and behind them the shared. */
typedef struct {
    KernelCall call;
    size_t scratch;
} Placed;

/* Where a tensor lies: in the caller's memory or among the weights, at an offset; or what the caller
 * gives as input of that number. */
typedef enum { IN_MEMORY, IN_WEIGHTS, IN_INPUT } Where;

typedef struct {
    Where where;
    size_t at;
} Address;

typedef struct {
    size_t nbytes;
    int copied; /* the step writes to it: it has memory of its own, at `at` */
    size_t at;
} Input;

/* A tensor that lives from step to step. One that is only read stays among the weights. */
typedef struct {
    size_t nbytes, in_weights;
    int copied;
    size_t at;
} State;

/* An argument that goes over the stack. */
typedef struct {
    uint32_t argument;
    const Type *type;
} Pushed;

/* What the loop does at a step: an op, and the line of Python that wrote it; both by number. */
typedef struct {
    uint16_t op, line;
} Place;

/* Length of a step: its name and bound, and its value in the call before saving. */
typedef struct {
    const char *name;
    int64_t most, saved;
} Length;

/* Field of an image that lengths decide: an integer or a real, and the number of its formula. */
typedef struct {
    size_t at;
    int is_real;
    uint32_t formula;
} Patch;

/* Value that a formula has wherever a variant is valid. */
typedef struct {
    uint32_t formula;
    Number value;
} Guard;

/* The functions of the step for some lengths: an image of them with pointers into itself, which are at
 * `pointers`, and fields by formulas. It begins with the function `main`. */
typedef struct {
    const Guard *guards;
    const size_t *pointers;
    const Patch *patches;
    uint32_t nguards, npointers, npatches;
    size_t nbytes;
    const Place *places;
} Variant;

/* The shape of an output: the formula of each axis. */
typedef struct {
    int ndim;
    const uint32_t *formulas;
} Shape;

/* State of one number that is computed of lengths. */
typedef struct {
    size_t at;
    int dtype;
    uint32_t formula;
} Scalar;

/* The functions of the step for one instruction set; with lengths, the images of its variants. */
typedef struct {
    const char *name;
    const Function *functions;
    const void *const *images;
} Set;

/* What is done by this program and by no kernel. */
enum { RECORDS_BEGIN, RECORDS_PUSH, RECORDS_READ, RECORDS_READ_ROWS, RECORDS_ADD, RECORDS_END, LANES_RUN };

typedef struct {
    const Set *sets; /* the best first; closed by a name of NULL */
    const char *const *ops, *const *lines;
    const Place *const *places; /* by function and step */
    uint32_t narguments, npushed, ninputs, noutputs, nstates;
    const Address *arguments;
    const Pushed *pushed;
    const Input *inputs;
    const Address *outputs;
    const State *states;
    size_t memory; /* bytes in all; the step's tensors begin at 0 */
    size_t ours;   /* where the machine's own begin */
    int threads;   /* the most */
    uint32_t values, frames;
    size_t heap;    /* bytes for tensors that functions make */
    size_t records; /* bytes for residuals */
    size_t lanes;   /* bytes for rows and frames of lanes */
    /* lanes_run of lanes.h, or NULL: then it is not in the program. */
    const char *(*run_lanes)(const LaneCode *code, Pool *pool, char *memory, char *room, size_t nbytes,
                             const Value *params, int64_t count, char why[128]);
    size_t weights; /* bytes with their header */
    uint64_t fingerprint;
    const void *embedded; /* the weights, or NULL */
    /* Of a step with lengths alone: */
    uint32_t nformulas, nvariants, nscalars;
    const Length *lengths;
    const Formula *formulas; /* the first are the lengths */
    const Number *constants; /* as many as formulas, with the values of constants */
    const Variant *variants;
    const Scalar *scalars;
    const uint32_t *input_formulas; /* of the bytes of inputs */
    const Shape *shapes;            /* of outputs */
    size_t image;                   /* bytes of the largest */
} Built;

extern const Built built;

#endif
