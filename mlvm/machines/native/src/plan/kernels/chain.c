/* A chain of row functions on one shape, piece by piece, so intermediate values stay in the
 * first-level cache. `row` is a single row function on packed operands of the result shape.
 *
 * A chain works on consecutive elements of the shape, which is treated as rows: the last axes with
 * the same layout in all operands are merged. A piece consists of a few rows, or is part of a row.
 * Row functions support only packed operands: a parameter is read and written in place if a piece of
 * it is packed. Other parameters are copied for each piece, and a single repeated row is copied
 * once. Short rows of a window form a piece together with the elements between the rows, PITCH
 * apart; all other values then have the same pitch. A scalar is a block of copies, which row
 * functions with steps read repeatedly. */
#include "links.h"

static const int64_t ones[CHAIN_MOST_OPERANDS] = {1, 1, 1, 1, 1};

static int row(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    int64_t first = begin * n[UNIT], last = end * n[UNIT];
    last = last < n[ELEMENTS] ? last : n[ELEMENTS];
    char *operands[CHAIN_MOST_OPERANDS];
    for (int i = 0; i < call->nparams; i++)
        operands[i] = p[i] + first * n[REST + i];
    call->rows[0]->run(operands, last - first, ones);
    return 0;
}

/* A single row function that runs as one unit. */
static int short_row(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)begin, (void)end, (void)scratch;
    call->rows[0]->run(p, call->ints[ELEMENTS], ones);
    return 0;
}

static int link_of_element(const KernelCall *call, char *const *p, Link *link)
{
    link->run = call->rows[0]->element;
    link->row = call->rows[0]->run;
    for (int i = 0; i < 4; i++)
        link->at[i] = p[i < call->nparams ? i : call->nparams - 1];
    return call->ints[ELEMENTS] == 1 && call->nparams <= 4;
}

/* After the integers of a chain follow: the lengths of the axes, the last of which is the row; the
 * values; for each link, the number of operands including the result, the operands, and the steps;
 * the written windows. */

/* Repeat a row of `length` bytes up to `bytes`. */
static void repeat(char *to, const char *from, int64_t length, int64_t bytes)
{
    memcpy(to, from, (size_t)(length < bytes ? length : bytes));
    for (int64_t done = length; done < bytes; done *= 2)
        memcpy(to + done, to, (size_t)(done < bytes - done ? done : bytes - done));
}

/* Copy `count` elements of `size` bytes; the strides are in elements. */
static void copy(char *to, int64_t to_stride, const char *from, int64_t from_stride, int64_t count,
                 int64_t size)
{
#define COPY(T)                                                                \
    {                                                                          \
        const T *in = (const T *)from;                                         \
        T *out = (T *)to, first = *in;                                         \
        for (int64_t i = 0; !from_stride && to_stride == 1 && i < count; i++)  \
            out[i] = first;                                                    \
        for (int64_t i = 0; (from_stride || to_stride != 1) && i < count; i++) \
            out[i * to_stride] = in[i * from_stride];                          \
    }
    if (to_stride == 1 && from_stride == 1)
        memcpy(to, from, (size_t)(count * size));
    else if (size == 1)
        COPY(uint8_t)
    else if (size == 2)
        COPY(uint16_t)
    else if (size == 4)
        COPY(uint32_t)
    else if (size == 8)
        COPY(uint64_t)
    else
        for (int64_t i = 0; i < count; i++)
            memcpy(to + i * to_stride * size, from + i * from_stride * size, (size_t)size);
#undef COPY
}

/* Row and column of the first element of a piece. */
typedef struct {
    int64_t axes, column, at[CHAIN_MOST_AXES];
} Position;

static void position_at(const int64_t *n, int64_t element, Position *position)
{
    int64_t last = n[NAXES] - 1, number = element / n[REST + last];
    position->axes = last;
    position->column = element % n[REST + last];
    for (int64_t axis = last - 1; axis >= 0; axis--) {
        position->at[axis] = number % n[REST + axis];
        number /= n[REST + axis];
    }
}

/* Advance to the next row; return the change of an offset with these strides. */
static inline int64_t next_row(const int64_t *n, const int64_t *strides, int64_t *at)
{
    int64_t by = 0;
    for (int64_t axis = n[NAXES] - 2; axis >= 0; axis--) {
        by += strides[axis];
        if (++at[axis] < n[REST + axis])
            break;
        by -= at[axis] * strides[axis];
        at[axis] = 0;
    }
    return by;
}

static void advance(const int64_t *n, Position *position, int64_t count)
{
    int64_t length = n[REST + position->axes], carry = 0;
    position->column += count;
    if (position->column < length)
        return;
    carry = position->column == length ? 1 : position->column / length;
    position->column -= carry * length;
    for (int64_t axis = position->axes - 1; axis >= 0 && carry; axis--) {
        int64_t at = position->at[axis] + carry;
        carry = at < n[REST + axis] ? 0 : at / n[REST + axis];
        position->at[axis] = at - carry * n[REST + axis];
    }
}

/* Return the address of a parameter's piece of `count` elements: in the parameter, if it is packed
 * there, else in scratch memory. The elements are whole rows, or part of one. */
static char *piece_of(const int64_t *n, const int64_t *value, const Position *position, int64_t count,
                      char *parameter, char *space)
{
    const int64_t *strides = value + STRIDES;
    int64_t offset = value[OFFSET] + position->column * strides[position->axes];
    for (int64_t axis = 0; axis < position->axes; axis++)
        offset += position->at[axis] * strides[axis];
    int64_t length = n[REST + position->axes];
    int in_place = strides[position->axes] == 1;
    if (count > length - position->column) /* several rows */
        in_place &= (value[KIND] == SPREAD || value[KIND] == WRITTEN) && n[PITCH] > length &&
                    strides[position->axes - 1] == n[PITCH];
    return in_place ? parameter + offset * value[SIZE] : space;
}

/* Copy a piece of a parameter, which may be a window of a tensor, to scratch memory or back. */
static void move(const int64_t *n, const int64_t *value, const Position *position, int64_t count,
                 char *parameter, char *space, int back)
{
    const int64_t *strides = value + STRIDES;
    int64_t last = position->axes, length = n[REST + last], size = value[SIZE];
    int64_t step = count < length ? count : length, at[CHAIN_MOST_AXES];
    int64_t offset = value[OFFSET] + position->column * strides[last];
    for (int64_t axis = 0; axis < last; axis++)
        offset += (at[axis] = position->at[axis]) * strides[axis];
    for (int64_t done = 0; done < count; done += step, space += n[PITCH] * size) {
        char *outside = parameter + offset * size;
        if (back)
            copy(outside, strides[last], space, 1, step, size);
        else
            copy(space, 1, outside, strides[last], step, size);
        offset += next_row(n, strides, at);
    }
}

/* Return the number of elements of the piece that starts there, at most `rest`. */
static int64_t piece_at(const int64_t *n, const Position *position, int64_t rest)
{
    int64_t length = n[REST + n[NAXES] - 1], most = n[PIECE], column = position->column;
    if (n[PITCH] > length) { /* rows are PITCH apart, so a piece may contain several */
        int64_t rows = n[REST + n[NAXES] - 2] - position->at[n[NAXES] - 2];
        most = rows * length < most ? rows * length : most;
    }
    if (n[NAXES] > 1 && (column || length > most)) /* at most to the end of this row */
        most = length - column < most ? length - column : most;
    else if (n[NAXES] > 1 && rest >= length) /* whole rows */
        rest -= rest % length;
    return rest < most ? rest : most;
}

/* Save or restore the bytes between the rows of a piece that is written in place. */
static void move_gaps(const int64_t *n, int64_t rows, int64_t size, char *at, char *space, int back)
{
    int64_t length = n[REST + n[NAXES] - 1] * size, gap = n[PITCH] * size - length;
    for (at += length; --rows > 0; at += gap + length, space += gap) {
        char *to = back ? at : space, *from = back ? space : at;
        if (gap == 16) /* two f64: a function call would need more time */
            memcpy(to, from, 16);
        else
            memcpy(to, from, (size_t)gap);
    }
}

static void run_links(const KernelCall *call, const int64_t *link, char *const *values, int64_t count,
                      const char *scratch)
{
    const CodeSegment *segments = code_of(call);
    for (int64_t i = 0; i < call->ints[NLINKS];) {
        const CodeSegment *code = segments ? segments + i : NULL;
        if (code && code->run) {
            int64_t nbytes = count * code->size;
            code->run(values, nbytes - nbytes % CODE_VECTOR, scratch, nbytes);
            link += code->nints;
            i += code->nlinks;
            continue;
        }
        char *operands[CHAIN_MOST_OPERANDS];
        for (int64_t k = 0; k < link[0]; k++)
            operands[k] = values[link[1 + k]];
        call->rows[i++]->run(operands, count, link + 1 + link[0]);
        link += 1 + 2 * link[0];
    }
}

/* A chain with a single unit, in which all values have the shape of the chain or are scalars. */
static int short_chain(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)begin, (void)end;
    const int64_t *n = call->ints, *value = n + REST + n[NAXES];
    code_count(call, n[ELEMENTS]);
    char **values = (char **)scratch;
    for (int64_t i = 0; i < n[NVALUES]; i++, value += STRIDES + n[NAXES]) {
        values[i] = value[KIND] == WHOLE ? p[value[PARAMETER]] : scratch + value[PLACE];
        if (value[KIND] == REPEATED)
            copy(values[i], 1, p[value[PARAMETER]], 0, n[ELEMENTS], value[SIZE]);
        else if (value[KIND] == SCALAR)
            copy(values[i], 1, p[value[PARAMETER]], 0, BLOCK_BYTES / value[SIZE], value[SIZE]);
    }
    run_links(call, value, values, n[ELEMENTS], scratch);
    return 0;
}

/* A chain of single elements. The links call each other, so the processor predicts the jump of each link
 * separately. With a single call in a loop it could not. */
static const Link *last_link(const Link *link)
{
    return link;
}

static int chain_of_elements(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                             char *scratch)
{
    (void)begin, (void)end;
    Link *links = (Link *)(scratch + call->ints[PIECE]);
    add_links(call, p, scratch, links, 1)->run = last_link;
    links->run(links);
    return 0;
}

static int chain(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    int64_t width = STRIDES + n[NAXES], length = n[REST + n[NAXES] - 1];
    const int64_t *values = n + REST + n[NAXES];
    const int64_t *links = values + n[NVALUES] * width;
    int64_t first = begin * n[UNIT], last = end * n[UNIT];
    char **base = (char **)scratch, **now = base + n[NVALUES];
    if (last > n[ELEMENTS])
        last = n[ELEMENTS];
    if (first >= last)
        return 0;
    code_count(call, last - first);
    for (int64_t i = 0; i < n[NVALUES]; i++) {
        const int64_t *value = values + i * width;
        int64_t most = last - first < n[PIECE] ? last - first : n[PIECE];
        char *space = scratch + value[PLACE];
        base[i] = now[i] = value[KIND] == TEMPORARY ? space : p[value[PARAMETER]];
        if (value[KIND] != REPEATED && value[KIND] != SCALAR)
            continue;
        const char *from = p[value[PARAMETER]] + value[OFFSET] * value[SIZE];
        now[i] = base[i] = space;
        if (value[KIND] == SCALAR)
            copy(space, 1, from, 0, BLOCK_BYTES / value[SIZE], value[SIZE]);
        else if (!value[width - 1])
            copy(space, 1, from, 0, n[PITCH] > length ? n[PIECE] / length * n[PITCH] : most, value[SIZE]);
        else if (length <= n[PIECE] && last - first > length - first % length)
            repeat(space, from, length * value[SIZE], (most < length ? length : most) * value[SIZE]);
        else
            base[i] = (char *)from;
    }
    int scatters = n[NWINDOWS] || n[PITCH] > length;
    Position position;
    position_at(n, first, &position);
    for (int64_t at = first, count; at < last; at += count) {
        count = piece_at(n, &position, last - at);
        int64_t span = count > length ? (count / length - 1) * n[PITCH] + length : count;
        for (int64_t i = 0; i < n[NVALUES]; i++) {
            const int64_t *value = values + i * width;
            char *space = scratch + value[PLACE];
            if (value[KIND] == WHOLE) {
                now[i] = base[i] + at * value[SIZE];
            } else if (value[KIND] == REPEATED && value[width - 1]) {
                now[i] = base[i] + position.column * value[SIZE];
            } else if (value[KIND] == SPREAD || value[KIND] == WRITTEN) {
                now[i] = piece_of(n, value, &position, count, base[i], space);
                if (now[i] == space && value[KIND] == SPREAD)
                    move(n, value, &position, count, base[i], space, 0);
                else if (now[i] != space && value[KIND] == WRITTEN && span > count)
                    move_gaps(n, count / length, value[SIZE], now[i], space, 0);
            }
        }
        run_links(call, links, now, span, scratch);
        for (int64_t i = 0; scatters && i < n[NVALUES]; i++) {
            const int64_t *value = values + i * width;
            char *space = scratch + value[PLACE];
            if (value[KIND] == WRITTEN && now[i] == space)
                move(n, value, &position, count, base[i], space, 1);
            else if (value[KIND] == WRITTEN && span > count)
                move_gaps(n, count / length, value[SIZE], now[i], space, 1);
        }
        advance(n, &position, count);
    }
    return 0;
}

/* --- windows of results --- */

enum { chain_window_integers(NAME) OF_AXES };
enum { AXIS_LENGTH, AXIS_START, AXIS_COUNT, AXIS_STEP, OF_AXIS };

/* Return whether an index is in the window along one axis. */
static int is_inside(const int64_t *axis, int64_t index)
{
    int64_t beyond = index - axis[AXIS_START];
    return beyond >= 0 && beyond % axis[AXIS_STEP] == 0 && beyond / axis[AXIS_STEP] < axis[AXIS_COUNT];
}

/* Copy the elements outside of the window from one tensor to another, starting with axis `number`. */
static void copy_outside(const int64_t *window, int64_t number, int64_t bytes, char *to, const char *from)
{
    const int64_t *axis = window + OF_AXES + number * OF_AXIS;
    int64_t each = bytes / axis[AXIS_LENGTH], is_last = number + 1 == window[WINDOW_AXES];
    for (int64_t i = 0; i < axis[AXIS_LENGTH]; i++) {
        int64_t count = 1; /* elements per copy */
        if (is_last && i < axis[AXIS_START])
            count = axis[AXIS_START];
        else if (is_last && i == axis[AXIS_START] + (axis[AXIS_COUNT] - 1) * axis[AXIS_STEP] + 1)
            count = axis[AXIS_LENGTH] - i;
        if (count > 1 || !is_inside(axis, i))
            memcpy(to + i * each, from + i * each, (size_t)(count * each));
        else if (!is_last)
            copy_outside(window, number + 1, each, to + i * each, from + i * each);
        else if (axis[AXIS_STEP] == 1)
            count = axis[AXIS_COUNT];
        i += count - 1;
    }
}

static int finish(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)begin, (void)end, (void)scratch;
    const int64_t *n = call->ints, *window = n + REST + n[NAXES] + n[NVALUES] * (STRIDES + n[NAXES]);
    for (int64_t i = 0; i < n[NLINKS]; i++)
        window += 1 + 2 * window[0];
    for (int64_t i = 0; i < n[NWINDOWS]; i++) {
        char *to = p[window[WINDOW_OUT]], *from = p[window[WINDOW_IN]];
        if (to != from)
            copy_outside(window, 0, window[WINDOW_BYTES], to, from);
        window += OF_AXES + window[WINDOW_AXES] * OF_AXIS;
    }
    return 0;
}

KERNEL_TABLE(chain,
             KERNEL(row, row, NULL) LINKED_KERNEL(short_row, link_of_element) KERNEL(chain, chain, NULL)
                 KERNEL(short_chain, short_chain, NULL) KERNEL(chain_of_elements, chain_of_elements, NULL)
                     KERNEL(chain_into_windows, chain, finish))
