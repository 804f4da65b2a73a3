/* Gather and scatter by index tensors.
 *
 * Shapes are viewed as [before, length, behind], with the indexed axis in the middle. Every thread checks
 * all indices before it writes, so a call with an index out of range does not write. If a different VM that shares the
 * indices changes them afterwards, an index out of range counts as 0. Updates are added in order;
 * units divide the output. */
#include "../plan.h"
#include "elements.h"

#define EACH_INTEGER(X) \
    X(uint8_t, 1)       \
    X(uint16_t, 2) X(uint32_t, 4) X(uint64_t, 8) X(int8_t, -1) X(int16_t, -2) X(int32_t, -4) X(int64_t, -8)

/* Return whether all integers are in low .. high - 1. A loop over one dtype is several times faster. */
#define IN_RANGE(T, of_kind)                                                                \
    if (kind == of_kind) {                                                                  \
        T least_one = 0, largest = 0;                                                       \
        for (int64_t i = 0; i < count; i++) {                                               \
            const T at = ((const T *)x)[i];                                                 \
            least_one = at < least_one ? at : least_one;                                    \
            largest = at > largest ? at : largest;                                          \
        }                                                                                   \
        return !count || ((int64_t)least_one >= low && (uint64_t)largest < (uint64_t)high); \
    }
static int in_range(const char *x, int64_t kind, int64_t count, int64_t low, int64_t high)
{
    EACH_INTEGER(IN_RANGE)
    return 0;
}

/* The dtype and the length of each operand with indices follow. */
enum { indexing_integers(NAME) OPERANDS };

static inline int64_t within(int64_t index, int64_t length)
{
    index = index < 0 ? index + length : index;
    return index < 0 || index >= length ? 0 : index;
}

static inline int64_t place(const char *indices, int64_t kind, int64_t i, int64_t length)
{
    return within(integer_at(indices, kind, i), length);
}

/* --- weighted_take: out[b, i] is the sum of x[b, indices[b, i, k]] with weights; a unit is PIECE rows
 * of a b. ONE: the indices are the same for each b; UPDATES: how many are summed --- */

#define ADD_ROWS                                                                                         \
    switch (many) {                                                                                      \
    case 4:                                                                                              \
        for (int64_t c = 0; c < behind; c++)                                                             \
            out[c] = out[c] + w[0] * row[0][c] + w[1] * row[1][c] + w[2] * row[2][c] + w[3] * row[3][c]; \
        break;                                                                                           \
    case 3:                                                                                              \
        for (int64_t c = 0; c < behind; c++)                                                             \
            out[c] = out[c] + w[0] * row[0][c] + w[1] * row[1][c] + w[2] * row[2][c];                    \
        break;                                                                                           \
    case 2:                                                                                              \
        for (int64_t c = 0; c < behind; c++)                                                             \
            out[c] = out[c] + w[0] * row[0][c] + w[1] * row[1][c];                                       \
        break;                                                                                           \
    case 1:                                                                                              \
        for (int64_t c = 0; c < behind; c++)                                                             \
            out[c] = out[c] + w[0] * row[0][c];                                                          \
    }
#define WEIGHTED_TAKE(T, name)                                                                         \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)scratch;                                                                                 \
        const int64_t *n = call->ints, count = n[COUNT], length = n[LENGTH];                           \
        const int64_t behind = n[BEHIND], taps = n[UPDATES], kind = n[KIND];                           \
        const int64_t pieces = (count + n[PIECE] - 1) / n[PIECE];                                      \
        if (!in_range(p[2], kind, (n[ONE] ? 1 : n[BEFORE]) * count * taps, 0, length))                 \
            return 1;                                                                                  \
        for (int64_t unit = begin; unit < end && pieces && n[BEFORE]; unit++) {                        \
            const int64_t b = unit / pieces, first = unit % pieces * n[PIECE];                         \
            const int64_t at = n[ONE] ? 0 : b * count;                                                 \
            const T *x = (const T *)p[1] + b * length * behind;                                        \
            for (int64_t i = first; i < least(first + n[PIECE], count); i++) {                         \
                T *restrict out = (T *)p[0] + (b * count + i) * behind;                                \
                const T *weight = (const T *)p[3] + (at + i) * taps;                                   \
                int64_t k = 0;                                                                         \
                memset(out, 0, (size_t)behind * sizeof(T));                                            \
                while (k < taps) { /* several rows together */                                         \
                    const T *row[4];                                                                   \
                    T w[4];                                                                            \
                    int many = 0;                                                                      \
                    for (; k < taps && many < 4; k++)                                                  \
                        if (weight[k] != 0) {                                                          \
                            row[many] = x + place(p[2], kind, (at + i) * taps + k, length) * behind;   \
                            w[many++] = weight[k];                                                     \
                        }                                                                              \
                    ADD_ROWS                                                                           \
                }                                                                                      \
            }                                                                                          \
        }                                                                                              \
        return 0;                                                                                      \
    }
WEIGHTED_TAKE(float, weighted_take_f32)
WEIGHTED_TAKE(double, weighted_take_f64)

/* --- calls with single indices, as links --- */

/* Return an index from 0 on, or -1 if it is out of range. */
static inline int64_t index_at(const char *x, int64_t kind, int64_t length)
{
    const int64_t index = kind == -8 ? *(const volatile int64_t *)x : -1;
    if ((uint64_t)index < (uint64_t)length)
        return index;
    return in_range(x, kind, 1, -length, length) ? place(x, kind, 0, length) : -1;
}

static const Link *flat_index(const Link *link)
{
    const int64_t *n = link->ints, *axes = n + OPERANDS;
    int64_t flat = 0;
    for (int64_t axis = 0; axis < n[UPDATES]; axis++, axes += 2) {
        const int64_t index = index_at(link->at[1 + axis], axes[0], axes[1]);
        if (index < 0)
            return link;
        flat = flat * axes[1] + index;
    }
    *(int64_t *)link->at[0] = flat;
    return link[1].run(link + 1);
}

static int link_of_flat_index(const KernelCall *call, char *const *p, Link *link)
{
    *link = (Link){.run = flat_index, .ints = call->ints};
    memcpy(link->at, p, sizeof *p * (size_t)least(call->nparams, 4));
    return call->ints[COUNT] == 1 && call->nparams <= 4;
}

/* Copy rows from or to an index. A link with two indices of type i64 also does this for the next link, if the
 * indices are neither negative nor out of range. */
#define AT_INDEX(name, ...)                                                                \
    SPECIALIZED const Link *name##_at(const Link *link, int64_t index)                     \
    {                                                                                      \
        const int64_t *n = link->ints, behind = n[BEHIND];                                 \
        char *out = link->at[0], *in = link->at[1];                                        \
        (void)behind;                                                                      \
        __VA_ARGS__                                                                        \
        return link[1].run(link + 1);                                                      \
    }                                                                                      \
    static const Link *name(const Link *link)                                              \
    {                                                                                      \
        const int64_t index = index_at(link->at[2], link->ints[KIND], link->ints[LENGTH]); \
        return index < 0 ? link : name##_at(link, index);                                  \
    }                                                                                      \
    static const Link *name##_at_two(const Link *link)                                     \
    {                                                                                      \
        const uint64_t *axes = (const uint64_t *)link->ints + OPERANDS;                    \
        const uint64_t i = *(const volatile uint64_t *)link->at[1];                        \
        const uint64_t j = *(const volatile uint64_t *)link->at[2];                        \
        if (i >= axes[1] || j >= axes[3])                                                  \
            return flat_index(link);                                                       \
        const uint64_t flat = i * axes[3] + j;                                             \
        *(uint64_t *)link->at[0] = flat;                                                   \
        return name##_at(link + 1, (int64_t)flat);                                         \
    }
#define AT_INDEX_OF(size)                                                              \
    AT_INDEX(take_##size, *(Element##size *)out = ((const Element##size *)in)[index];) \
    AT_INDEX(set_##size, ((Element##size *)out)[index] = *(const Element##size *)in;)
AT_INDEX_OF(4)
AT_INDEX_OF(8)
AT_INDEX(take_run, copy_run(out, in + index * behind, behind);)
AT_INDEX(set_run, if (index + n[COUNT] > n[LENGTH]) return link; out += index * behind;
         if (out != in) copy_run(out, in, n[COUNT] * behind);)
static const LinkFn takes[][2] = {
    {take_run, take_run_at_two}, {take_4, take_4_at_two}, {take_8, take_8_at_two}};
static const LinkFn sets[][2] = {{set_run, set_run_at_two}, {set_4, set_4_at_two}, {set_8, set_8_at_two}};

static int link_at_index(const KernelCall *call, char *out, char *in, char *indices,
                         const LinkFn (*runs)[2], Link *link)
{
    const int64_t *n = call->ints;
    if (n[BEFORE] != 1)
        return 0;
    const int64_t nbytes = n[COUNT] == 1 ? n[BEHIND] : 0;
    const LinkFn *run = runs[nbytes == 8 ? 2 : nbytes == 4];
    *link = (Link){.run = run[0], .at = {out, in, indices}, .ints = n};
    const int64_t *before = link[-1].run == flat_index && link[-1].at[0] == indices ? link[-1].ints : NULL;
    const int64_t *axes = before && before[UPDATES] == 2 ? before + OPERANDS : NULL;
    if (axes && axes[0] == -8 && axes[2] == -8 && axes[1] * axes[3] == n[LENGTH])
        link[-1].run = run[1];
    return 1;
}

static int link_of_take(const KernelCall *call, char *const *p, Link *link)
{
    return call->ints[COUNT] == 1 && link_at_index(call, p[0], p[1], p[2], takes, link);
}

/* A link must write in place, and its values must have the shape of the rows. */
static int link_of_set(const KernelCall *call, char *const *p, Link *link)
{
    return !call->ints[SIZE] && p[0] == p[1] && link_at_index(call, p[0], p[2], p[3], sets, link);
}

static int link_of_index_set(const KernelCall *call, char *const *p, Link *link)
{
    return call->ints[COUNT] == 1 && link_of_set(call, p, link);
}

/* Check and convert a chunk of indices. */
enum { CHUNK = 256 };

#define PLACES(T, of_kind)                  \
    if (kind == of_kind)                    \
        for (int64_t i = 0; i < count; i++) \
            at[i] = within((int64_t)((const T *)x)[first + i], length);
static void places(int64_t at[CHUNK], const char *x, int64_t kind, int64_t first, int64_t count,
                   int64_t length)
{
    EACH_INTEGER(PLACES)
}

/* --- take: out[b, i, :] = x[b, indices[i], :], of BEHIND bytes; a unit is PIECE rows (b, i) --- */

#define TAKE(size)                                                            \
    if (behind == size)                                                       \
        for (int64_t k = 0; k < rows; k++)                                    \
            ((Element##size *)out)[k] = ((const Element##size *)in)[from[k]]; \
    else
/* Check and convert a single index. */
#define TAKE_ONE(size)                                                                \
    if (behind == size)                                                               \
        for (; row < last; row++)                                                     \
            ((Element##size *)p[0])[row] = ((const Element##size *)in)[row * length]; \
    else
static int take(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, count = n[COUNT], length = n[LENGTH], behind = n[BEHIND];
    if (!in_range(p[2], n[KIND], count, -length, length))
        return 1;
    int64_t at[CHUNK], chunk = -1, rows = 0;
    int64_t row = begin * n[PIECE], last = least(end * n[PIECE], n[BEFORE] * count);
    if (count == 1) {
        const char *in = p[1] + place(p[2], n[KIND], 0, length) * behind;
        TAKE_ONE(1)
        TAKE_ONE(2)
        TAKE_ONE(4)
        TAKE_ONE(8)
        for (; row < last; row++)
            copy_run(p[0] + row * behind, in + row * length * behind, behind);
        return 0;
    }
    for (; row < last; row += rows) {
        const int64_t i = row % count, first = i - i % CHUNK, filled = least(CHUNK, count - first);
        if (first != chunk)
            places(at, p[2], n[KIND], chunk = first, filled, length);
        const char *in = p[1] + row / count * length * behind;
        char *out = p[0] + row * behind;
        const int64_t *from = at + (i - first);
        rows = least(first + filled - i, last - row);
        TAKE(1)
        TAKE(2)
        TAKE(4)
        TAKE(8)
        for (int64_t k = 0; k < rows; k++)
            copy_run(out + k * behind, in + from[k] * behind, behind);
    }
    return 0;
}

/* --- dynamic_update: x with `count` rows from an index on replaced; a unit is a row of `before`.
 * Where out is x, only these are written --- */

static int update_rows(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, length = n[LENGTH], behind = n[BEHIND];
    if (!in_range(p[3], n[KIND], 1, -length, length))
        return 1;
    int64_t first = place(p[3], n[KIND], 0, length), rest = length - first - n[COUNT];
    if (rest < 0)
        return 1;
    for (int64_t b = begin; b < least(end, n[BEFORE]); b++) {
        char *out = p[0] + b * length * behind;
        const char *x = p[1] + b * length * behind, *rows = p[2] + b * n[COUNT] * behind;
        if (out != x) {
            copy_run(out, x, first * behind);
            copy_run(out + (length - rest) * behind, x + (length - rest) * behind, rest * behind);
        }
        if (out + first * behind != rows)
            copy_run(out + first * behind, rows, n[COUNT] * behind);
    }
    return 0;
}

/* --- flat_indices: COUNT positions, PIECE per unit, from indices along UPDATES axes --- */

static int flat_indices(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, *axes = n + OPERANDS;
    for (int64_t axis = 0; axis < n[UPDATES]; axis++)
        if (!in_range(p[1 + axis], axes[2 * axis], n[COUNT], -axes[2 * axis + 1], axes[2 * axis + 1]))
            return 1;
    int64_t last = least(end * n[PIECE], n[COUNT]), at[CHUNK];
    for (int64_t i = begin * n[PIECE]; i < last; i += CHUNK) {
        int64_t *out = (int64_t *)p[0] + i, filled = least(CHUNK, last - i);
        memset(out, 0, (size_t)filled * sizeof *out);
        for (int64_t axis = 0; axis < n[UPDATES]; axis++) {
            const int64_t kind = axes[2 * axis], length = axes[2 * axis + 1];
            places(at, p[1 + axis], kind, i, filled, length);
            for (int64_t k = 0; k < filled; k++)
                out[k] = out[k] * length + at[k];
        }
    }
    return 0;
}

/* --- take_along_axis: out[b, i, c] = x[b, indices[b, i, c], c]; units are as above --- */

#define TAKE_ALONG(size)                                                                                   \
    static int take_along_##size(const KernelCall *call, char *const *p, int64_t begin, int64_t end,       \
                                 char *scratch)                                                            \
    {                                                                                                      \
        (void)scratch;                                                                                     \
        const int64_t *n = call->ints, count = n[COUNT], length = n[LENGTH], behind = n[BEHIND];           \
        const int64_t rows = n[BEFORE] * count;                                                            \
        if (!in_range(p[2], n[KIND], rows * behind, -length, length))                                      \
            return 1;                                                                                      \
        int64_t row = least(begin * n[PIECE], rows), last = least(end * n[PIECE], rows);                   \
        int64_t at[CHUNK], i = row ? row % count : 0, c = 0;                                               \
        Element##size *out = (Element##size *)p[0];                                                        \
        const Element##size *in = (const Element##size *)p[1] + (row ? row / count : 0) * length * behind; \
        for (int64_t e = row * behind; e < last * behind; e += CHUNK) {                                    \
            int64_t filled = least(CHUNK, last * behind - e);                                              \
            places(at, p[2], n[KIND], e, filled, length);                                                  \
            for (int64_t k = 0; k < filled; k++) {                                                         \
                out[e + k] = in[at[k] * behind + c];                                                       \
                if (++c == behind) {                                                                       \
                    c = 0;                                                                                 \
                    if (++i == count) {                                                                    \
                        i = 0;                                                                             \
                        in += length * behind;                                                             \
                    }                                                                                      \
                }                                                                                          \
            }                                                                                              \
        }                                                                                                  \
        return 0;                                                                                          \
    }
TAKE_ALONG(1)
TAKE_ALONG(2)
TAKE_ALONG(4)
TAKE_ALONG(8)

/* --- scatter_add: out[b, indices[i], c] += updates[b, i, c]; a unit is `piece` columns of a b;
 * index_add adds them to an operand --- */

/* Add the updates for one b and the columns first .. last - 1. `p` has the updates before the indices.
 * They are added to `x`, or to zeros if it is NULL. */
typedef void (*ColumnsFn)(const int64_t *n, char *const *p, const char *x, int64_t b, int64_t first,
                          int64_t last);

static int for_columns(const KernelCall *call, char *const *p, const char *x, int64_t begin, int64_t end,
                       int64_t indices, ColumnsFn add)
{
    const int64_t *n = call->ints, pieces = (n[BEHIND] + n[PIECE] - 1) / n[PIECE];
    if (!in_range(p[2], n[KIND], indices, -n[LENGTH], n[LENGTH]))
        return 1;
    end = least(end, n[BEFORE] * pieces);
    while (begin < end) {
        int64_t b = begin / pieces, piece = begin % pieces;
        int64_t stop = least(pieces, piece + end - begin);
        add(n, p, x, b, piece * n[PIECE], least(stop * n[PIECE], n[BEHIND]));
        begin += stop - piece;
    }
    return 0;
}

/* Define a kernel that calls `add` for columns; `updates` is the number of the parameter with the updates. */
#define BY_COLUMNS(name, add, updates, x, indices)                                                     \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)scratch;                                                                                 \
        const int64_t *n = call->ints;                                                                 \
        char *const q[3] = {p[0], p[updates], p[updates + 1]};                                         \
        return for_columns(call, q, x, begin, end, indices, add);                                      \
    }

#define SCATTER(T, suffix)                                                                               \
    static inline void start_##suffix(T *out, const T *x, const int64_t *n, int64_t first, int64_t last) \
    {                                                                                                    \
        const int64_t whole = last - first == n[BEHIND];                                                 \
        const int64_t rows = x == out ? 0 : whole ? 1 : n[LENGTH];                                       \
        const int64_t width = whole ? n[LENGTH] * n[BEHIND] : last - first;                              \
        for (int64_t i = 0; i < rows; i++) {                                                             \
            int64_t at = i * n[BEHIND] + first;                                                          \
            if (x)                                                                                       \
                memcpy(out + at, x + at, (size_t)width * sizeof(T));                                     \
            else                                                                                         \
                memset(out + at, 0, (size_t)width * sizeof(T));                                          \
        }                                                                                                \
    }                                                                                                    \
    static inline void add_##suffix(T *out, const T *in, int64_t count)                                  \
    {                                                                                                    \
        INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                                  \
            out[c] += in[c];                                                                             \
    }                                                                                                    \
    static void add_rows_##suffix(const int64_t *n, char *const *p, const char *x, int64_t b,            \
                                  int64_t first, int64_t last)                                           \
    {                                                                                                    \
        const int64_t count = n[COUNT], behind = n[BEHIND];                                              \
        const T *in = (const T *)p[1] + b * count * behind;                                              \
        const int64_t at_b = b * n[LENGTH] * behind;                                                     \
        T *out = (T *)p[0] + at_b;                                                                       \
        start_##suffix(out, x ? (const T *)x + at_b : NULL, n, first, last);                             \
        for (int64_t i = 0; i < count; i += CHUNK) {                                                     \
            int64_t at[CHUNK], filled = least(CHUNK, count - i);                                         \
            places(at, p[2], n[KIND], i, filled, n[LENGTH]);                                             \
            if (behind == 1)                                                                             \
                for (int64_t k = 0; k < filled; k++)                                                     \
                    out[at[k]] += in[i + k];                                                             \
            else                                                                                         \
                for (int64_t k = 0; k < filled; k++)                                                     \
                    add_##suffix(out + at[k] * behind + first, in + (i + k) * behind + first,            \
                                 last - first);                                                          \
        }                                                                                                \
    }                                                                                                    \
    BY_COLUMNS(scatter_add_##suffix, add_rows_##suffix, 1, NULL, n[COUNT])                               \
    BY_COLUMNS(index_add_##suffix, add_rows_##suffix, 2, p[1], n[COUNT])                                 \
    /* With all columns, the elements of all rows are contiguous: one run. */                            \
    static void add_along_##suffix(const int64_t *n, char *const *p, const char *x, int64_t b,           \
                                   int64_t first, int64_t last)                                          \
    {                                                                                                    \
        const int64_t count = n[COUNT], behind = n[BEHIND], whole = last - first == behind;              \
        const int64_t runs = whole ? 1 : count, width = whole ? count * behind : last - first;           \
        T *out = (T *)p[0] + b * n[LENGTH] * behind;                                                     \
        start_##suffix(out, (const T *)x, n, first, last);                                               \
        for (int64_t run = 0; run < runs; run++) {                                                       \
            int64_t from = (b * count + run) * behind + first, c = first;                                \
            for (int64_t e = 0; e < width; e += CHUNK) {                                                 \
                int64_t at[CHUNK], filled = least(CHUNK, width - e);                                     \
                const T *in = (const T *)p[1] + from + e;                                                \
                places(at, p[2], n[KIND], from + e, filled, n[LENGTH]);                                  \
                for (int64_t k = 0; k < filled; k++) {                                                   \
                    out[at[k] * behind + c] += in[k];                                                    \
                    c = c + 1 < behind ? c + 1 : 0;                                                      \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
    }                                                                                                    \
    BY_COLUMNS(scatter_along_##suffix, add_along_##suffix, 1, NULL, n[BEFORE] * n[COUNT] * n[BEHIND])
SCATTER(uint8_t, 1)
SCATTER(uint16_t, 2)
SCATTER(uint32_t, 4)
SCATTER(uint64_t, 8)
SCATTER(float, f32)
SCATTER(double, f64)

/* --- index_reduce: rows of an operand are combined with the updates for them; BY says how --- */

#define REDUCED(T, U, suffix)                                                                              \
    static inline void reduce_##suffix(T *out, const T *in, int64_t count, int64_t by)                     \
    {                                                                                                      \
        if (by == MULTIPLY)                                                                                \
            INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                                \
                out[c] = (T)(out[c] * in[c]);                                                              \
        else if (by == MINIMUM)                                                                            \
            INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                                \
                out[c] = out[c] < in[c] || out[c] != out[c] ? out[c] : in[c];                              \
        else                                                                                               \
            INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                                \
                out[c] = out[c] > in[c] || out[c] != out[c] ? out[c] : in[c];                              \
    }                                                                                                      \
    static void reduce_rows_##suffix(const int64_t *n, char *const *p, const char *x, int64_t b,           \
                                     int64_t first, int64_t last)                                          \
    {                                                                                                      \
        const int64_t count = n[COUNT], behind = n[BEHIND];                                                \
        const T *in = (const T *)p[1];                                                                     \
        T *out = (T *)p[0];                                                                                \
        (void)b;                                                                                           \
        start_##U((void *)out, (const void *)x, n, first, last);                                           \
        for (int64_t i = 0; i < count; i += CHUNK) {                                                       \
            int64_t at[CHUNK], filled = least(CHUNK, count - i);                                           \
            places(at, p[2], n[KIND], i, filled, n[LENGTH]);                                               \
            for (int64_t k = 0; k < filled; k++)                                                           \
                reduce_##suffix(out + at[k] * behind + first, in + (i + k) * behind + first, last - first, \
                                n[BY]);                                                                    \
        }                                                                                                  \
    }                                                                                                      \
    BY_COLUMNS(index_reduce_##suffix, reduce_rows_##suffix, 2, p[1], n[COUNT])
/* clang-format off */
#define EACH_NUMBER(X)                                                                   \
    X(uint8_t, 1, u8) X(uint16_t, 2, u16) X(uint32_t, 4, u32) X(uint64_t, 8, u64)        \
    X(int8_t, 1, i8) X(int16_t, 2, i16) X(int32_t, 4, i32) X(int64_t, 8, i64)            \
    X(float, f32, f32) X(double, f64, f64)
/* clang-format on */
EACH_NUMBER(REDUCED)

/* --- index_set: replace rows of an operand by values; a unit is as above, PIECE and BEHIND are in bytes. STEP_BEFORE,
 * STEP_COUNT: distance between the values of two b, and of two indices, or 0. SIZE: bytes of a single value that fills
 * a row, or 0 --- */

static void set_rows(const int64_t *n, char *const *p, const char *x, int64_t b, int64_t first,
                     int64_t last)
{
    const int64_t count = n[COUNT], behind = n[BEHIND], size = n[SIZE], at_b = b * n[LENGTH] * behind;
    char *out = p[0] + at_b;
    start_1((uint8_t *)out, (const uint8_t *)x + at_b, n, first, last);
    out += first;
    const char *in = p[1] + b * n[STEP_BEFORE] + (size ? 0 : first);
    for (int64_t i = 0; i < count; i += CHUNK) {
        int64_t at[CHUNK], filled = least(CHUNK, count - i);
        places(at, p[2], n[KIND], i, filled, n[LENGTH]);
        for (int64_t k = 0; k < filled; k++, in += n[STEP_COUNT]) {
            char *to = out + at[k] * behind;
            int64_t done = size ? size : last - first;
            copy_run(to, in, done);
            for (; done < last - first; done *= 2) /* one value: double the part that is filled */
                copy_run(to + done, to, least(done, last - first - done));
        }
    }
}

BY_COLUMNS(set_columns, set_rows, 2, p[1], n[COUNT])

/* Set the elements of a column in place, for rows of a single element. */
#define SET_ONE(size)                                                                 \
    if (n[BEHIND] == size) {                                                          \
        Element##size *out = (Element##size *)p[0] + place(p[3], n[KIND], 0, length); \
        for (int64_t b = begin; b < least(end, n[BEFORE]); b++)                       \
            out[b * length] = *(const Element##size *)(p[2] + b * n[STEP_BEFORE]);    \
        return 0;                                                                     \
    }
static int index_set(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, length = n[LENGTH];
    if (n[COUNT] == 1 && p[0] == p[1] && n[BEHIND] <= n[PIECE] &&
        in_range(p[3], n[KIND], 1, -length, length)) {
        SET_ONE(4)
        SET_ONE(8)
    }
    return set_columns(call, p, begin, end, scratch);
}

/* --- one_hot: COUNT rows of LENGTH classes, PIECE per unit --- */

static int one_hot(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, size = n[SIZE], width = n[LENGTH] * size;
    int64_t first = begin * n[PIECE], last = least(end * n[PIECE], n[COUNT]);
    if (!in_range(p[1], n[KIND], n[COUNT], 0, n[LENGTH]))
        return 1;
    if (first < last)
        memset(p[0] + first * width, 0, (size_t)((last - first) * width));
    for (int64_t i = first; i < last; i++)
        memcpy(p[0] + i * width + place(p[1], n[KIND], i, n[LENGTH]) * size, &n[ONE], (size_t)size);
    return 0;
}

/* --- mask_scatter, mask_set: COUNT elements, PIECE of them a unit, UPDATES of BEHIND bytes for those where
 * the mask is True; all other elements are 0, or come from an operand --- */

/* Single elements, without branches, which would be unpredictable. */
#define MASKED(size)                                                                                   \
    if (width == size && updates) {                                                                    \
        const Element##size *from = (const Element##size *)in, *others = (const Element##size *)rest;  \
        for (int64_t i = 0, j = 0; i < count; i++) {                                                   \
            const Element##size here = (Element##size) - (mask[i] != 0), other = rest ? others[i] : 0; \
            ((Element##size *)out)[i] = (from[j < updates ? j : updates - 1] & here) |                 \
                                        (other & (Element##size) ~here);                               \
            j += mask[i] != 0;                                                                         \
        }                                                                                              \
        return 0;                                                                                      \
    }
static int masked(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, width = n[BEHIND], sets = call->nparams == 4;
    int64_t first = least(begin * n[PIECE], n[COUNT]), count = least(end * n[PIECE], n[COUNT]) - first;
    const char *mask = p[2 + sets] + first, *rest = sets ? p[1] + first * width : NULL;
    int64_t before = count_true(mask - first, first), updates = n[UPDATES] - before;
    if (count_true(mask, n[COUNT] - first) != updates)
        return 1;
    const char *in = p[1 + sets] + before * width;
    char *out = p[0] + first * width;
    MASKED(1)
    MASKED(2)
    MASKED(4)
    MASKED(8)
    for (int64_t i = 0; i < count; i++)
        if (mask[i] && updates) {
            copy_run(out + i * width, in, width);
            in += width;
            updates--;
        } else if (!rest) {
            memset(out + i * width, 0, (size_t)width);
        } else if (rest != out) {
            copy_run(out + i * width, rest + i * width, width);
        }
    return 0;
}

/* --- boolean_index: the rows of BEHIND bytes where the mask, which must not change, is True; units as above --- */

static int boolean_index(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, width = n[BEHIND];
    int64_t first = least(begin * n[PIECE], n[COUNT]), count = least(end * n[PIECE], n[COUNT]) - first;
    const char *mask = p[2] + first;
    copy_chosen(p[0] + count_true(p[2], first) * width, p[1] + first * width, mask, count,
                count_true(mask, count), width);
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
#define SIZED(size) ENTRY(take_along_##size)
/* clang-format off */
#define TYPED(suffix)                                                                    \
    ENTRY(scatter_add_##suffix) ENTRY(index_add_##suffix) ENTRY(scatter_along_##suffix)
#define ENTRY_REDUCED(T, U, suffix) ENTRY(index_reduce_##suffix)
KERNEL_TABLE(indexing, LINKED_KERNEL(update_rows, link_of_set) ENTRY(weighted_take_f32)
                           ENTRY(weighted_take_f64) LINKED_KERNEL(take, link_of_take) SIZED(1) SIZED(2) SIZED(4) SIZED(8) TYPED(1)
                           TYPED(2) TYPED(4) TYPED(8) TYPED(f32) TYPED(f64) ENTRY(one_hot)
                               ENTRY(masked) ENTRY(boolean_index) LINKED_KERNEL(index_set, link_of_index_set) LINKED_KERNEL(flat_indices, link_of_flat_index) EACH_NUMBER(ENTRY_REDUCED))
/* clang-format on */
