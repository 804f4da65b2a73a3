/* The kernels of rows.c for one dtype: included after defining
 *
 *   F         its C type
 *   FN(name)  the name of a function of it; functions.h has FN(exp) and FN(log)
 */

#define X F
#define A F
#define REDUCE(name) FN(name##_sum)
#define LIFT(x, c) (x)
#define COMBINE(a, b) ((a) + (b))
#define IDENTITY -0.0
#define ROUNDED
#include "reduce.h"
#undef REDUCE
#undef LIFT

#define REDUCE(name) FN(name##_squares)
#define LIFT(x, c) (((x) - (c)) * ((x) - (c)))
#include "reduce.h"
#undef REDUCE
#undef LIFT
#undef COMBINE
#undef IDENTITY
#undef ROUNDED

#define REDUCE(name) FN(name##_max)
#define LIFT(x, c) (x)
#define COMBINE(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define UNLESS_NAN(a, b) ((b) > (a) ? (b) : (a))
#define IDENTITY -INFINITY
#include "reduce.h"
#undef REDUCE
#undef LIFT
#undef COMBINE
#undef UNLESS_NAN
#undef IDENTITY
#undef DECIDED
#undef X
#undef A

/* --- softmax --- */

/* Write exp(x - peak) of some rows of n elements to y, where `peak` is the maximum of each row. Short
 * rows are passed to `exp` together. */
static void FN(exponentials)(F *restrict y, const F *restrict x, int64_t rows, int64_t n,
                             const F *restrict peak)
{
    if (rows == 1) {
        for (int64_t j = 0; j < n; j++)
            y[j] = FN(exp)(x[j] - peak[0]);
        return;
    }
    for (int64_t r = 0; r < rows; r++) {
        const F largest = peak[r];
        for (int64_t j = 0; j < n; j++)
            y[r * n + j] = x[r * n + j] - largest;
    }
    for (int64_t j = 0; j < rows * n; j++)
        y[j] = FN(exp)(y[j]);
}

/* Return the sum of exp(x - peak); `y` has space for ROWS_TOGETHER elements. */
static F FN(sum_of_exp)(const F *x, int64_t n, F peak, F *y)
{
    F s[64];
    int64_t m = 0;
    for (int64_t i = 0; i < n; i += ROWS_TOGETHER) {
        const int64_t length = least(ROWS_TOGETHER, n - i);
        FN(exponentials)(y, x + i, 1, length, &peak);
        s[m++] = FN(row_sum)(y, length, 0);
        if (m == 64 || i + ROWS_TOGETHER >= n) {
            FN(fold_sum)(s, m, 1);
            m = 1;
        }
    }
    return s[0];
}

/* Return the number of rows of n elements to process together, and the maximum of each. */
static int64_t FN(next_rows)(const F *x, int64_t rows, int64_t n, F *peak)
{
    rows = least(rows, n < ROWS_TOGETHER ? ROWS_TOGETHER / n : 1);
    for (int64_t r = 0; r < rows; r++)
        peak[r] = FN(row_max)(x + r * n, n, 0);
    return rows;
}

/* Write the logarithms of the sums of exp(x - peak) of `rows` rows; `y` has space for ROWS_TOGETHER
 * elements. */
static void FN(log_sums)(F *restrict logs, const F *x, int64_t rows, int64_t n, F *peak, F *y)
{
    if (n > ROWS_TOGETHER) {
        for (int64_t r = 0; r < rows; r++)
            logs[r] = FN(sum_of_exp)(x + r * n, n, peak[r], y);
    } else {
        FN(exponentials)(y, x, rows, n, peak);
        for (int64_t r = 0; r < rows; r++)
            logs[r] = FN(row_sum)(y + r * n, n, 0);
    }
    for (int64_t r = 0; r < rows; r++)
        logs[r] = FN(log)(logs[r]);
}

/* A unit is a row. */
static int FN(softmax)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    F *peak = (F *)scratch;
    for (int64_t u = begin, rows; u < end; u += rows) {
        const F *x = (const F *)p[1] + u * n;
        F *y = (F *)p[0] + u * n;
        rows = FN(next_rows)(x, end - u, n, peak);
        FN(exponentials)(y, x, rows, n, peak);
        for (int64_t r = 0; r < rows; r++, y += n) {
            const F inverse = 1 / FN(row_sum)(y, n, 0);
            for (int64_t j = 0; j < n; j++)
                y[j] *= inverse;
        }
    }
    return 0;
}

static int FN(log_softmax)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                           char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    F *peak = (F *)scratch, *logs = peak + ROWS_TOGETHER, *work = logs + ROWS_TOGETHER;
    for (int64_t u = begin, rows; u < end; u += rows) {
        const F *x = (const F *)p[1] + u * n;
        F *y = (F *)p[0] + u * n;
        rows = FN(next_rows)(x, end - u, n, peak);
        FN(log_sums)(logs, x, rows, n, peak, work);
        for (int64_t r = 0; r < rows; r++, x += n, y += n)
            for (int64_t j = 0; j < n; j++)
                y[j] = (x[j] - peak[r]) - logs[r];
    }
    return 0;
}

static int FN(logsumexp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    F *peak = (F *)scratch, *logs = peak + ROWS_TOGETHER, *work = logs + ROWS_TOGETHER;
    for (int64_t u = begin, rows; u < end; u += rows) {
        const F *x = (const F *)p[1] + u * n;
        F *out = (F *)p[0] + u;
        rows = FN(next_rows)(x, end - u, n, peak);
        for (int64_t r = 0; r < rows; r++)
            peak[r] = isfinite(peak[r]) ? peak[r] : 0;
        FN(log_sums)(logs, x, rows, n, peak, work);
        for (int64_t r = 0; r < rows; r++)
            out[r] = logs[r] + peak[r];
    }
    return 0;
}

/* A unit is a row. A label that does not fit in int64_t becomes negative. */
static int FN(softmax_cross_entropy)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                     char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    F *peak = (F *)scratch, *logs = peak + ROWS_TOGETHER, *work = logs + ROWS_TOGETHER;
    for (int64_t u = begin, rows; u < end; u += rows) {
        const F *x = (const F *)p[1] + u * n;
        F *out = (F *)p[0] + u;
        rows = FN(next_rows)(x, end - u, n, peak);
        FN(log_sums)(logs, x, rows, n, peak, work);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t label = integer_at(p[2], call->ints[KIND], u + r);
            if (label < 0 || label >= n)
                return 1;
            out[r] = logs[r] - (x[r * n + label] - peak[r]);
        }
    }
    return 0;
}

static int FN(softmax_cross_entropy_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                         char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    const F *g = (const F *)p[1];
    F *peak = (F *)scratch;
    for (int64_t u = begin, rows; u < end; u += rows) {
        const F *x = (const F *)p[2] + u * n;
        F *y = (F *)p[0] + u * n;
        rows = FN(next_rows)(x, end - u, n, peak);
        FN(exponentials)(y, x, rows, n, peak);
        for (int64_t r = 0; r < rows; r++, y += n) {
            const int64_t label = integer_at(p[3], call->ints[KIND], u + r);
            if (label < 0 || label >= n)
                return 1;
            const F inverse = 1 / FN(row_sum)(y, n, 0), factor = g[u + r];
            const F picked = (y[label] * inverse - 1) * factor;
            for (int64_t j = 0; j < n; j++)
                y[j] = y[j] * inverse * factor;
            y[label] = picked;
        }
    }
    return 0;
}

/* --- softmax along an axis other than the last --- */

/* A block of at most ROWS_TOGETHER columns and n rows, `stride` apart. `scratch` has the maxima of the
 * columns, then their sums of exp(x - peak), and then space for ROWS_TOGETHER elements. */
static void FN(column_peaks)(const F *x, int64_t n, int64_t stride, int64_t width, F *scratch)
{
    FN(columns_max)(scratch, x, n, stride, width, NULL);
}

static void FN(column_exponentials)(F *restrict y, const F *restrict x, int64_t n, int64_t to_next,
                                    int64_t stride, int64_t width, F *restrict scratch)
{
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < width; j++)
            y[i * to_next + j] = FN(exp)(x[i * stride + j] - scratch[j]);
    F *sum = scratch + ROWS_TOGETHER, *more = sum + ROWS_TOGETHER;
    FN(columns_sum)(more, y, n, to_next, width, NULL);
    for (int64_t j = 0; j < width; j++)
        sum[j] += more[j];
}

/* A unit is a block of columns. */
static int FN(softmax_of_columns)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                  char *scratch)
{
    const int64_t n = call->ints[LENGTH], inner = call->ints[INNER];
    F *sum = (F *)scratch + ROWS_TOGETHER;
    for (int64_t u = begin; u < end; u++) {
        const Block block = block_of(call, u);
        const F *x = (const F *)p[1] + block.at;
        F *y = (F *)p[0] + block.at;
        FN(column_peaks)(x, n, inner, block.width, (F *)scratch);
        for (int64_t j = 0; j < block.width; j++)
            sum[j] = 0;
        FN(column_exponentials)(y, x, n, inner, inner, block.width, (F *)scratch);
        for (int64_t j = 0; j < block.width; j++)
            sum[j] = 1 / sum[j];
        for (int64_t i = 0; i < n; i++, y += inner)
            for (int64_t j = 0; j < block.width; j++)
                y[j] *= sum[j];
    }
    return 0;
}

static int FN(log_softmax_of_columns)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                      char *scratch)
{
    const int64_t n = call->ints[LENGTH], inner = call->ints[INNER];
    F *peak = (F *)scratch, *sum = peak + ROWS_TOGETHER;
    for (int64_t u = begin; u < end; u++) {
        const Block block = block_of(call, u);
        const F *x = (const F *)p[1] + block.at;
        F *y = (F *)p[0] + block.at;
        FN(column_peaks)(x, n, inner, block.width, peak);
        for (int64_t j = 0; j < block.width; j++)
            sum[j] = 0;
        FN(column_exponentials)(y, x, n, inner, inner, block.width, peak);
        for (int64_t j = 0; j < block.width; j++)
            sum[j] = FN(log)(sum[j]);
        for (int64_t i = 0; i < n; i++, y += inner, x += inner)
            for (int64_t j = 0; j < block.width; j++)
                y[j] = (x[j] - peak[j]) - sum[j];
    }
    return 0;
}

static int FN(logsumexp_of_columns)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                    char *scratch)
{
    const int64_t n = call->ints[LENGTH], inner = call->ints[INNER];
    F *peak = (F *)scratch, *sum = peak + ROWS_TOGETHER, *work = sum + 2 * ROWS_TOGETHER;
    for (int64_t u = begin; u < end; u++) {
        const Block block = block_of(call, u);
        const F *x = (const F *)p[1] + block.at;
        F *out = (F *)p[0] + block.result;
        FN(column_peaks)(x, n, inner, block.width, peak);
        for (int64_t j = 0; j < block.width; j++) {
            peak[j] = isfinite(peak[j]) ? peak[j] : 0;
            sum[j] = 0;
        }
        for (int64_t i = 0; i < n; i += ROWS_OF_WORK) {
            const int64_t rows = least(ROWS_OF_WORK, n - i);
            FN(column_exponentials)(work, x + i * inner, rows, block.width, inner, block.width, peak);
        }
        for (int64_t j = 0; j < block.width; j++)
            out[j] = FN(log)(sum[j]) + peak[j];
    }
    return 0;
}

/* --- layer normalisation --- */

typedef struct {
    F mean, inverse; /* 1 / sqrt(var + eps) */
} FN(Statistics);

static inline FN(Statistics) FN(statistics)(const F *x, int64_t n, F eps)
{
    const F mean = FN(row_sum)(x, n, 0) / (F)n;
    const F variance = FN(row_squares)(x, n, mean) / (F)n;
    return (FN(Statistics)){mean, 1 / FN(root)(variance + eps)};
}

/* floats[0]: eps. A unit is a row. */
static int FN(layer_norm_normalize)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                    char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        const F *x = (const F *)p[1] + u * n;
        F *restrict y = (F *)p[0] + u * n;
        const FN(Statistics) s = FN(statistics)(x, n, (F)call->floats[0]);
        for (int64_t j = 0; j < n; j++)
            y[j] = (x[j] - s.mean) * s.inverse;
    }
    return 0;
}

static int FN(layer_norm)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    const F *scale = (const F *)p[2], *bias = (const F *)p[3];
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        const F *x = (const F *)p[1] + u * n;
        F *restrict y = (F *)p[0] + u * n;
        const FN(Statistics) s = FN(statistics)(x, n, (F)call->floats[0]);
        for (int64_t j = 0; j < n; j++)
            y[j] = (x[j] - s.mean) * s.inverse * scale[j] + bias[j];
    }
    return 0;
}

/* With h = g * scale and c = x - mean: (h - mean(h) - c mean(h c) / (var + eps)) / sqrt(var + eps).
 * `scratch` has space for a row. */
static int FN(layer_norm_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                              char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    const F *scale = (const F *)p[3];
    F *restrict product = (F *)scratch;
    for (int64_t u = begin; u < end; u++) {
        const F *g = (const F *)p[1] + u * n, *x = (const F *)p[2] + u * n;
        F *restrict y = (F *)p[0] + u * n;
        const FN(Statistics) s = FN(statistics)(x, n, (F)call->floats[0]);
        for (int64_t j = 0; j < n; j++) {
            const F h = g[j] * scale[j];
            y[j] = h;
            product[j] = h * (x[j] - s.mean);
        }
        const F mean = FN(row_sum)(y, n, 0) / (F)n;
        const F slope = FN(row_sum)(product, n, 0) * (s.inverse * s.inverse) / (F)n;
        for (int64_t j = 0; j < n; j++)
            y[j] = (y[j] - ((x[j] - s.mean) * slope + mean)) * s.inverse;
    }
    return 0;
}

/* A unit is a part of the rows: it sums g * (x - mean) / sqrt(var + eps). */
static int FN(layer_norm_scale_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                    char *scratch)
{
    enum { TOGETHER = 4 };
    const int64_t n = call->ints[LENGTH], rows = call->ints[COUNT], part = call->ints[PART];
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        F *restrict sum = (F *)(call->units > 1 ? p[3] : p[0]) + u * n;
        for (int64_t j = 0; j < n; j++)
            sum[j] = 0;
        const int64_t last = least(rows, (u + 1) * part);
        for (int64_t r = u * part; r < last; r += TOGETHER) {
            const F *g[TOGETHER], *x[TOGETHER];
            FN(Statistics) s[TOGETHER];
            for (int i = 0; i < TOGETHER; i++) {
                const int64_t row = least(r + i, last - 1) * n;
                g[i] = (const F *)p[1] + row, x[i] = (const F *)p[2] + row;
                s[i] = FN(statistics)(x[i], n, (F)call->floats[0]);
            }
            if (r + TOGETHER <= last)
                for (int64_t j = 0; j < n; j++)
                    sum[j] += ((x[0][j] - s[0].mean) * s[0].inverse * g[0][j] +
                               (x[1][j] - s[1].mean) * s[1].inverse * g[1][j]) +
                              ((x[2][j] - s[2].mean) * s[2].inverse * g[2][j] +
                               (x[3][j] - s[3].mean) * s[3].inverse * g[3][j]);
            else
                for (int64_t i = 0; i < last - r; i++)
                    for (int64_t j = 0; j < n; j++)
                        sum[j] += (x[i][j] - s[i].mean) * s[i].inverse * g[i][j];
        }
    }
    return 0;
}

static int FN(finish_layer_norm_scale_vjp)(const KernelCall *call, char *const *p, int64_t begin,
                                           int64_t end, char *scratch)
{
    const int64_t n = call->ints[LENGTH];
    F *out = (F *)p[0], *sums = (F *)p[3];
    (void)begin, (void)end, (void)scratch;
    if (call->units == 1)
        return 0;
    FN(fold_sum)(sums, call->units, n);
    for (int64_t j = 0; j < n; j++)
        out[j] = sums[j];
    return 0;
}

#undef F
#undef FN
