/* Lanes in the caller's memory: see mlvm/machines/lanes.py. */
#ifndef MLVM_STANDALONE_LANES_H
#define MLVM_STANDALONE_LANES_H

#include "../../machines/native/src/plan/lanes.h"
#include "../../machines/native/src/plan/loop.h"

/* Where the bytes of a tensor of a part lie: in the code's own memory, or in an operand that all share. */
typedef struct {
    int shared; /* its number, or -1 */
    size_t at;
} LanePlace;

/* Kernels for so many rows. Operands and results are in the code's own memory, each from a byte on. */
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

/* A sum that frames add to by the segment of that number. */
typedef struct {
    int64_t segment, sum, nbytes, noperands;
    const int64_t *sizes;
} LaneSite;

typedef struct {
    int64_t nresults, nsums, nargs, nshared, nhoisted, nsteps, nsizes, nsegments, nsites, nplaces, width;
    const int64_t *code, *at, *sizes;
    const char *heavy, *lent;
    const char *const *messages; /* of checks, by step */
    const LaneRegister *params, *returned;
    const LaneSegment *segments;
    const LaneSite *sites;
    const LanePart *first; /* makes what is hoisted; NULL if nothing is */
    const size_t *hoisted;
    const LanePlace *places; /* of the calls of all parts */
    size_t memory;           /* from which byte of the step's memory on it has its own */
} LaneCode;

/* Run lanes on the tensors of these parameters. `room` is for rows and frames. Returns NULL, or what is
 * wrong, which `why` has room for. */
const char *lanes_run(const LaneCode *code, Pool *pool, char *memory, char *room, size_t nbytes,
                      const Value *params, int64_t count, char why[128]);

#endif
