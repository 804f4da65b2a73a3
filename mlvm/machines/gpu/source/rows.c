/* Functions of rows: softmax, losses, normalisation along the middle one of x[before, length, behind].

   LANES items go through a row together and fold their values by a tree. Where LANES is 1, an item has a row
   of its own: for short rows, and for rows across memory. */

#if LANES > 1
#define ROW const i64 row = GROUP(0); const int lane = LOCAL_ITEM(0); LOCAL COMPUTED(T) tree[LANES];
#define FOLD(value, combine) \
    tree[lane] = value; \
    BARRIER; \
    for (int span = LANES / 2; span; span >>= 1) { \
        if (lane < span) tree[lane] = combine(tree[lane], tree[lane + span]); \
        BARRIER; \
    } \
    value = tree[0]; \
    BARRIER;
#define EACH for (i64 start = 0, i = lane; start < length; start += LANES, i += LANES) if (i < length)
#else
#define ROW const i64 row = ITEM(0); const int lane = 0; if (row >= rows) return;
#define FOLD(value, combine)
#define EACH for (i64 i = 0; i < length; i++)
#endif
#define PLUS(a, b) ((a) + (b))
#define LARGER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define OF(x) LOAD(T, x, first + i * behind)
#define FIRST const i64 first = row / behind * length * behind + row % behind;

/* The largest element, and the sum of exp(x - largest). */
#define PEAK_AND_SUM(x) \
    COMPUTED(T) peak = -INFINITY, sum = 0; \
    EACH peak = LARGER(peak, OF(x)); \
    FOLD(peak, LARGER) \
    EACH sum += exp(OF(x) - peak); \
    FOLD(sum, PLUS)

KERNEL void softmax(TENSOR(T, out), TENSOR(T, x), const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    ROW
    FIRST
    COMPUTED(T) peak = -INFINITY, sum = 0;
    EACH peak = LARGER(peak, OF(x));
    FOLD(peak, LARGER)
#ifdef KEEPS /* T is what is computed in: the powers are written, and read again */
    EACH {
        const COMPUTED(T) power = exp(OF(x) - peak);
        out[first + i * behind] = power;
        sum += power;
    }
    FOLD(sum, PLUS)
    EACH out[first + i * behind] /= sum;
#else
    EACH sum += exp(OF(x) - peak);
    FOLD(sum, PLUS)
    EACH STORE(T, out, first + i * behind, exp(OF(x) - peak) / sum);
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
    EACH STORE(T, out, first + i * behind, OF(x) - peak - less);
}

#ifdef Y
/* The class of the row; -1, after a refusal, where there is none of that number. */
#define LABEL \
    i64 label = (i64)LOAD(Y, labels, row); \
    if (label < 0 || (u64)LOAD(Y, labels, row) >= (u64)length) { \
        REFUSE; \
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
    EACH STORE(T, out, first + i, (exp(OF(x) - peak) / sum - (i == label ? 1 : 0)) * scale);
}
#endif

/* The mean, and 1 / sqrt(var + eps). */
#define CENTRE(x) \
    COMPUTED(T) mean = 0, square = 0; \
    EACH mean += OF(x); \
    FOLD(mean, PLUS) \
    mean /= length; \
    EACH { \
        const COMPUTED(T) far = OF(x) - mean; \
        square += far * far; \
    } \
    FOLD(square, PLUS) \
    const COMPUTED(T) inverse = 1 / sqrt(square / length + eps);

KERNEL void layer_norm(TENSOR(T, out), TENSOR(T, x), TENSOR(T, scale), TENSOR(T, bias), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, scale);
    POINTER(T, bias);
    ROW
    FIRST
    CENTRE(x)
    EACH STORE(T, out, first + i, (OF(x) - mean) * inverse * LOAD(T, scale, i) + LOAD(T, bias, i));
}

KERNEL void layer_norm_normalize(TENSOR(T, out), TENSOR(T, x), const COMPUTED(T) eps, const i64 rows, const i64 length, const i64 behind)
{
    POINTER(T, out);
    POINTER(T, x);
    ROW
    FIRST
    CENTRE(x)
    EACH STORE(T, out, first + i, (OF(x) - mean) * inverse);
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
    COMPUTED(T) total = 0, together = 0;
    EACH {
        const COMPUTED(T) h = OF(g) * LOAD(T, scale, i);
        total += h;
        together += h * (OF(x) - mean);
    }
    FOLD(total, PLUS)
    FOLD(together, PLUS)
    total /= length;
    together *= inverse * inverse / length;
    EACH STORE(T, out, first + i, (OF(g) * LOAD(T, scale, i) - total - (OF(x) - mean) * together) * inverse);
}

/* What the gradient of the scale adds up: the mean and the inverse of each row. */
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

/* g * (x - mean) * inverse, added up over pieces of rows: out[pieces, length]. */
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
