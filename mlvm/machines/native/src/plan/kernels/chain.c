/* A chain of row functions on one shape, piece by piece, so that what passes between them stays in
 * the first-level cache. `row` is a single one on packed operands of the result's shape.
 *
 * A chain works on consecutive elements of its shape, which is seen as rows: the last axes that all
 * operands agree about are one. A piece is a few rows, or part of one. Row functions see packed
 * operands only: what has the chain's shape is read where it lies. Others are laid out for a piece,
 * a scalar or a single row once for all pieces. */
#include "../plan.h"

#include <string.h>

enum { MOST_VALUES = 128, MOST_AXES = 64, MOST_OPERANDS = 4 };

/* n: elements, elements a unit, the row function, bytes of an element of each parameter. */
static int row(const Plan *plan, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = plan->n;
    int64_t first = begin * n[1], last = end * n[1] < n[0] ? end * n[1] : n[0];
    char *operands[MOST_OPERANDS];
    for (int i = 0; i < plan->nparams; i++)
        operands[i] = p[i] + first * n[3 + i];
    ((RowFn)(intptr_t)n[2])(operands, last - first, plan->a);
    return 0;
}

typedef enum {
    WHOLE,     /* a parameter of the chain's shape */
    REPEATED,  /* one row, or a scalar: repeated in scratch memory for the rows of a piece */
    SPREAD,    /* any other parameter: laid out in scratch memory for each piece */
    TEMPORARY, /* what passes between links, in scratch memory */
} Kind;

/* A parameter or temporary, as it stands in n; the strides of its axes, in elements, follow. */
typedef struct {
    int64_t kind, parameter, size, scratch;
} Value;

/* n: as this struct, then the lengths of the axes, the last of which is the row; the values; the
 * links: each a row function, how many operands it has with its result, and which. */
typedef struct {
    int64_t elements, unit, piece, naxes, nvalues, nlinks, lengths[];
} Form;

enum { FORM = sizeof(Form) / sizeof(int64_t), VALUE = sizeof(Value) / sizeof(int64_t) };

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
#define FILL(T)                                                                          \
    {                                                                                    \
        T value = *(const T *)from, *out = (T *)to;                                      \
        for (int64_t i = 0; i < count; i++)                                              \
            out[i] = value;                                                              \
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
static char *spread(const Form *form, const int64_t *strides, int64_t size, const char *from,
                    char *to, int64_t first, int64_t count)
{
    int64_t last = form->naxes - 1, length = form->lengths[last];
    int64_t at[MOST_AXES], number = first / length, column = first % length, offset = 0;
    int64_t step = count < length ? count : length;
    for (int64_t axis = last - 1; axis >= 0; axis--) {
        at[axis] = number % form->lengths[axis];
        number /= form->lengths[axis];
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
            if (++at[axis] < form->lengths[axis])
                break;
            offset -= at[axis] * strides[axis];
            at[axis] = 0;
        }
    }
    return to;
}

/* How many elements the piece that begins at element `at` has, before `end`. */
static int64_t piece_at(const Form *form, int64_t at, int64_t end)
{
    int64_t length = form->lengths[form->naxes - 1], left = end - at;
    int64_t column = form->naxes == 1 ? 0 : at % length, most = form->piece;
    if (form->naxes > 1 && (column || length > most)) /* no further than this row */
        most = length - column < most ? length - column : most;
    else if (form->naxes > 1 && left >= length) /* whole rows */
        left -= left % length;
    return left < most ? left : most;
}

static int chain(const Plan *plan, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const Form *form = (const Form *)plan->n;
    int64_t width = VALUE + form->naxes, length = form->lengths[form->naxes - 1];
    const int64_t *values = plan->n + FORM + form->naxes;
    const int64_t *links = values + form->nvalues * width;
    int64_t first = begin * form->unit, last = end * form->unit;
    char *base[MOST_VALUES], *now[MOST_VALUES], *operands[MOST_OPERANDS];
    if (last > form->elements)
        last = form->elements;
    if (first >= last)
        return 0;
    for (int64_t i = 0; i < form->nvalues; i++) {
        const Value *value = (const Value *)(values + i * width);
        int64_t most = last - first < form->piece ? last - first : form->piece;
        char *space = scratch + value->scratch;
        base[i] = now[i] = value->kind == TEMPORARY ? space : p[value->parameter];
        if (value->kind != REPEATED)
            continue;
        now[i] = base[i] = space;
        if (!values[i * width + width - 1])
            fill(space, p[value->parameter], most, value->size);
        else if (length <= form->piece && last - first > length - first % length)
            repeat(space, p[value->parameter], length * value->size,
                   (most < length ? length : most) * value->size);
        else
            base[i] = p[value->parameter];
    }
    for (int64_t at = first, count; at < last; at += count) {
        count = piece_at(form, at, last);
        for (int64_t i = 0; i < form->nvalues; i++) {
            const Value *value = (const Value *)(values + i * width);
            const int64_t *strides = values + i * width + VALUE;
            if (value->kind == WHOLE)
                now[i] = base[i] + at * value->size;
            else if (value->kind == REPEATED && strides[form->naxes - 1])
                now[i] = base[i] + at % length * value->size;
            else if (value->kind == SPREAD)
                now[i] = spread(form, strides, value->size, base[i], scratch + value->scratch, at,
                                count);
        }
        const int64_t *link = links;
        for (int64_t i = 0; i < form->nlinks; i++) {
            for (int64_t k = 0; k < link[1]; k++)
                operands[k] = now[link[2 + k]];
            ((RowFn)(intptr_t)link[0])(operands, count, plan->a);
            link += 2 + link[1];
        }
    }
    return 0;
}

const KernelEntry TARGETED(chain_kernels)[] = {
    {"row", row, NULL}, {"chain", chain, NULL}, {NULL, NULL, NULL}};
