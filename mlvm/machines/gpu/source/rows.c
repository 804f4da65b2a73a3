/* Row functions: softmax, losses and normalization along the middle one of three axes of x. LANES items process a row
 * together and combine their values by a tree. With LANES = 1, each item processes a row: for short
 * rows, for rows that are not contiguous, and on a processor, where SIDE elements of a row are
 * computed side by side. EACH repeats its body for each element i of the row; `j` is its position
 * in the group of SIDE elements. */

#if LANES > 1
#define ROW const i64 row = GROUP(0); const int lane = LOCAL_ITEM(0); LOCAL COMPUTED(T) tree[LANES];
#define FOLD(value, combine) \
    tree[lane] = value[0]; \
    BARRIER; \
    for (int span = LANES / 2; span; span >>= 1) { \
        if (lane < span) tree[lane] = combine(tree[lane], tree[lane + span]); \
        BARRIER; \
    } \
    value[0] = tree[0]; \
    BARRIER;
#define EACH(text) \
    for (i64 start = 0, i = lane; start < length; start += LANES, i += LANES) { \
        const int j = 0; \
        if (i < length) { text; } \
    }
#else
#define ROW const i64 row = ITEM(0); const int lane = 0; if (row >= rows) return;
#define FOLD(value, combine) for (int j = 1; j < SIDE; j++) value[0] = combine(value[0], value[j]);
#define EACH(text) \
    for (i64 start = 0; start < length / SIDE * SIDE; start += SIDE) \
        for (int j = 0; j < SIDE; j++) { \
            const i64 i = start + j; \
            text; \
        } \
    for (i64 i = length / SIDE * SIDE; i < length; i++) { \
        const int j = (int)(i % SIDE); \
        text; \
    }
#endif
#define VALUE(name, start) COMPUTED(T) name[SIDE]; for (int j = 0; j < SIDE; j++) name[j] = start;
#define PLUS(a, b) ((a) + (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define OF(x) LOAD(T, x, first + i * behind)
#define FIRST const i64 first = row / behind * length * behind + row % behind;

/* The largest element, and the sum of exp(x - largest). */
#define PEAK_AND_SUM(x) \
    VALUE(peaks, -INFINITY) \
    VALUE(sums, 0) \
    EACH(peaks[j] = LARGER(peaks[j], OF(x))) \
    FOLD(peaks, LARGER) \
    const COMPUTED(T) peak = peaks[0]; \
    EACH(sums[j] += exp(OF(x) - peak)) \
    FOLD(sums, PLUS) \
    const COMPUTED(T) sum = sums[0];

KERNEL void softmax(TENSOR(T, out), TENSOR(T, x), const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    ROW
    FIRST
#ifdef KEEPS /* T is the dtype of the computation: the exponentials are written and read again */
    VALUE(peaks, -INFINITY)
    VALUE(sums, 0)
    EACH(peaks[j] = LARGER(peaks[j], OF(x)))
    FOLD(peaks, LARGER)
    const COMPUTED(T) peak = peaks[0];
    EACH(const COMPUTED(T) power = exp(OF(x) - peak); out[first + i * behind] = power; sums[j] += power)
    FOLD(sums, PLUS)
    const COMPUTED(T) sum = sums[0];
    EACH(out[first + i * behind] /= sum)
#else
    PEAK_AND_SUM(x)
    EACH(STORE(T, out, first + i * behind, exp(OF(x) - peak) / sum))
#endif
}

KERNEL void log_softmax(TENSOR(T, out), TENSOR(T, x), const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    ROW
    FIRST
    PEAK_AND_SUM(x)
    const COMPUTED(T) less = log(sum);
    EACH(STORE(T, out, first + i * behind, OF(x) - peak - less))
}

#ifdef Y
/* The class of the row; -1 if it is out of range, which is reported. */
#define LABEL \
    i64 label = (i64)LOAD(Y, labels, row); \
    if (label < 0 || (u64)LOAD(Y, labels, row) >= (u64)length) { \
        REFUSE(row, LOAD(Y, labels, row)); \
        label = -1; \
    }

KERNEL void softmax_cross_entropy(TENSOR(T, out), TENSOR(T, x), TENSOR(Y, labels), REFUSALS, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(Y, labels);
    ROW
    FIRST
    PEAK_AND_SUM(x)
    if (lane == 0) {
        LABEL
        if (label >= 0) STORE(T, out, row, log(sum) - (LOAD(T, x, first + label) - peak));
    }
}

KERNEL void softmax_cross_entropy_vjp(TENSOR(T, out), TENSOR(T, g), TENSOR(T, x), TENSOR(Y, labels), REFUSALS, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, g);
    POINTER(T, x);
    POINTER(Y, labels);
    ROW
    FIRST
    PEAK_AND_SUM(x)
    LABEL
    const COMPUTED(T) scale = LOAD(T, g, row);
    EACH(STORE(T, out, first + i, (exp(OF(x) - peak) / sum - (i == label ? 1 : 0)) * scale))
}
#endif

/* The mean, and 1 / sqrt(var + eps). */
#define CENTRE(x) \
    VALUE(sums, 0) \
    VALUE(squares, 0) \
    EACH(sums[j] += OF(x)) \
    FOLD(sums, PLUS) \
    const COMPUTED(T) mean = sums[0] / length; \
    EACH(const COMPUTED(T) far = OF(x) - mean; squares[j] += far * far) \
    FOLD(squares, PLUS) \
    const COMPUTED(T) inverse = 1 / sqrt(squares[0] / length + eps);

KERNEL void layer_norm(TENSOR(T, out), TENSOR(T, x), TENSOR(T, scale), TENSOR(T, bias), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, scale);
    POINTER(T, bias);
    ROW
    FIRST
    CENTRE(x)
    EACH(STORE(T, out, first + i, (OF(x) - mean) * inverse * LOAD(T, scale, i) + LOAD(T, bias, i)))
}

KERNEL void layer_norm_normalize(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    ROW
    FIRST
    CENTRE(x)
    EACH(STORE(T, out, first + i, (OF(x) - mean) * inverse))
}

KERNEL void layer_norm_vjp(TENSOR(T, out), TENSOR(T, g), TENSOR(T, x), TENSOR(T, scale), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, g);
    POINTER(T, x);
    POINTER(T, scale);
    ROW
    FIRST
    CENTRE(x)
    VALUE(totals, 0)
    VALUE(products, 0)
    EACH(const COMPUTED(T) h = OF(g) * LOAD(T, scale, i); totals[j] += h; products[j] += h * (OF(x) - mean))
    FOLD(totals, PLUS)
    FOLD(products, PLUS)
    const COMPUTED(T) total = totals[0] / length, together = products[0] * (inverse * inverse / length);
    EACH(STORE(T, out, first + i, (OF(g) * LOAD(T, scale, i) - total - (OF(x) - mean) * together) * inverse))
}

/* Statistics for the gradient of the scale: the mean and the inverse deviation of each row. */
KERNEL void row_statistics(TENSOR(A, out), TENSOR(T, x), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(A, out);
    POINTER(T, x);
    ROW
    FIRST
    CENTRE(x)
    if (lane == 0) {
        out[2 * row] = mean;
        out[2 * row + 1] = inverse;
    }
}

/* g * (x - mean) * inverse, summed over pieces of rows: out[pieces, length]. */
KERNEL void scale_gradient(TENSOR(A, out), TENSOR(T, g), TENSOR(T, x), TENSOR(A, statistics), const i64 rows, const i64 length, const i64 piece, const i64 pieces)
{
    POINTER(A, out);
    POINTER(T, g);
    POINTER(T, x);
    POINTER(A, statistics);
    const i64 at = ITEM(0);
    if (at >= pieces * length) return;
    const i64 column = at % length, begin = at / length * piece;
    const i64 end = begin + piece < rows ? begin + piece : rows;
    COMPUTED(T) sum = 0;
    for (i64 row = begin; row < end; row++) {
        const i64 place = row * length + column;
        sum += LOAD(T, g, place) * ((LOAD(T, x, place) - statistics[2 * row]) * statistics[2 * row + 1]);
    }
    out[at] = sum;
}
