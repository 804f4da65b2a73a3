/* The scheduler of lanes: frames of many rows, each with a separate program counter.
 *
 * In:       a Lanes (lanes.h): the code that native/lanes.py encodes, and the rows of arguments.
 * Out:      rows of results, and sums over all frames; or an error of the runner.
 * Must hold: the linker (lane_link.py) has checked registers and sizes. A row is written once, and never
 *           changes: registers are numbers of rows. The order in which frames run depends only on the
 *           code and the conditions, and the bits of a row do not depend on other rows.
 * Callers:  machine/lanes.c for Python; build/src/lanes.c for built steps.
 * Locks:    the VM's lock, held by the caller. Callbacks of the runner, which may need the
 *           interpreter lock, handle memory, programs of segments and errors.
 *
 * Light steps run first, then the heavy step at which most frames wait.
 */
#include "lanes.h"

#include "loop.h"

#include <string.h>

/* Discard all frames, records and rows. */
static void clear(Lanes *self)
{
    self->nframes = self->records.count = self->record_at.count = 0;
    for (int64_t pc = 0; pc < self->nsteps; pc++)
        self->ready[pc].count = 0;
    for (int64_t i = 0; i < self->nsites; i++) {
        self->sites[i].frames.count = 0;
        for (int64_t k = 0; k < self->sites[i].count; k++)
            self->sites[i].rows[k].count = 0;
    }
    for (int64_t i = 0; i < self->nshared; i++)
        self->row_of_shared[i] = -1;
    for (int64_t i = 0; i < self->nrows; i++)
        self->rows[i].used = 0;
}

/* Reserve space for `more` numbers. Return 0, or -1. */
static int reserve(Lanes *self, List *list, int64_t more)
{
    if (list->count + more <= list->room)
        return 0;
    int64_t room = 2 * list->room > list->count + more ? 2 * list->room : list->count + more + 16;
    size_t size = sizeof *list->of;
    int64_t *of = self->runner->resize(self, list->of, size * (size_t)list->room, size * (size_t)room);
    if (!of)
        return -1;
    list->of = of;
    list->room = room;
    return 0;
}

static int append(Lanes *self, List *list, const int64_t *numbers, int64_t count)
{
    if (reserve(self, list, count))
        return -1;
    if (count)
        memcpy(list->of + list->count, numbers, sizeof *numbers * (size_t)count);
    list->count += count;
    return 0;
}

/* --- rows --- */

/* Add `count` rows of a size. Return the number of the first; -1 for an error. */
static int64_t more_rows(Lanes *self, int64_t size, int64_t count)
{
    Rows *rows = &self->rows[size];
    int64_t first = rows->used;
    if (first + count > rows->room && self->runner->grow(self, size, count))
        return -1;
    rows->used = first + count;
    return first;
}

static int64_t integer_at(const char *p, int64_t nbytes, int64_t is_signed)
{
    switch (nbytes) {
    case 1: return is_signed ? *(const int8_t *)p : *(const uint8_t *)p;
    case 2: return is_signed ? *(const int16_t *)p : *(const uint16_t *)p;
    case 4: return is_signed ? (int64_t) * (const int32_t *)p : (int64_t) * (const uint32_t *)p;
    default: return *(const int64_t *)p;
    }
}

/* Return the index in a frame's register, checked against `length` for `count` elements; -1 for an
 * error. `s` contains the register, the size of the rows, and whether it is signed. */
static int64_t place(Lanes *self, int64_t frame, const int64_t *s, int64_t length, int64_t count)
{
    int64_t index = integer_at(lane_row(self, s[1], *lane_register(self, frame, s[0])),
                               self->rows[s[1]].nbytes, s[2]);
    int64_t at = index < 0 ? index + length : index;
    if (at < 0 || at > length - count)
        return self->runner->refuse(self, "index", index, length);
    return at;
}

/* --- programs --- */

/* s: segment, number of operands, operand registers and row sizes, number of results, result
 * registers and sizes. */
static int run_segment(Lanes *self, const int64_t *s, const List *frames)
{
    int64_t number = s[0], nins = s[1], total = frames->count, start = 0;
    const int64_t *ins = s + 2, *outs = ins + 2 * nins + 1;
    int64_t nouts = outs[-1];
    const Segment *segment = &self->segments[number];
    for (int64_t j = 0; j < nouts; j++) {
        segment->first[j] = more_rows(self, outs[2 * j + 1], total);
        if (segment->first[j] < 0)
            return -1;
    }
    for (int64_t k = 0; k < segment->ncounts; k++) {
        int64_t count = segment->counts[k];
        Part *part = &segment->parts[k];
        for (; total - start >= count; start += count) {
            if (!part->prepared && self->runner->prepare(self, number, k))
                return -1;
            for (int64_t i = 0; i < nins; i++) {
                size_t nbytes = (size_t)self->rows[ins[2 * i + 1]].nbytes;
                char *to = part->operands[i];
                for (int64_t f = start; nbytes && f < start + count; f++, to += nbytes)
                    memcpy(to,
                           lane_row(self, ins[2 * i + 1], *lane_register(self, frames->of[f], ins[2 * i])),
                           nbytes);
            }
            if (self->runner->run(self, number, k))
                return -1;
            for (int64_t j = 0; j < nouts; j++) {
                int64_t size = outs[2 * j + 1];
                if (self->rows[size].nbytes)
                    memcpy(lane_row(self, size, segment->first[j] + start), part->results[j],
                           (size_t)(self->rows[size].nbytes * count));
            }
        }
    }
    for (int64_t j = 0; j < nouts; j++) /* results may use the registers of operands */
        for (int64_t f = 0; f < total; f++)
            *lane_register(self, frames->of[f], outs[2 * j]) = segment->first[j] + f;
    return 0;
}

/* --- frames --- */

static int wait_at(Lanes *self, int64_t pc, const int64_t *frames, int64_t count)
{
    return append(self, &self->ready[pc], frames, count);
}

static int widen(Lanes *self, int64_t **of, int64_t had, int64_t room)
{
    int64_t *wider = self->runner->resize(self, *of, sizeof *wider * (size_t)had,
                                          sizeof *wider * (size_t)room);
    if (!wider)
        return -1;
    *of = wider;
    return 0;
}

/* Create frames with registers without rows. Return 0, or -1. */
static int more_frames(Lanes *self, int64_t count)
{
    if (!count)
        return 0;
    if (count > MOST_FRAMES - self->nframes)
        return self->runner->refuse(self, "frames", MOST_FRAMES, 0);
    if (self->nframes + count > self->room) {
        int64_t room = 2 * self->room > self->nframes + count ? 2 * self->room : self->nframes + count + 64;
        int64_t had = self->room;
        if (widen(self, &self->regs, had * self->width, room * self->width) ||
            widen(self, &self->parent, had, room) || widen(self, &self->depth, had, room) ||
            widen(self, &self->site, had, room) || widen(self, &self->waits, had, room) ||
            widen(self, &self->wakes, had, room))
            return -1;
        self->room = room;
    }
    memset(self->regs + self->nframes * self->width, 0xff,
           sizeof *self->regs * (size_t)(count * self->width));
    for (int64_t f = self->nframes; f < self->nframes + count; f++) {
        self->parent[f] = self->site[f] = self->wakes[f] = -1;
        self->depth[f] = self->waits[f] = 0;
    }
    self->nframes += count;
    return 0;
}

/* s: entry, number of arguments, pairs of registers, number of results, pairs of registers. */
static int call_function(Lanes *self, int64_t pc, const int64_t *s, const List *frames)
{
    int64_t first = self->nframes;
    if (more_frames(self, frames->count) || reserve(self, &self->ready[s[0]], frames->count))
        return -1;
    for (int64_t i = 0; i < frames->count; i++) {
        int64_t caller = frames->of[i], called = first + i;
        self->parent[called] = caller;
        self->site[called] = pc;
        self->depth[called] = self->depth[caller] + 1;
        if (self->depth[called] > MOST_FRAMES_DEEP)
            return self->runner->refuse(self, "depth", MOST_FRAMES_DEEP, 0);
        self->waits[caller]++;
        for (int64_t k = 0; k < s[1]; k++)
            *lane_register(self, called, s[2 + 2 * k]) = *lane_register(self, caller, s[3 + 2 * k]);
        self->ready[s[0]].of[self->ready[s[0]].count++] = called;
    }
    return 0;
}

static int give_back(Lanes *self, const List *frames)
{
    for (int64_t i = 0; i < frames->count; i++) {
        int64_t called = frames->of[i], caller = self->parent[called];
        if (caller < 0)
            continue;
        const int64_t *s = self->code + self->at[self->site[called]] + 2; /* after the entry */
        s += 1 + 2 * s[0];
        for (int64_t k = 0; k < s[0]; k++)
            *lane_register(self, caller, s[1 + 2 * k]) = *lane_register(self, called, s[2 + 2 * k]);
        if (!--self->waits[caller] && self->wakes[caller] >= 0) {
            if (wait_at(self, self->wakes[caller], &caller, 1))
                return -1;
            self->wakes[caller] = -1;
        }
    }
    return 0;
}

/* Keep the frames for which `stays` is true; the others wait at `other`, unless it is -1. */
static int part_ways(Lanes *self, List *frames, const char *stays, int64_t other)
{
    int64_t remaining = 0;
    for (int64_t i = 0; i < frames->count; i++) {
        if (stays[i])
            frames->of[remaining++] = frames->of[i];
        else if (other >= 0 && wait_at(self, other, &frames->of[i], 1))
            return -1;
    }
    frames->count = remaining;
    return 0;
}

/* Run these frames from a step until they wait. Return 0, or -1. */
static int go_on(Lanes *self, int64_t pc, List *frames)
{
    int64_t begun = pc;
    while (frames->count) {
        int64_t count = frames->count;
        const int64_t *of = frames->of, *s = self->code + self->at[pc];
        if (self->heavy[pc] && pc != begun)
            return wait_at(self, pc, of, count);
        int64_t kind = *s++;
        switch (kind) {
        case STEP_run:
            if (run_segment(self, s, frames))
                return -1;
            break;
        case STEP_move: /* to, from */
            for (int64_t i = 0; i < count; i++)
                *lane_register(self, of[i], s[0]) = *lane_register(self, of[i], s[1]);
            break;
        case STEP_dup: { /* to, from, size */
            int64_t first = more_rows(self, s[2], count);
            if (first < 0)
                return -1;
            for (int64_t i = 0; i < count; i++) {
                memcpy(lane_row(self, s[2], first + i),
                       lane_row(self, s[2], *lane_register(self, of[i], s[1])),
                       (size_t)self->rows[s[2]].nbytes);
                *lane_register(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_const: { /* to, number, size */
            int64_t *shared_row = &self->row_of_shared[s[1]];
            if (*shared_row < 0) {
                int64_t row = more_rows(self, s[2], 1);
                if (row < 0)
                    return -1;
                *shared_row = row;
                if (self->rows[s[2]].nbytes)
                    memcpy(lane_row(self, s[2], row), self->shared[s[1]], (size_t)self->rows[s[2]].nbytes);
            }
            for (int64_t i = 0; i < count; i++)
                *lane_register(self, of[i], s[0]) = *shared_row;
            break;
        }
        case STEP_take: { /* to, from, size of all rows, length, size of one; index */
            int64_t first = more_rows(self, s[4], count);
            if (first < 0)
                return -1;
            size_t nbytes = (size_t)self->rows[s[4]].nbytes;
            for (int64_t i = 0; i < count; i++) {
                int64_t at = place(self, of[i], s + 5, s[3], 1);
                if (at < 0)
                    return -1;
                if (nbytes)
                    memcpy(lane_row(self, s[4], first + i),
                           lane_row(self, s[2], *lane_register(self, of[i], s[1])) + (size_t)at * nbytes,
                           nbytes);
                *lane_register(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_put: { /* to, value, size of all rows, length, size of the value, its rows; index */
            for (int64_t i = 0; i < count; i++) {
                int64_t *to = lane_register(self, of[i], s[0]), at = place(self, of[i], s + 6, s[3], s[5]);
                if (at < 0)
                    return -1;
                if (*to < 0) {
                    int64_t row = more_rows(self, s[2], 1);
                    if (row < 0)
                        return -1;
                    *to = row;
                    memset(lane_row(self, s[2], row), 0, (size_t)self->rows[s[2]].nbytes);
                }
                size_t nbytes = (size_t)self->rows[s[4]].nbytes;
                if (nbytes)
                    memcpy(lane_row(self, s[2], *to) + (size_t)at * (nbytes / (size_t)s[5]),
                           lane_row(self, s[4], *lane_register(self, of[i], s[1])), nbytes);
            }
            break;
        }
        case STEP_split: /* condition, size, dtype, other */
        case STEP_join: {
            if (count > self->nstays) {
                char *wider = self->runner->resize(self, self->stays, (size_t)self->nstays, (size_t)count);
                if (!wider)
                    return -1;
                self->stays = wider;
                self->nstays = count;
            }
            for (int64_t i = 0; i < count; i++) {
                if (kind == STEP_split)
                    self->stays[i] = (char)is_true(lane_row(self, s[1], *lane_register(self, of[i], s[0])),
                                                   (int)s[2]);
                else {
                    self->stays[i] = !self->waits[of[i]];
                    self->wakes[of[i]] = self->stays[i] ? -1 : pc + 1;
                }
            }
            if (part_ways(self, frames, self->stays, kind == STEP_split ? s[3] : -1))
                return -1;
            break;
        }
        case STEP_jump:
            if (self->runner->look(self))
                return -1;
            pc = s[0] - 1;
            break;
        case STEP_call:
            if (call_function(self, pc, s, frames))
                return -1;
            break;
        case STEP_return: return give_back(self, frames);
        case STEP_push: { /* number, size, count, registers and sizes */
            int64_t first = more_rows(self, s[1], count);
            if (first < 0 || reserve(self, &self->records, count * (s[2] + 1)) ||
                reserve(self, &self->record_at, count))
                return -1;
            for (int64_t i = 0; i < count; i++) {
                self->record_at.of[self->record_at.count++] = self->records.count;
                *(int64_t *)lane_row(self, s[1], first + i) = self->record_at.count; /* from 1 on */
                self->records.of[self->records.count++] = s - self->code; /* the step that has the sizes */
                for (int64_t k = 0; k < s[2]; k++)
                    self->records.of[self->records.count++] = *lane_register(self, of[i], s[3 + 2 * k]);
                *lane_register(self, of[i], s[0]) = first + i;
            }
            break;
        }
        case STEP_read: /* number, size, count, registers and sizes */
            for (int64_t i = 0; i < count; i++) {
                int64_t number = *(int64_t *)lane_row(self, s[1], *lane_register(self, of[i], s[0])) - 1;
                if (number < 0 || number >= self->record_at.count)
                    return self->runner->refuse(self, "record", number, 0);
                const int64_t *record = self->records.of + self->record_at.of[number];
                const int64_t *pushed = self->code + *record++;
                for (int64_t k = 0; k < s[2]; k++) {
                    if (k >= pushed[2] || s[4 + 2 * k] != pushed[4 + 2 * k])
                        return self->runner->refuse(self, "record", number, 0);
                    *lane_register(self, of[i], s[3 + 2 * k]) = record[k];
                }
            }
            break;
        case STEP_add: { /* site, count, registers */
            Site *site = &self->sites[s[0]];
            if (append(self, &site->frames, of, count))
                return -1;
            for (int64_t k = 0; k < s[1]; k++) {
                if (reserve(self, &site->rows[k], count))
                    return -1;
                for (int64_t i = 0; i < count; i++)
                    site->rows[k].of[site->rows[k].count++] = *lane_register(self, of[i], s[2 + k]);
            }
            break;
        }
        case STEP_check: /* condition, size, number of the step */
            for (int64_t i = 0; i < count; i++) {
                const char *p = lane_row(self, s[1], *lane_register(self, of[i], s[0]));
                for (int64_t k = 0; k < self->rows[s[1]].nbytes; k++)
                    if (!p[k])
                        return self->runner->refuse(self, "check", pc, 0);
            }
            break;
        default: return self->runner->refuse(self, "step", pc, 0);
        }
        pc++;
    }
    return 0;
}

/* Choose the next step: light steps first, then the one where most frames wait; -1 if no frame waits. */
static int64_t choice(const Lanes *self)
{
    int64_t best = -1;
    for (int64_t pc = 0; pc < self->nsteps; pc++) {
        if (!self->ready[pc].count)
            continue;
        if (!self->heavy[pc])
            return pc;
        if (best < 0 || self->ready[pc].count > self->ready[best].count)
            best = pc;
    }
    return best;
}

/* Run the first `count` frames, and the frames that they call, until they return. Return 0, or -1. */
static int run_frames(Lanes *self, int64_t count)
{
    int failed = reserve(self, &self->ready[0], count);
    int64_t pc;
    for (int64_t f = 0; !failed && f < count; f++)
        self->ready[0].of[self->ready[0].count++] = f;
    while (!failed && (pc = choice(self)) >= 0) {
        List frames = self->ready[pc];
        self->ready[pc] = self->now;
        self->ready[pc].count = 0;
        self->now = (List){0};
        failed = go_on(self, pc, &frames) || self->runner->look(self);
        self->now = frames;
    }
    return -failed;
}

/* --- arguments, results and sums --- */

/* Copy the rows of the given numbers to `to`, contiguously. */
static char *gather(const Lanes *self, char *to, int64_t size, const int64_t *numbers, int64_t count)
{
    size_t nbytes = (size_t)self->rows[size].nbytes;
    for (int64_t i = 0; nbytes && i < count; i++, to += nbytes)
        memcpy(to, lane_row(self, size, numbers[i]), nbytes);
    return to;
}

/* Resize a list to `count` zeros. Return 0, or -1. */
static int zeros(Lanes *self, List *list, int64_t count)
{
    list->count = 0;
    if (reserve(self, list, count))
        return -1;
    memset(list->of, 0, sizeof *list->of * (size_t)count);
    list->count = count;
    return 0;
}

/* Write each frame's position in the order of sequential calls to `order`. */
static int order_frames(Lanes *self, int64_t count)
{
    int64_t n = self->nframes, next = 0;
    if (zeros(self, &self->order, n) || zeros(self, &self->sums, n) || zeros(self, &self->begins, n))
        return -1;
    int64_t *order = self->order.of, *size = self->sums.of, *ahead = self->begins.of;
    for (int64_t f = n - 1; f >= 0; f--) { /* called frames have greater numbers */
        size[f]++;
        if (f >= count)
            size[self->parent[f]] += size[f];
    }
    for (int64_t f = 0; f < n; f++) {
        int64_t *from = f < count ? &next : &ahead[self->parent[f]];
        order[f] = *from + (f < count ? 0 : order[self->parent[f]] + 1);
        *from += size[f];
    }
    return 0;
}

/* Add the contributions of frames at a site to its sum: row by row, and for each row in the order of
 * sequential calls. So the schedule does not affect the bits. */
static int add_up(Lanes *self, Site *site, char *sum)
{
    const Segment *segment = &self->segments[site->segment];
    int64_t total = site->frames.count, start = 0;
    if (zeros(self, &self->begins, self->nframes + 1) || zeros(self, &self->sums, total))
        return -1;
    int64_t *begins = self->begins.of, *chosen = self->sums.of;
    const int64_t *order = self->order.of;
    for (int64_t j = 0; j < total; j++)
        begins[order[site->frames.of[j]] + 1]++;
    for (int64_t f = 0; f < self->nframes; f++)
        begins[f + 1] += begins[f];
    for (int64_t j = 0; j < total; j++)
        chosen[begins[order[site->frames.of[j]]]++] = j;
    for (int64_t k = 0; k < segment->ncounts; k++) {
        Part *part = &segment->parts[k];
        for (; total - start >= segment->counts[k]; start += segment->counts[k]) {
            if (!part->prepared && self->runner->prepare(self, site->segment, k))
                return -1;
            memcpy(part->operands[0], sum, (size_t)site->nbytes);
            for (int64_t i = 0; i < site->count; i++) {
                char *to = part->operands[i + 1];
                for (int64_t j = start; j < start + segment->counts[k]; j++)
                    to = gather(self, to, site->sizes[i], &site->rows[i].of[chosen[j]], 1);
            }
            if (self->runner->run(self, site->segment, k))
                return -1;
            memcpy(sum, part->results[0], (size_t)site->nbytes);
        }
    }
    return 0;
}

static int run_between(Lanes *self, int64_t count, char *const *args, char *const *results,
                       char *const *sums)
{
    if (more_frames(self, count))
        return -1;
    for (int64_t i = 0; i < self->nparams; i++) {
        LaneRegister param = self->params[i];
        Rows *rows = &self->rows[param.size];
        int64_t first = 0;
        if (self->lent[param.size]) {
            rows->data = args[i];
            rows->used = rows->room = count;
        } else if ((first = more_rows(self, param.size, count)) < 0)
            return -1;
        else if (rows->nbytes && count)
            memcpy(lane_row(self, param.size, first), args[i], (size_t)(rows->nbytes * count));
        for (int64_t f = 0; f < count; f++)
            *lane_register(self, f, param.number) = first + f;
    }
    if (run_frames(self, count))
        return -1;
    for (int64_t i = 0; i < self->nreturned; i++) {
        char *to = results[i];
        for (int64_t f = 0; f < count; f++)
            to = gather(self, to, self->returned[i].size, lane_register(self, f, self->returned[i].number),
                        1);
    }
    int64_t pending = 0;
    for (int64_t i = 0; i < self->nsites; i++)
        pending += self->sites[i].frames.count;
    if (pending && order_frames(self, count))
        return -1;
    for (int64_t i = 0; pending && i < self->nsites; i++)
        if (add_up(self, &self->sites[i], sums[self->sites[i].sum]))
            return -1;
    return 0;
}

int lanes_run_rows(Lanes *self, int64_t count, char *const *args, char *const *results, char *const *sums)
{
    clear(self);
    for (int64_t i = 0; i < self->nrows;
         i++) { /* the first row of each size stays zero, for unwritten registers */
        if (self->lent[i])
            continue;
        if (!self->rows[i].room) {
            if (self->runner->grow(self, i, 1))
                return -1;
            memset(self->rows[i].data, 0, (size_t)self->rows[i].nbytes);
        }
        self->rows[i].used = 1;
    }
    int failed = run_between(self, count, args, results, sums);
    for (int64_t i = 0; i < self->nrows; i++)
        if (self->lent[i])
            self->rows[i] = (Rows){.nbytes = self->rows[i].nbytes};
    return failed;
}
