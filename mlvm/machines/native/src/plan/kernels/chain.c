/* A chain of row functions on one shape, piece by piece, so that what passes between them stays in
 * the first-level cache. `row` is a single one on packed operands of the result's shape.
 *
 * A chain works on consecutive elements of its shape, which is seen as rows: the last axes that all
 * operands agree about are one. A piece is a few rows, or part of one. Row functions see packed
 * operands only: what has the chain's shape is read where it lies. Others are laid out for a piece,
 * a scalar or a single row once for all pieces. */
#include "../plan.h"

#include <string.h>

enum { chain_integers(NAME) REST };
enum { chain_value_integers(NAME) STRIDES };
enum { MOST_OPERANDS = 4 };

static int row(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    int64_t first = begin * n[UNIT], last = end * n[UNIT];
    last = last < n[ELEMENTS] ? last : n[ELEMENTS];
    char *operands[MOST_OPERANDS];
    for (int i = 0; i < call->nparams; i++)
        operands[i] = p[i] + first * n[REST + i];
    call->rows[0]->run(operands, last - first, call->floats);
    return 0;
}

/* Behind the integers of a chain come the lengths of its axes, the last of which is the row; its values;
 * of each of its links how many operands it has with its result, and which. */

/* Lay out a row, `length` bytes, again and again until there are `bytes`. */
static void repeat(char *to, const char *from, int64_t length, int64_t bytes)
{
    memcpy(to, from, (size_t)(length < bytes ? length : bytes));
    for (int64_t done = length; done < bytes; done *= 2)
        memcpy(to + done, to, (size_t)(done < bytes - done ? done : bytes - done));
}

/* Fill `count` elements of `size` bytes with the one at `from`. */
static void fill(char *to, const char *from, int64_t count, int64_t size)
{
#define FILL(T)                                     \
    {                                               \
        T value = *(const T *)from, *out = (T *)to; \
        for (int64_t i = 0; i < count; i++)         \
            out[i] = value;                         \
    }
    if (size == 1)
        FILL(uint8_t)
    else if (size == 2)
        FILL(uint16_t)
    else if (size == 4)
        FILL(uint32_t)
    else if (size == 8)
        FILL(uint64_t)
    else
        repeat(to, from, size, count * size);
#undef FILL
}

/* Lay out the elements from `first` on, for `count`; return where they are. They are whole rows, or
 * part of one. */
static char *spread(const int64_t *n, const int64_t *strides, int64_t size, const char *from, char *to,
                    int64_t first, int64_t count)
{
    int64_t last = n[NAXES] - 1, length = n[REST + last];
    int64_t at[CHAIN_MOST_AXES], number = first / length, column = first % length, offset = 0;
    int64_t step = count < length ? count : length;
    for (int64_t axis = last - 1; axis >= 0; axis--) {
        at[axis] = number % n[REST + axis];
        number /= n[REST + axis];
        offset += at[axis] * strides[axis];
    }
    if (strides[last] && count <= length)
        return (char *)from + (offset + column) * size;
    for (int64_t done = 0; done < count; done += step) {
        if (strides[last])
            memcpy(to + done * size, from + offset * size, (size_t)(step * size));
        else
            fill(to + done * size, from + offset * size, step, size);
        for (int64_t axis = last - 1; axis >= 0; axis--) {
            offset += strides[axis];
            if (++at[axis] < n[REST + axis])
                break;
            offset -= at[axis] * strides[axis];
            at[axis] = 0;
        }
    }
    return to;
}

/* How many elements the piece that begins at element `at` has, before `end`. */
static int64_t piece_at(const int64_t *n, int64_t at, int64_t end)
{
    int64_t length = n[REST + n[NAXES] - 1], rest = end - at;
    int64_t column = n[NAXES] == 1 ? 0 : at % length, most = n[PIECE];
    if (n[NAXES] > 1 && (column || length > most)) /* no further than this row */
        most = length - column < most ? length - column : most;
    else if (n[NAXES] > 1 && rest >= length) /* whole rows */
        rest -= rest % length;
    return rest < most ? rest : most;
}

static int chain(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    int64_t width = STRIDES + n[NAXES], length = n[REST + n[NAXES] - 1];
    const int64_t *values = n + REST + n[NAXES];
    const int64_t *links = values + n[NVALUES] * width;
    int64_t first = begin * n[UNIT], last = end * n[UNIT];
    char *base[CHAIN_MOST_VALUES], *now[CHAIN_MOST_VALUES], *operands[MOST_OPERANDS];
    if (last > n[ELEMENTS])
        last = n[ELEMENTS];
    if (first >= last)
        return 0;
    for (int64_t i = 0; i < n[NVALUES]; i++) {
        const int64_t *value = values + i * width;
        int64_t most = last - first < n[PIECE] ? last - first : n[PIECE];
        char *space = scratch + value[PLACE];
        base[i] = now[i] = value[KIND] == TEMPORARY ? space : p[value[PARAMETER]];
        if (value[KIND] != REPEATED)
            continue;
        now[i] = base[i] = space;
        if (!value[width - 1])
            fill(space, p[value[PARAMETER]], most, value[SIZE]);
        else if (length <= n[PIECE] && last - first > length - first % length)
            repeat(space, p[value[PARAMETER]], length * value[SIZE],
                   (most < length ? length : most) * value[SIZE]);
        else
            base[i] = p[value[PARAMETER]];
    }
    for (int64_t at = first, count; at < last; at += count) {
        count = piece_at(n, at, last);
        for (int64_t i = 0; i < n[NVALUES]; i++) {
            const int64_t *value = values + i * width, *strides = value + STRIDES;
            if (value[KIND] == WHOLE)
                now[i] = base[i] + at * value[SIZE];
            else if (value[KIND] == REPEATED && strides[n[NAXES] - 1])
                now[i] = base[i] + at % length * value[SIZE];
            else if (value[KIND] == SPREAD)
                now[i] = spread(n, strides, value[SIZE], base[i], scratch + value[PLACE], at, count);
        }
        const int64_t *link = links;
        for (int64_t i = 0; i < n[NLINKS]; i++) {
            for (int64_t k = 0; k < link[0]; k++)
                operands[k] = now[link[1 + k]];
            call->rows[i]->run(operands, count, call->floats);
            link += 1 + link[0];
        }
    }
    return 0;
}

KERNEL_TABLE(chain, KERNEL(row, row, NULL) KERNEL(chain, chain, NULL))
