/* Products of matrices, by tiles in local memory and smaller ones in registers.

   A group makes ROWS x COLUMNS elements of a result, an item HIGH x WIDE of them, in steps of DEPTH along the
   contracted axis. That axis is cut into pieces of `length`, in each of the `summed` matrices that are added
   up; they are shared out to `splits` groups, of which each writes a result of its own: a reduction adds
   these. WINDOWS: the rows of x are windows of images, as a convolution has them, which are never laid out.

   X and Y are dtypes of the operands, A that of sums, T that of the result. V is LANES values of A. */

#define ITEMS ((ROWS / HIGH) * (COLUMNS / WIDE))
#define PARTS (WIDE / LANES)
#if LANES > 1
#define WIDE_LOAD(p) PASTE(vload, LANES)(0, p)
#define WIDE_STORE(v, p) PASTE(vstore, LANES)(v, 0, p)
#else
#define WIDE_LOAD(p) *(p)
#define WIDE_STORE(v, p) *(p) = (v)
#endif
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT ON
#endif

KERNEL void product(TENSOR(T, out), TENSOR(X, x), TENSOR(Y, y),
                    const i64 m, const i64 n, const i64 k, /* x is m x k, y is k x n */
                    const i64 x_row, const i64 x_inner, const i64 y_inner, const i64 y_column, /* steps in memory */
                    const i64 batch, const i64 second, /* results: all, and those of the inner axis of two */
                    const i64 x_first, const i64 x_second, const i64 y_first, const i64 y_second,
                    const i64 summed, const i64 x_summed, const i64 y_summed, const i64 length, const i64 splits
#ifdef WINDOWS
                    , const i64 height, const i64 width, const i64 channels, const i64 grid_rows,
                    const i64 grid_columns, const i64 wide_window, const i64 down, const i64 across,
                    const i64 top, const i64 left_edge
#endif
)
{
    POINTER(T, out);
    POINTER(X, x);
    POINTER(Y, y);
    LOCAL COMPUTED(A) left[DEPTH * ROWS];
    LOCAL COMPUTED(A) right[DEPTH * COLUMNS];
    const i64 high_tiles = (m + ROWS - 1) / ROWS, wide_tiles = (n + COLUMNS - 1) / COLUMNS;
    i64 group = GROUP(0);
    const i64 column = group % wide_tiles * COLUMNS;
    group /= wide_tiles;
    const i64 row = group % high_tiles * ROWS;
    group /= high_tiles;
    const i64 split = group % splits, result = group / splits;
    const int item = LOCAL_ITEM(0);
    const int high = item / (COLUMNS / WIDE) * HIGH, wide = item % (COLUMNS / WIDE) * WIDE;
    V sums[HIGH][PARTS];
    UNROLL for (int i = 0; i < HIGH; i++) UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] = 0;
#ifdef WINDOWS
    LOCAL i32 tops[ROWS], lefts[ROWS], downs[DEPTH], acrosses[DEPTH];
    LOCAL i64 images[ROWS], channel_of[DEPTH];
    for (int i = item; i < ROWS; i += ITEMS) {
        const i64 window = row + i < m ? row + i : 0;
        lefts[i] = (i32)(window % grid_columns * across - left_edge);
        tops[i] = (i32)(window / grid_columns % grid_rows * down - top);
        images[i] = window / grid_columns / grid_rows * height * width * channels;
    }
#endif
    const i64 each = (k + length - 1) / length, pieces = each * summed;
    const i64 last = (split + 1) * pieces / splits;
    for (i64 piece = split * pieces / splits; piece < last; piece++) {
        const i64 begin = piece % each * length, end = begin + length < k ? begin + length : k;
        const i64 x_at = result / second * x_first + result % second * x_second + piece / each * x_summed;
        const i64 y_at = result / second * y_first + result % second * y_second + piece / each * y_summed;
        for (i64 at = begin; at < end; at += DEPTH) {
#ifdef WINDOWS
            for (int d = item; d < DEPTH; d += ITEMS) {
                const i64 place = (at + d) / channels;
                channel_of[d] = (at + d) % channels;
                downs[d] = (i32)(place / wide_window);
                acrosses[d] = (i32)(place % wide_window);
            }
            BARRIER;
#endif
            for (int i = item; i < DEPTH * ROWS; i += ITEMS) {
                const int r = X_ALONG ? i / DEPTH : i % ROWS, d = X_ALONG ? i % DEPTH : i / ROWS;
                COMPUTED(A) value = 0;
                if (row + r < m && at + d < end) {
#ifdef WINDOWS
                    const i64 h = tops[r] + downs[d], w = lefts[r] + acrosses[d];
                    if (h >= 0 && h < height && w >= 0 && w < width)
                        value = LOAD(X, x, images[r] + (h * width + w) * channels + channel_of[d]);
#else
                    value = LOAD(X, x, x_at + (row + r) * x_row + (at + d) * x_inner);
#endif
                }
                left[d * ROWS + r] = value;
            }
            for (int i = item; i < DEPTH * COLUMNS; i += ITEMS) {
                const int c = Y_ALONG ? i % COLUMNS : i / DEPTH, d = Y_ALONG ? i / COLUMNS : i % DEPTH;
                COMPUTED(A) value = 0;
                if (column + c < n && at + d < end)
                    value = LOAD(Y, y, y_at + (at + d) * y_inner + (column + c) * y_column);
                right[d * COLUMNS + c] = value;
            }
            BARRIER;
            for (int d = 0; d < DEPTH; d++) {
                V factors[PARTS];
                UNROLL for (int j = 0; j < PARTS; j++)
                    factors[j] = WIDE_LOAD(right + d * COLUMNS + wide + j * LANES);
                UNROLL for (int i = 0; i < HIGH; i++) {
                    const COMPUTED(A) factor = left[d * ROWS + high + i];
                    UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] += factor * factors[j];
                }
            }
            BARRIER;
        }
    }
    out += (split * batch + result) * m * n;
    UNROLL for (int i = 0; i < HIGH; i++) {
        COMPUTED(A) made[WIDE];
        UNROLL for (int j = 0; j < PARTS; j++) WIDE_STORE(sums[i][j], made + j * LANES);
        if (row + high + i < m)
            for (int j = 0; j < WIDE && column + wide + j < n; j++)
                STORE(T, out, (row + high + i) * n + column + wide + j, made[j]);
    }
}
