/* Lanes in the caller's memory: see mlvm/machines/lane_runs.py. */
#ifndef MLVM_STANDALONE_LANES_H
#define MLVM_STANDALONE_LANES_H

#include "../../machines/native/src/plan/lanes.h"
#include "../../machines/native/src/plan/loop.h"

enum { ALIGNMENT = 64 };

static inline size_t rounded(size_t nbytes)
{
    return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* Location of a part's tensor: in the code's memory, or in an operand shared by all rows. */
typedef struct {
    int shared; /* number of the operand, or -1 */
    size_t at;
} LanePlace;

/* Kernels for a fixed number of rows. Operands and results are at offsets in the code's memory. */
typedef struct {
    const BoundCall *calls;
    int count;
    const size_t *operands, *results;
} LanePart;

typedef struct {
    int64_t ncounts, nins, nouts;
    const int64_t *counts; /* the largest first */
    const LanePart *parts;
} LaneSegment;

/* A sum to which frames add by the segment of that number. */
typedef struct {
    int64_t segment, sum, nbytes, noperands;
    const int64_t *sizes;
} LaneSite;

typedef struct {
    int64_t nresults, nsums, nargs, nshared, nhoisted, nsteps, nsizes, nsegments, nsites, nplaces, width;
    const int64_t *code, *at, *sizes;
    const char *heavy, *lent;
    const char *const *messages; /* error messages of checks, by step */
    const LaneRegister *params, *returned;
    const LaneSegment *segments;
    const LaneSite *sites;
    const LanePart *first; /* computes hoisted values; NULL if there are none */
    const size_t *hoisted;
    const LanePlace *places; /* of the calls in all parts */
    size_t memory;           /* offset of the code's memory in the step's memory */
} LaneCode;

/* Run lanes on the tensors of these parameters. `room` is memory for rows and frames. Return
 * NULL, or an error message, for which `why` has space. */
const char *lanes_run(const LaneCode *code, Pool *pool, char *memory, char *room, size_t nbytes,
                      const Value *params, int64_t count, char why[128]);

#endif
