/* Frames of many lanes during a run; mlvm/machines/lane_runs.py is the Python definition.
 *
 * This code is independent of Python. It requests memory, the programs of segments, and errors from
 * a runner: the extension (machine/lanes.c), or a step built without Python. All numbers are
 * int64_t. A step begins with the code, followed by the operands that `_flat` in native/lanes.py
 * writes. */
#ifndef MLVM_PLAN_LANES_H
#define MLVM_PLAN_LANES_H

#include <stddef.h>
#include <stdint.h>

/* clang-format off */
#define LANE_STEPS(X)                                                                         \
    X(run) X(move) X(dup) X(const) X(take) X(put) X(split) X(jump) X(call) X(join)       \
    X(return) X(push) X(read) X(add) X(check)
/* clang-format on */
#define STEP(name) STEP_##name,
enum LaneStep { LANE_STEPS(STEP) };

enum { MOST_FRAMES_DEEP = 10000 };
#define MOST_FRAMES ((int64_t)1 << 32)

typedef struct {
    int64_t *of, count, room;
} List;

typedef struct {
    char *data;
    int64_t nbytes, used, room;
} Rows;

typedef struct {
    void *program; /* owned by the runner */
    char **operands, **results;
    int prepared;
} Part;

typedef struct {
    int64_t ncounts, nins, nouts;
    const int64_t *counts;
    int64_t *first; /* number of the first row of each result */
    Part *parts;    /* one for each count, the largest first */
} Segment;

/* Site at which frames add to a sum of `nbytes`, by a segment with the sum as first operand;
 * `sizes` are the row sizes of the other operands. */
typedef struct {
    int64_t segment, sum, nbytes, count;
    const int64_t *sizes;
    List frames, *rows;
} Site;

/* A register of the initial frames, and the size of the rows. */
typedef struct {
    int64_t number, size;
} LaneRegister;

typedef struct Lanes Lanes;

/* Callbacks of lanes. Those that return an int return 0, or -1 for an error. */
typedef struct {
    void *(*resize)(Lanes *self, void *old, size_t had, size_t nbytes); /* as realloc; NULL for an error */
    int (*grow)(Lanes *self, int64_t size, int64_t count);              /* space for `count` more rows */
    int (*prepare)(Lanes *self, int64_t segment, int64_t k); /* set where a part reads and writes rows */
    int (*run)(Lanes *self, int64_t segment, int64_t k);
    int (*look)(Lanes *self);
    int (*refuse)(Lanes *self, const char *what, int64_t a, int64_t b); /* report an error */
} LanesRunner;

/* State of lanes. The runner embeds it as the first member of a struct, or after an object
 * header. */
struct Lanes {
    const LanesRunner *runner;
    const int64_t *code, *at;
    int64_t nsteps;
    const char *heavy;
    int64_t nrows, nsegments, nsites, nshared, width, nparams, nreturned;
    const LaneRegister *params, *returned;
    const char *lent; /* sizes of rows that only an argument has: they are read in place */
    Rows *rows;
    Segment *segments;
    Site *sites;
    int64_t *row_of_shared; /* -1: not created */
    char **shared;
    /* Frames: */
    int64_t nframes, room, *regs, *parent, *depth, *site, *waits, *wakes;
    List *ready, now;
    List records, record_at;
    List order, sums, begins; /* of frames, for sums */
    char *stays;
    int64_t nstays;
};

/* Run the first `count` rows of the arguments: each result gets a row for each, and the frames add to
 * the sums. Return 0, or -1. */
int lanes_run_rows(Lanes *self, int64_t count, char *const *args, char *const *results, char *const *sums);

/* Return the row of that number; an unwritten register has row 0, which is zero. */
static inline char *lane_row(const Lanes *self, int64_t size, int64_t number)
{
    const Rows *rows = &self->rows[size];
    return rows->data + ((uint64_t)number < (uint64_t)rows->room ? number : 0) * rows->nbytes;
}

/* Return the row number in a frame's register. */
static inline int64_t *lane_register(const Lanes *self, int64_t frame, int64_t number)
{
    return &self->regs[frame * self->width + number];
}

#endif
