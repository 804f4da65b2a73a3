/* Move elements to a different order or position.
 *
 * Most ops are copies of boxes: elements at equal distances along each axis, in the result and in
 * an operand. `mlvm/machines/native/boxes.py` brings an op into this form. The three innermost axes
 * of a box are planes, rows and columns; they are cut into tiles, and a tile is a unit. Distances
 * are in bytes. A value that fills a box is an operand with one element, at distances 0. */
#include "../plan.h"
#include "elements.h"

/* For each axis around a tile, the length and two strides follow. */
enum { layout_integers(NAME) AXES };
enum { MOST_AXES = 67 };

/* Copy a plane's part of a tile. The first operand is at the distance `apart` from the result. */
typedef void (*PlaneFn)(char *out, const char *in, int64_t apart, int64_t rows, int64_t columns,
                        const int64_t *n);

/* Call `copy` for the planes of the tiles begin .. end - 1. */
static inline int walk(const KernelCall *call, char *const *p, int64_t begin, int64_t end, PlaneFn copy)
{
    const int64_t *n = call->ints, *axes = n + AXES;
    const int naxes = (int)n[NAXES];
    const int64_t apart = (int64_t)((intptr_t)p[1] - (intptr_t)p[0]);
    int64_t at[MOST_AXES + 1], rest = begin;
    char *out = p[0] + n[OUT_AT];
    const char *in = (n[READS] ? p[n[READS]] : (const char *)&n[VALUE]) + n[IN_AT];
    for (int i = naxes - 1; i >= 0; i--) {
        const int64_t *axis = axes + 3 * i;
        at[i] = rest ? rest % axis[0] : 0;
        rest = rest ? rest / axis[0] : 0;
        out += at[i] * axis[1];
        in += at[i] * axis[2];
    }
    at[naxes] = 0;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t planes = n[PLANES] - at[n[AXIS_OF_PLANES]] * n[TILE_PLANES];
        int64_t rows = n[ROWS] - at[n[AXIS_OF_ROWS]] * n[TILE_ROWS];
        int64_t columns = n[COLUMNS] - at[n[AXIS_OF_COLUMNS]] * n[TILE_COLUMNS];
        planes = least(n[TILE_PLANES], planes);
        rows = least(n[TILE_ROWS], rows);
        columns = least(n[TILE_COLUMNS], columns);
        for (int64_t i = 0; i < planes; i++)
            copy(out + i * n[OUT_PLANE], in + i * n[IN_PLANE], apart, rows, columns, n);
        for (int i = naxes - 1; i >= 0; i--) {
            const int64_t *axis = axes + 3 * i;
            out += axis[1];
            in += axis[2];
            if (++at[i] < axis[0])
                break;
            at[i] = 0;
            out -= axis[0] * axis[1];
            in -= axis[0] * axis[2];
        }
    }
    return 0;
}

#define BOX(name, copy)                                                                                \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)scratch;                                                                                 \
        return walk(call, p, begin, end, copy);                                                        \
    }

/* --- rows of contiguous elements; a column is a byte --- */

static inline void copy_rows(char *out, const char *in, int64_t apart, int64_t rows, int64_t columns,
                             const int64_t *n)
{
    (void)apart;
    for (int64_t i = 0; i < rows; i++)
        copy_run(out + i * n[OUT_ROW], in + i * n[IN_ROW], columns);
}
BOX(box_rows, copy_rows)

/* --- elements one by one --- */

#define EACH(size)                                                                                    \
    static inline void copy_##size(Element##size *out, const char *in, int64_t count, int64_t step)   \
    {                                                                                                 \
        for (int64_t j = 0; j < count; j++)                                                           \
            out[j] = *(const Element##size *)(in + j * step);                                         \
    }                                                                                                 \
    static inline void copy_each_##size(char *out, const char *in, int64_t apart, int64_t rows,       \
                                        int64_t columns, const int64_t *n)                            \
    {                                                                                                 \
        (void)apart;                                                                                  \
        const int64_t out_step = n[OUT_COLUMN], step = n[IN_COLUMN];                                  \
        for (int64_t i = 0; i < rows; i++, out += n[OUT_ROW], in += n[IN_ROW]) {                      \
            if (out_step == size && !step)                                                            \
                fill_##size((Element##size *)out, *(const Element##size *)in, columns);               \
            else if (out_step == size && step == size)                                                \
                copy_##size((Element##size *)out, in, columns, size);                                 \
            else if (out_step == size && step == -size)                                               \
                copy_##size((Element##size *)out, in, columns, -size);                                \
            else if (out_step == size && step == 2 * size)                                            \
                copy_##size((Element##size *)out, in, columns, 2 * size);                             \
            else                                                                                      \
                for (int64_t j = 0; j < columns; j++)                                                 \
                    *(Element##size *)(out + j * out_step) = *(const Element##size *)(in + j * step); \
        }                                                                                             \
    }                                                                                                 \
    BOX(box_each_##size, copy_each_##size)
EACH(1)
EACH(2)
EACH(4)
EACH(8)

/* --- the rest of an operand with the result's shape; no work if it is the result --- */

#define REST(size)                                                                                 \
    static int box_rest_##size(const KernelCall *call, char *const *p, int64_t begin, int64_t end, \
                               char *scratch)                                                      \
    {                                                                                              \
        (void)scratch;                                                                             \
        return p[1] == p[0] ? 0 : walk(call, p, begin, end, copy_each_##size);                     \
    }
REST(1)
REST(2)
REST(4)
REST(8)

/* --- elements added to those of an operand of the result's shape --- */

#define ADD(T, suffix)                                                                      \
    static inline void add_##suffix(char *out, const char *in, int64_t apart, int64_t rows, \
                                    int64_t columns, const int64_t *n)                      \
    {                                                                                       \
        const int64_t step = n[OUT_COLUMN], in_step = n[IN_COLUMN], size = sizeof(T);       \
        for (int64_t i = 0; i < rows; i++) {                                                \
            if (step == size && in_step == size) {                                          \
                T *to = (T *)out;                                                           \
                const T *x = (const T *)(out + apart), *y = (const T *)in;                  \
                INDEPENDENT_FOR (int64_t j = 0; j < columns; j++)                           \
                    to[j] = (T)(x[j] + y[j]);                                               \
            } else {                                                                        \
                for (int64_t j = 0; j < columns; j++)                                       \
                    *(T *)(out + j * step) = (T)(*(const T *)(out + apart + j * step) +     \
                                                 *(const T *)(in + j * in_step));           \
            }                                                                               \
            out += n[OUT_ROW];                                                              \
            in += n[IN_ROW];                                                                \
        }                                                                                   \
    }                                                                                       \
    BOX(box_add_##suffix, add_##suffix)
ADD(uint8_t, 1)
ADD(uint16_t, 2)
ADD(uint32_t, 4)
ADD(uint64_t, 8)
ADD(float, f32)
ADD(double, f64)

/* --- transposed matrices: the operand's columns are contiguous --- */

/* A block has 16 bytes of as many columns of the operand as a register has elements. LOW and HIGH
 * interleave the first and the last halves of two columns. A register of 32 bytes works as two of
 * 16, for two blocks side by side. */
#if defined(__AVX2__)
#include <immintrin.h>
enum { VECTOR = 32 };
typedef __m256i Vector1, Vector2, Vector4, Vector8;
#define LOAD(x, half, other) x = _mm256_loadu2_m128i((const __m128i *)(other), (const __m128i *)(half))
#define STORE(out, x) _mm256_storeu_si256((__m256i *)(out), x)
#define LOW1 _mm256_unpacklo_epi8
#define LOW2 _mm256_unpacklo_epi16
#define LOW4 _mm256_unpacklo_epi32
#define LOW8 _mm256_unpacklo_epi64
#define HIGH1 _mm256_unpackhi_epi8
#define HIGH2 _mm256_unpackhi_epi16
#define HIGH4 _mm256_unpackhi_epi32
#define HIGH8 _mm256_unpackhi_epi64
#elif defined(__clang__) || (defined(__GNUC__) && __GNUC__ >= 12)
enum { VECTOR = 16 };
typedef uint8_t Vector1 __attribute__((vector_size(16)));
typedef uint16_t Vector2 __attribute__((vector_size(16)));
typedef uint32_t Vector4 __attribute__((vector_size(16)));
typedef uint64_t Vector8 __attribute__((vector_size(16)));
#define LOAD(x, half, other) memcpy(&x, half, 16)
#define STORE(out, x) memcpy(out, &x, 16)
#define SHUFFLE __builtin_shufflevector
#define LOW1(x, y) SHUFFLE(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define LOW2(x, y) SHUFFLE(x, y, 0, 8, 1, 9, 2, 10, 3, 11)
#define LOW4(x, y) SHUFFLE(x, y, 0, 4, 1, 5)
#define LOW8(x, y) SHUFFLE(x, y, 0, 2)
#define HIGH1(x, y) SHUFFLE(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define HIGH2(x, y) SHUFFLE(x, y, 4, 12, 5, 13, 6, 14, 7, 15)
#define HIGH4(x, y) SHUFFLE(x, y, 2, 6, 3, 7)
#define HIGH8(x, y) SHUFFLE(x, y, 1, 3)
#else
enum { VECTOR = 0 };
#endif

#if defined(LOW1)
/* Interleave the first half of the registers with the second until each holds a row. */
#define BLOCK(size)                                                                                \
    enum { ROWS##size = 16 / size, COLUMNS##size = VECTOR / size };                                \
    static inline void block_##size(char *out, const char *in, int64_t out_row, int64_t in_column) \
    {                                                                                              \
        Vector##size x[ROWS##size], y[ROWS##size];                                                 \
        for (int i = 0; i < ROWS##size; i++)                                                       \
            LOAD(x[i], in + i * in_column, in + (i + ROWS##size) * in_column);                     \
        for (int step = 1; step < ROWS##size; step *= 2) {                                         \
            for (int i = 0; i < ROWS##size / 2; i++) {                                             \
                y[2 * i] = LOW##size(x[i], x[i + ROWS##size / 2]);                                 \
                y[2 * i + 1] = HIGH##size(x[i], x[i + ROWS##size / 2]);                            \
            }                                                                                      \
            for (int i = 0; i < ROWS##size; i++)                                                   \
                x[i] = y[i];                                                                       \
        }                                                                                          \
        for (int i = 0; i < ROWS##size; i++)                                                       \
            STORE(out + i * out_row, x[i]);                                                        \
    }
#else
#define BLOCK(size)                                                                                \
    enum { ROWS##size = 8, COLUMNS##size = 8 };                                                    \
    static inline void block_##size(char *out, const char *in, int64_t out_row, int64_t in_column) \
    {                                                                                              \
        for (int i = 0; i < ROWS##size; i++)                                                       \
            for (int j = 0; j < COLUMNS##size; j++)                                                \
                memcpy(out + i * out_row + j * size, in + j * in_column + i * size, size);         \
    }
#endif

/* Transpose squares of whole cache lines: by blocks, or element by element at the end. */
#define TRANSPOSE(size)                                                                                  \
    BLOCK(size)                                                                                          \
    enum { SIDE##size = 64 / size };                                                                     \
    static inline void square_##size(char *out, const char *in, int64_t out_row, int64_t in_column)      \
    {                                                                                                    \
        for (int i = 0; i < SIDE##size; i += ROWS##size)                                                 \
            for (int j = 0; j < SIDE##size; j += COLUMNS##size)                                          \
                block_##size(out + i * out_row + j * size, in + j * in_column + i * size, out_row,       \
                             in_column);                                                                 \
    }                                                                                                    \
    static void corner_##size(char *out, const char *in, int64_t rows, int64_t columns, int64_t out_row, \
                              int64_t in_column)                                                         \
    {                                                                                                    \
        int64_t i = 0, j = 0;                                                                            \
        for (; i + ROWS##size <= rows; i += ROWS##size)                                                  \
            for (j = 0; j + COLUMNS##size <= columns; j += COLUMNS##size)                                \
                block_##size(out + i * out_row + j * size, in + j * in_column + i * size, out_row,       \
                             in_column);                                                                 \
        for (int64_t k = 0; k < rows; k++)                                                               \
            for (int64_t l = k < i ? j : 0; l < columns; l++)                                            \
                memcpy(out + k * out_row + l * size, in + l * in_column + k * size, size);               \
    }                                                                                                    \
    static inline void transpose_##size(char *out, const char *in, int64_t apart, int64_t rows,          \
                                        int64_t columns, const int64_t *n)                               \
    {                                                                                                    \
        (void)apart;                                                                                     \
        const int64_t out_row = n[OUT_ROW], in_column = n[IN_COLUMN];                                    \
        for (int64_t i = 0; i < rows; i += SIDE##size)                                                   \
            for (int64_t j = 0; j < columns; j += SIDE##size) {                                          \
                char *to = out + i * out_row + j * size;                                                 \
                const char *from = in + j * in_column + i * size;                                        \
                if (rows - i >= SIDE##size && columns - j >= SIDE##size)                                 \
                    square_##size(to, from, out_row, in_column);                                         \
                else                                                                                     \
                    corner_##size(to, from, least(rows - i, SIDE##size), least(columns - j, SIDE##size), \
                                  out_row, in_column);                                                   \
            }                                                                                            \
    }                                                                                                    \
    BOX(box_transpose_##size, transpose_##size)
TRANSPOSE(1)
TRANSPOSE(2)
TRANSPOSE(4)
TRANSPOSE(8)

/* --- copies of contiguous memory and of boxes --- */

static int copy(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    int64_t first = begin * COPY_UNIT, last = least(end * COPY_UNIT, n[BYTES]);
    char *out = p[0] + n[OUT_AT];
    const char *in = p[n[READS]] + n[IN_AT];
    if (out != in && first < last)
        memcpy(out + first, in + first, (size_t)(last - first));
    return 0;
}

/* Run the parts one after the other; the units are those of the parts. */
static int boxes(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    for (int i = 0; i < call->nchildren && end > 0; i++) {
        const KernelCall *part = call->children[i];
        if (begin < part->units)
            part->kernel->run(part, p, begin > 0 ? begin : 0, least(end, part->units), scratch);
        begin -= part->units;
        end -= part->units;
    }
    return 0;
}

/* --- calls that copy one run, as links --- */

static const Link *copy_as_link(const Link *link)
{
    copy_run(link->at[0], link->at[1], link->nbytes);
    return link[1].run(link + 1);
}

static int link_of_copy(const KernelCall *call, char *const *p, Link *link)
{
    const int64_t *n = call->ints;
    *link = (Link){
        .run = copy_as_link, .at = {p[0] + n[OUT_AT], p[n[READS]] + n[IN_AT]}, .nbytes = n[BYTES]};
    return link->at[0] != link->at[1];
}

/* Copy one run; `box_rest` then copies the rest of an operand, unless it is the result. */
static int link_of_boxes(const KernelCall *call, char *const *p, Link *link)
{
    int rests = 0;
    while (rests < call->nchildren && !strncmp(call->children[rests]->kernel->name, "box_rest", 8))
        rests++;
    const KernelCall *last = rests + 1 == call->nchildren && p[0] == p[1] ? call->children[rests] : NULL;
    return last && last->kernel->to_link && last->kernel->to_link(last, p, link);
}

/* --- triangles --- */

/* In each row, keep either the elements up to the diagonal, or the elements after it. */
static int triangle(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints, width = n[WIDTH], size = n[SIZE];
    for (int64_t row = begin * n[TILE_ROWS], last = least(end * n[TILE_ROWS], n[ROWS_IN_ALL]); row < last;
         row++) {
        int64_t split = (row % n[ROWS] + n[DIAGONAL]) * size;
        split = split < 0 ? 0 : least(split, width);
        char *out = p[0] + row * width;
        const char *in = p[1] + row * width;
        if (n[ABOVE]) {
            memset(out, 0, (size_t)split);
            memcpy(out + split, in + split, (size_t)(width - split));
        } else {
            memcpy(out, in, (size_t)split);
            memset(out + split, 0, (size_t)(width - split));
        }
    }
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
#define OF_SIZE(size)                                                                    \
    ENTRY(box_each_##size) ENTRY(box_transpose_##size) ENTRY(box_rest_##size) ENTRY(box_add_##size)
KERNEL_TABLE(layout, LINKED_KERNEL(copy, link_of_copy) LINKED_KERNEL(boxes, link_of_boxes) ENTRY(triangle) ENTRY(box_rows) OF_SIZE(1) OF_SIZE(2)
                         OF_SIZE(4) OF_SIZE(8) ENTRY(box_add_f32) ENTRY(box_add_f64))
/* clang-format on */
