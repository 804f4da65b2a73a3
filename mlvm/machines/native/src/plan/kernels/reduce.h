/* Reduction of rows of one dtype. Include it once for each reduction, after you define
 *
 *   REDUCE(name)   the function's name for this reduction
 *   X, A           the types of an element and a result
 *   LIFT(x, c)     what one element contributes, where c is what a variance subtracts
 *   COMBINE(a, b)  combine two results; it evaluates them more than once
 *   IDENTITY       COMBINE(a, IDENTITY) is a
 *   DECIDED(a)     optional: whether no other element can change the result a
 *   ANY_ORDER      optional: the compiler may choose the order of the combinations
 *   UNLESS_NAN(a, b) optional: a faster COMBINE(a, b) for operands that are not nan
 *   ROUNDED        optional: results are rounded, so fewer successive combinations are more accurate
 *
 * Without ANY_ORDER the order depends only on the lengths. The elements of a block are combined into
 * LANES adjacent results. Blocks are combined in pairs, then pairs of blocks in pairs, and so on.
 * Finally, half of the lanes is combined with the other half until one lane remains. Columns are
 * combined in groups of eight, then in blocks, then blocks in pairs. So the number of successive
 * combinations grows with the logarithm of the length, and a sum is as exact as numpy's pairwise sum.
 */
#include <stdint.h>

#ifndef LANES
#define OUT_OF_LINE static __attribute__((noinline, unused)) /* a long function with many callers */
#define LANES ((int)sizeof(A) < 8 ? 32 : 16)
#define BLOCK (16 * LANES) /* elements of a row */
#define ROWS 128           /* rows of a block of columns */
#define NARROW 16          /* columns */
#define WIDE 64

/* Combine halves of the lanes until one lane remains; W is a constant. */
#define FOLD_LANES(s, W)                                         \
    _Pragma("GCC unroll 8") for (int w = (W) / 2; w > 0; w /= 2) \
    {                                                            \
        for (int j = 0; j < w; j++)                              \
            (s)[j] = COMBINE((s)[j], (s)[j + w]);                \
    }

/* A row of W to 2 W elements: the first W, and the last elements that are not among them. */
#define REDUCE_SHORT(W)                                          \
    if ((W) <= LANES && n >= (W)) {                              \
        enum { width = (W) <= LANES ? (W) : 1 };                 \
        const X *last = x + n - width;                           \
        const int repeated = 2 * width - (int)n;                 \
        A s[width];                                              \
        for (int j = 0; j < width; j++) {                        \
            const A l = LIFT(x[j], c), r = LIFT(last[j], c);     \
            s[j] = COMBINE(l, (j < repeated ? (A)IDENTITY : r)); \
        }                                                        \
        FOLD_LANES(s, width)                                     \
        return s[0];                                             \
    }

/* Combine a multiple of LANES elements into the lanes s. */
#define REDUCE_WHOLE(s, x, n)                \
    for (int j = 0; j < LANES; j++)          \
        s[j] = IDENTITY;                     \
    for (int64_t k = 0; k < (n); k += LANES) \
        for (int j = 0; j < LANES; j++) {    \
            const A r = LIFT((x)[k + j], c); \
            s[j] = COMBINE(s[j], r);         \
        }

/* Combine the last n % LANES of n elements into the lanes s. The load covers the last LANES elements. */
#define REDUCE_REST(s, x, n)                                        \
    if ((n) % LANES) {                                              \
        const int repeated = (int)(LANES - (n) % LANES);            \
        for (int j = 0; j < LANES; j++) {                           \
            const A r = LIFT((x)[(n)-LANES + j], c);                \
            s[j] = COMBINE(s[j], (j < repeated ? (A)IDENTITY : r)); \
        }                                                           \
    }
#endif

#ifndef DECIDED
#define DECIDED(a) 0
#endif

#ifdef ANY_ORDER
OUT_OF_LINE A REDUCE(row)(const X *x, int64_t n, A c)
{
    A s = IDENTITY;
    (void)c;
    for (int64_t i = 0; i < n && !DECIDED(s); i += BLOCK) {
        const int64_t end = n - i < BLOCK ? n : i + BLOCK;
        for (int64_t k = i; k < end; k++) {
            const A r = LIFT(x[k], c);
            s = COMBINE(s, r);
        }
    }
    return s;
}
#else
static inline A REDUCE(short_row)(const X *x, int64_t n, A c)
{
    (void)c;
    REDUCE_SHORT(32)
    REDUCE_SHORT(16)
    REDUCE_SHORT(8)
    REDUCE_SHORT(4)
    REDUCE_SHORT(2)
    REDUCE_SHORT(1)
    return IDENTITY;
}

#ifdef UNLESS_NAN
/* A long row without nan, in the same order; return whether the result is valid because there is no nan.
 * It takes a third of the time, as results are not tested for nan one after the other. */
OUT_OF_LINE int REDUCE(row_unless_nan)(A *out, const X *x, int64_t n)
{
    A s[LANES], nan[LANES];
    int has_nan = 0;
    for (int j = 0; j < LANES; j++)
        s[j] = IDENTITY, nan[j] = 0;
    for (int64_t k = 0; k < n - n % LANES; k += LANES)
        for (int j = 0; j < LANES; j++) {
            const A r = LIFT(x[k + j], c);
            s[j] = UNLESS_NAN(s[j], r);
            nan[j] = r != r ? r : nan[j];
        }
    for (int j = 0; j < LANES; j++)
        has_nan |= nan[j] != nan[j];
    REDUCE_REST(s, x, n)
    FOLD_LANES(s, LANES)
    *out = s[0];
    return !has_nan;
}
#endif

/* Combine a multiple of LANES elements into the lanes `out`: the first half of the blocks and the rest,
 * recursively. */
OUT_OF_LINE void REDUCE(blocks)(A *restrict out, const X *x, int64_t n, A c)
{
    A s[LANES], more[LANES]; /* s stays in registers: no pointer refers to it */
    if (n <= BLOCK) {
        REDUCE_WHOLE(s, x, n)
        for (int j = 0; j < LANES; j++)
            out[j] = s[j];
        return;
    }
    const int64_t half = (n / 2 + BLOCK - 1) / BLOCK * BLOCK;
    REDUCE(blocks)(out, x, half, c);
    REDUCE(blocks)(more, x + half, n - half, c);
    for (int j = 0; j < LANES; j++)
        out[j] = COMBINE(out[j], more[j]);
}

/* A row of n elements. */
OUT_OF_LINE A REDUCE(row)(const X *x, int64_t n, A c)
{
    if (n <= 2 * LANES)
        return REDUCE(short_row)(x, n, c);
#ifdef UNLESS_NAN
    A result;
    if (REDUCE(row_unless_nan)(&result, x, n))
        return result;
#endif
    A s[LANES];
    const int64_t whole = n - n % LANES;
    if (n <= BLOCK) {
        REDUCE_WHOLE(s, x, whole)
        REDUCE_REST(s, x, n)
        FOLD_LANES(s, LANES)
        return s[0];
    }
    REDUCE(blocks)(s, x, whole, c);
    REDUCE_REST(s, x, n)
    FOLD_LANES(s, LANES)
    return s[0];
}
#endif

/* Combine n rows of results into one, s[0 .. width], by halves. */
OUT_OF_LINE void REDUCE(fold)(A *s, int64_t n, int64_t width)
{
    while (n > 1) {
        const int64_t half = n / 2, rest = (n - half) * width;
        for (int64_t j = 0; j < half * width; j++)
            s[j] = COMBINE(s[j], s[rest + j]);
        n -= half;
    }
}

/* Combine rows of n elements, `stride` apart, into one result. */
OUT_OF_LINE A REDUCE(rows)(const X *x, int64_t rows, int64_t stride, int64_t n, A c)
{
    if (rows == 1)
        return REDUCE(row)(x, n, c);
    A s[128];
    if (rows > 128) {
        const int64_t half = (rows / 2 + 127) / 128 * 128;
        s[0] = REDUCE(rows)(x, half, stride, n, c);
        s[1] = REDUCE(rows)(x + half * stride, rows - half, stride, n, c);
        return COMBINE(s[0], s[1]);
    }
    for (int64_t i = 0; i < rows; i++)
        s[i] = REDUCE(row)(x + i * stride, n, c);
    REDUCE(fold)(s, rows, 1);
    return s[0];
}

/* Combine at most ROWS rows of n elements, `stride` apart, elementwise into `to`. */
OUT_OF_LINE void REDUCE(few_columns)(A *restrict to, const X *x, int64_t rows, int64_t stride, int64_t n,
                                     const A *c)
{
    (void)c;
#ifdef ROUNDED
    for (; rows >= 8; rows -= 8, x += 8 * stride) {
        const X *x1 = x + stride, *x2 = x1 + stride, *x3 = x2 + stride, *x4 = x3 + stride,
                *x5 = x4 + stride, *x6 = x5 + stride, *x7 = x6 + stride;
        for (int64_t j = 0; j < n; j++) {
            A s0 = LIFT(x[j], c[j]), s1 = LIFT(x1[j], c[j]), s2 = LIFT(x2[j], c[j]), s3 = LIFT(x3[j], c[j]),
              s4 = LIFT(x4[j], c[j]), s5 = LIFT(x5[j], c[j]), s6 = LIFT(x6[j], c[j]),
              s7 = LIFT(x7[j], c[j]);
            s0 = COMBINE(s0, s1), s2 = COMBINE(s2, s3), s4 = COMBINE(s4, s5);
            s6 = COMBINE(s6, s7), s0 = COMBINE(s0, s2), s4 = COMBINE(s4, s6);
            s0 = COMBINE(s0, s4), to[j] = COMBINE(to[j], s0);
        }
    }
#endif
    for (; rows; rows--, x += stride)
        for (int64_t j = 0; j < n; j++) {
            const A s0 = LIFT(x[j], c[j]);
            to[j] = COMBINE(to[j], s0);
        }
}

/* The same for any number of rows: the first half of the rows and the rest, recursively. Many narrow
 * rows are treated as fewer wide rows, whose columns are combined at the end. */
OUT_OF_LINE void REDUCE(columns)(A *restrict to, const X *x, int64_t rows, int64_t stride, int64_t n,
                                 const A *c)
{
    if (rows <= ROWS) {
        for (int64_t j = 0; j < n; j++)
            to[j] = IDENTITY;
        REDUCE(few_columns)(to, x, rows, stride, n, c);
        return;
    }
    A more[REDUCTION_WIDEST];
    if (n <= NARROW && n == stride) {
        const int64_t times = WIDE / n, width = times * n, wide_rows = rows / times;
        A wide_to[WIDE], wide_c[WIDE];
        for (int64_t j = 0; j < width; j++)
            wide_c[j] = c ? c[j % n] : 0;
        REDUCE(columns)(wide_to, x, wide_rows, width, width, wide_c);
        REDUCE(fold)(wide_to, times, n);
        for (int64_t j = 0; j < n; j++)
            to[j] = wide_to[j];
        REDUCE(few_columns)(to, x + wide_rows * width, rows - wide_rows * times, stride, n, c);
        return;
    }
    const int64_t half = (rows / 2 + ROWS - 1) / ROWS * ROWS;
    REDUCE(columns)(to, x, half, stride, n, c);
    REDUCE(columns)(more, x + half * stride, rows - half, stride, n, c);
    for (int64_t j = 0; j < n; j++)
        to[j] = COMBINE(to[j], more[j]);
}

/* The same for groups of rows that are `apart`. */
OUT_OF_LINE void REDUCE(groups)(A *restrict to, const X *x, int64_t groups, int64_t apart, int64_t rows,
                                int64_t stride, int64_t n, const A *c)
{
    if (groups == 1) {
        REDUCE(columns)(to, x, rows, stride, n, c);
        return;
    }
    A more[REDUCTION_WIDEST];
    REDUCE(groups)(to, x, groups / 2, apart, rows, stride, n, c);
    REDUCE(groups)(more, x + groups / 2 * apart, groups - groups / 2, apart, rows, stride, n, c);
    for (int64_t j = 0; j < n; j++)
        to[j] = COMBINE(to[j], more[j]);
}
