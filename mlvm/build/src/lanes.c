#include "lanes.h"

#include <stdio.h>
#include <string.h>

static const char FULL[] = "frames of lanes need more bytes than --records says";

typedef struct {
    Lanes lanes; /* first member: the Lanes of plan/lanes.c */
    const LaneCode *code;
    Pool *pool;
    char *memory;     /* memory of the code */
    char **addresses; /* addresses of the places */
    char *room, *top, *end, *last;
    char *why;
} Running;

static int fail(Running *r, const char *why)
{
    if (!r->why[0])
        snprintf(r->why, 128, "%s", why);
    return -1;
}

/* --- memory: the last block grows in place; a moved block is lost until the end --- */

static void *resize(Lanes *lanes, void *old, size_t had, size_t nbytes)
{
    Running *r = (Running *)lanes;
    char *to = old && old == r->last ? old : r->top;
    if (nbytes > SIZE_MAX / 2 || rounded(nbytes) > (size_t)(r->end - to)) {
        fail(r, FULL);
        return NULL;
    }
    if (to != old && had)
        memcpy(to, old, had);
    r->last = to;
    r->top = to + rounded(nbytes);
    return to;
}

/* Allocate `count` zeroed elements. */
static void *zeros(Running *r, int64_t count, size_t size)
{
    r->last = NULL;
    void *memory = resize(&r->lanes, NULL, 0, ((size_t)count + 1) * size);
    return memory ? memset(memory, 0, ((size_t)count + 1) * size) : NULL;
}

static int grow(Lanes *lanes, int64_t size, int64_t count)
{
    Rows *rows = &lanes->rows[size];
    int64_t room = rows->used + count > 2 * rows->room ? rows->used + count : 2 * rows->room;
    if (rows->nbytes && room > INT64_MAX / 4 / rows->nbytes)
        return fail((Running *)lanes, FULL);
    char *data = resize(lanes, rows->data, (size_t)(rows->used * rows->nbytes),
                        (size_t)(room * rows->nbytes));
    if (!data)
        return -1;
    rows->data = data;
    rows->room = room;
    return 0;
}

/* --- parts --- */

static int prepare_part(Lanes *lanes, int64_t number, int64_t k)
{
    Running *r = (Running *)lanes;
    const LaneSegment *spec = &r->code->segments[number];
    Part *part = &lanes->segments[number].parts[k];
    part->operands = zeros(r, spec->nins, sizeof *part->operands);
    part->results = zeros(r, spec->nouts, sizeof *part->results);
    if (!part->operands || !part->results)
        return -1;
    for (int64_t i = 0; i < spec->nins; i++)
        part->operands[i] = r->memory + spec->parts[k].operands[i];
    for (int64_t i = 0; i < spec->nouts; i++)
        part->results[i] = r->memory + spec->parts[k].results[i];
    part->prepared = 1;
    return 0;
}

static int run_calls(Running *r, const LanePart *part)
{
    for (int i = 0; i < part->count; i++)
        if (run_one(r->pool, r->addresses, &part->calls[i]))
            return fail(r, "an op of a lane rejects the operand values");
    return 0;
}

static int run_part(Lanes *lanes, int64_t number, int64_t k)
{
    Running *r = (Running *)lanes;
    return run_calls(r, &r->code->segments[number].parts[k]);
}

static int look(Lanes *lanes)
{
    (void)lanes;
    return 0;
}

static int refuse(Lanes *lanes, const char *what, int64_t a, int64_t b)
{
    Running *r = (Running *)lanes;
    if (!strcmp(what, "check"))
        return fail(r, r->code->messages[a]);
    if (r->why[0])
        return -1;
    if (!strcmp(what, "index"))
        snprintf(r->why, 128, "index %lld is out of range for length %lld", (long long)a, (long long)b);
    else if (!strcmp(what, "depth"))
        snprintf(r->why, 128, "call depth exceeds the limit of %lld", (long long)a);
    else
        return fail(r, "the record does not exist");
    return -1;
}

static const LanesRunner runner = {.resize = resize,
                                   .grow = grow,
                                   .prepare = prepare_part,
                                   .run = run_part,
                                   .look = look,
                                   .refuse = refuse};

/* --- the whole run --- */

static int prepare(Running *r, const LaneCode *code, const Value *shared)
{
    Lanes *lanes = &r->lanes;
    *lanes = (Lanes){.runner = &runner,
                     .code = code->code,
                     .at = code->at,
                     .nsteps = code->nsteps,
                     .heavy = code->heavy,
                     .nrows = code->nsizes,
                     .nsegments = code->nsegments,
                     .nsites = code->nsites,
                     .nshared = code->nshared + code->nhoisted,
                     .width = code->width,
                     .nparams = code->nargs,
                     .nreturned = code->nresults,
                     .params = code->params,
                     .returned = code->returned,
                     .lent = code->lent};
    lanes->rows = zeros(r, code->nsizes, sizeof *lanes->rows);
    lanes->segments = zeros(r, code->nsegments, sizeof *lanes->segments);
    lanes->sites = zeros(r, code->nsites, sizeof *lanes->sites);
    lanes->ready = zeros(r, code->nsteps, sizeof *lanes->ready);
    lanes->row_of_shared = zeros(r, lanes->nshared, sizeof *lanes->row_of_shared);
    lanes->shared = zeros(r, lanes->nshared, sizeof *lanes->shared);
    r->addresses = zeros(r, code->nplaces, sizeof *r->addresses);
    if (!lanes->rows || !lanes->segments || !lanes->sites || !lanes->ready || !lanes->row_of_shared ||
        !lanes->shared || !r->addresses)
        return -1;
    for (int64_t i = 0; i < code->nsizes; i++)
        lanes->rows[i].nbytes = code->sizes[i];
    for (int64_t i = 0; i < code->nsegments; i++) {
        const LaneSegment *spec = &code->segments[i];
        Segment *segment = &lanes->segments[i];
        *segment = (Segment){
            .ncounts = spec->ncounts, .nins = spec->nins, .nouts = spec->nouts, .counts = spec->counts};
        segment->first = zeros(r, spec->nouts, sizeof *segment->first);
        segment->parts = zeros(r, spec->ncounts, sizeof *segment->parts);
        if (!segment->first || !segment->parts)
            return -1;
    }
    for (int64_t i = 0; i < code->nsites; i++) {
        const LaneSite *spec = &code->sites[i];
        lanes->sites[i] = (Site){.segment = spec->segment,
                                 .sum = spec->sum,
                                 .nbytes = spec->nbytes,
                                 .count = spec->noperands,
                                 .sizes = spec->sizes};
        lanes->sites[i].rows = zeros(r, spec->noperands, sizeof(List));
        if (!lanes->sites[i].rows)
            return -1;
    }
    for (int64_t i = 0; i < lanes->nshared; i++)
        lanes->shared[i] = i < code->nshared ? shared[i].as.tensor->address
                                             : r->memory + code->hoisted[i - code->nshared];
    for (int64_t i = 0; i < code->nplaces; i++) {
        const LanePlace *place = &code->places[i];
        r->addresses[i] = place->shared < 0 ? r->memory + place->at : lanes->shared[place->shared];
    }
    return code->first ? run_calls(r, code->first) : 0;
}

static int run(Running *r, const LaneCode *code, const Value *results)
{
    const Value *sums = results + code->nresults, *args = sums + code->nsums + 1;
    int64_t count, nparams = code->nresults + code->nsums + 1 + code->nargs;
    memcpy(&count, sums[code->nsums].as.tensor->address, sizeof count);
    if (prepare(r, code, args + code->nargs))
        return -1;
    for (int64_t i = 0; i < code->nresults + code->nargs; i++) {
        const Type *type = (i < code->nresults ? &results[i] : &args[i - code->nresults])->as.tensor->type;
        if (count < 0 || count > type->shape[0])
            return fail(r, "the number of lanes exceeds the number of rows");
    }
    char **addresses = zeros(r, nparams, sizeof *addresses);
    if (!addresses)
        return -1;
    for (int64_t i = 0; i < nparams; i++)
        addresses[i] = results[i].as.tensor->address;
    for (int64_t i = 0; i < code->nsums; i++)
        memset(sums[i].as.tensor->address, 0, (size_t)sums[i].as.tensor->type->nbytes);
    for (int64_t i = 0; i < code->nresults; i++) {
        int64_t nbytes = count * code->sizes[code->returned[i].size];
        memset(addresses[i] + nbytes, 0, (size_t)(results[i].as.tensor->type->nbytes - nbytes));
    }
    return lanes_run_rows(&r->lanes, count, addresses + (args - results), addresses,
                          addresses + code->nresults);
}

const char *lanes_run(const LaneCode *code, Pool *pool, char *memory, char *room, size_t nbytes,
                      const Value *params, int64_t count, char why[128])
{
    why[0] = 0;
    if (nbytes < rounded(sizeof(Running)))
        return FULL;
    if (count != code->nresults + code->nsums + 1 + code->nargs + code->nshared)
        return "the parameters differ from the parameters at build time";
    Running *r = (Running *)(void *)room;
    *r = (Running){.code = code,
                   .pool = pool,
                   .memory = memory + code->memory,
                   .why = why,
                   .room = room,
                   .top = room + rounded(sizeof *r),
                   .end = room + nbytes};
    if (!run(r, code, params))
        return NULL;
    fail(r, "the code was changed after the build");
    return why;
}
