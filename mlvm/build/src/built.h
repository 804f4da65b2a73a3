/* Tables that a build generates for step.c. */
#ifndef MLVM_BUILT_H
#define MLVM_BUILT_H

#include "../../machines/mlvm.h"
#include "../../machines/native/src/plan/formulas.h"
#include "../../machines/native/src/plan/loop.h"
#include "lanes.h"

#include <stddef.h>

/* A call with the offsets of scratch memory: one block per thread, followed by the shared memory. */
typedef struct {
    KernelCall call;
    size_t scratch;
} Placed;

/* Location of a tensor: an offset in the caller's memory or in the weights, or the number of an
 * input. */
typedef enum { IN_MEMORY, IN_WEIGHTS, IN_INPUT } Where;

typedef struct {
    Where where;
    size_t at;
} Address;

typedef struct {
    size_t nbytes;
    int copied; /* the step writes to it, so it is copied to `at` */
    size_t at;
} Input;

/* A tensor that persists between steps. A tensor that is only read stays in the weights. */
typedef struct {
    size_t nbytes, in_weights;
    int copied;
    size_t at;
} State;

/* An argument that is passed on the stack. */
typedef struct {
    uint32_t argument;
    const Type *type;
} Pushed;

/* Source of a step of the loop: numbers of the op and the line of Python. */
typedef struct {
    uint16_t op, line;
} Place;

/* Size of a step: name, bound, and value in the call before saving. */
typedef struct {
    const char *name;
    int64_t most, saved;
} Length;

/* Field of an image that depends on lengths: an integer or a real, and the number of a
 * formula. */
typedef struct {
    size_t at;
    int is_real;
    uint32_t formula;
} Patch;

/* Value that a formula must have for a variant to be valid. */
typedef struct {
    uint32_t formula;
    Number value;
} Guard;

/* Functions of the step for some lengths: an image with internal pointers, listed in `pointers`,
 * and fields computed by formulas. It begins with the function `main`. */
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

/* State of a number that depends on sizes. */
typedef struct {
    size_t at;
    int dtype;
    uint32_t formula;
} Scalar;

/* The functions of the step for one instruction set; with sizes, the images of the variants. */
typedef struct {
    const char *name;
    const Function *functions;
    const void *const *images;
} Set;

/* Operations that this program implements without a kernel. */
enum { RECORDS_BEGIN, RECORDS_PUSH, RECORDS_READ, RECORDS_READ_ROWS, RECORDS_ADD, RECORDS_END, LANES_RUN };

typedef struct {
    const Set *sets; /* the best first; the last name is NULL */
    const char *const *ops, *const *lines;
    const Place *const *places; /* by function and step */
    uint32_t narguments, npushed, ninputs, noutputs, nstates;
    const Address *arguments;
    const Pushed *pushed;
    const Input *inputs;
    const Address *outputs;
    const State *states;
    size_t memory; /* total bytes; the step's tensors start at 0 */
    size_t ours;   /* offset of the machine's private memory */
    int threads;   /* maximum number */
    uint32_t values, frames;
    size_t heap;    /* bytes for tensors that functions allocate */
    size_t records; /* bytes for residuals */
    size_t lanes;   /* bytes for rows and frames of lanes */
    /* lanes_run of lanes.h, or NULL if the program does not contain it. */
    const char *(*run_lanes)(const LaneCode *code, Pool *pool, char *memory, char *room, size_t nbytes,
                             const Value *params, int64_t count, char why[128]);
    size_t weights; /* bytes including the header */
    uint64_t fingerprint;
    const void *embedded; /* the weights, or NULL */
    /* Only for a step with lengths: */
    uint32_t nformulas, nvariants, nscalars;
    const Length *lengths;
    const Formula *formulas; /* starting with the sizes */
    const Number *constants; /* one per formula; set for constants */
    const Variant *variants;
    const Scalar *scalars;
    const uint32_t *input_formulas; /* formulas of the sizes of inputs in bytes */
    const Shape *shapes;            /* of outputs */
    size_t image;                   /* bytes of the largest image */
} Built;

extern const Built built;

#endif
