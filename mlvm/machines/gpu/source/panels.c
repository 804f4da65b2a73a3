/* Matrix products on a processor, which has caches instead of local memory. An item computes
 * HIGH x WIDE elements of the result in registers, and reads both operands in place. Rows of y
 * are contiguous and have at least WIDE elements; V is a vector of LANES elements. The arguments
 * are the same as in product.c. */

#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT ON
#endif
#define PARTS (WIDE / LANES)

KERNEL void panels(TENSOR(T, out), TENSOR(T, x), TENSOR(T, y),
                   const i64 m, const i64 n, const i64 k,
                   const i64 x_row, const i64 x_inner, const i64 y_inner, const i64 y_column,
                   const i64 batch, const i64 second,
                   const i64 x_first, const i64 x_second, const i64 y_first, const i64 y_second,
                   const i64 summed, const i64 x_summed, const i64 y_summed, const i64 length, const i64 splits)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, y);
    const i64 down = (m + HIGH - 1) / HIGH, across = (n + WIDE - 1) / WIDE;
    i64 at = ITEM(0);
    if (at >= down * across * splits * batch) return;
    const i64 row = at % down * HIGH;
    at /= down;
    const i64 first = at % across * WIDE, column = first + WIDE <= n ? first : n - WIDE; /* the last overlaps */
    at /= across;
    const i64 split = at % splits, result = at / splits;
    V sums[HIGH][PARTS];
    i64 rows[HIGH];
    UNROLL for (int i = 0; i < HIGH; i++) {
        UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] = 0;
        rows[i] = (row + i < m ? row + i : m - 1) * x_row;
    }
    const i64 each = (k + length - 1) / length, pieces = each * summed;
    const i64 last = (split + 1) * pieces / splits;
    for (i64 piece = split * pieces / splits; piece < last; piece++) {
        const i64 begin = piece % each * length, end = begin + length < k ? begin + length : k;
        const GLOBAL T *xs = x + result / second * x_first + result % second * x_second + piece / each * x_summed;
        const GLOBAL T *ys = y + result / second * y_first + result % second * y_second + piece / each * y_summed + column;
        for (i64 d = begin; d < end; d++) {
            V factors[PARTS];
            UNROLL for (int j = 0; j < PARTS; j++) factors[j] = PASTE(vload, LANES)(0, ys + d * y_inner + j * LANES);
            UNROLL for (int i = 0; i < HIGH; i++) {
                const T factor = xs[rows[i] + d * x_inner];
                UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] += factor * factors[j];
            }
        }
    }
    out += (split * batch + result) * m * n + column;
    UNROLL for (int i = 0; i < HIGH; i++) {
        if (row + i >= m) break;
        if (column == first) {
            UNROLL for (int j = 0; j < PARTS; j++)
                PASTE(vstore, LANES)(sums[i][j], 0, out + (row + i) * n + j * LANES);
        } else {
            T parts[WIDE];
            UNROLL for (int j = 0; j < PARTS; j++) PASTE(vstore, LANES)(sums[i][j], 0, parts + j * LANES);
            for (i64 j = first - column; j < WIDE; j++) out[(row + i) * n + j] = parts[j];
        }
    }
}
