/* Matrix products by tiles in local memory and smaller tiles in registers. A group computes ROWS
 * x COLUMNS elements of a result, an item HIGH x WIDE of them, in steps of DEPTH along the
 * contracted axis. That axis is split into pieces of `length`, for each of the `summed` matrices
 * that are added up. The pieces are divided among `splits` groups, which write separate results;
 * a reduction adds these. WINDOWS: the rows of x, or its columns if TRANSPOSED, are windows of
 * volumes, as in a convolution, and are never materialized; results are columns of a single matrix.
 * PHASES: x is convolved with every stride-th element of a kernel y, and the results are a
 * stride apart. X and Y are the dtypes of the operands, A of sums, T of the result. V is LANES
 * values of A. */

#define ITEMS ((ROWS / HIGH) * (COLUMNS / WIDE))
#define PARTS (WIDE / LANES)
#if LANES > 1
#define WIDE_LOAD(p) PASTE(vload, LANES)(0, p)
#define WIDE_STORE(v, p) PASTE(vstore, LANES)(v, 0, p)
#else
#define WIDE_LOAD(p) *(p)
#define WIDE_STORE(v, p) *(p) = (v)
#endif
#if TRANSPOSED
#define OF_WINDOW(r, d) (d)
#define OF_PLACE(r, d) (r)
#else
#define OF_WINDOW(r, d) (r)
#define OF_PLACE(r, d) (d)
#endif
#define ON_AXIS(i, length) (i >= 0 && i < length)
/* Start of a window, and offset of an element in it. */
#define FIND_WINDOW(at, i)                                                                         \
    columns[i] = (i32)((at) % grid_columns * step_column + lead_column);                           \
    rows[i] = (i32)((at) / grid_columns % grid_rows * step_row + lead_row);                        \
    layers[i] = (i32)((at) / grid_columns / grid_rows % grid_layers * step_layer + lead_layer);    \
    images[i] = (at) / grid_columns / grid_rows / grid_layers * depth * height * width * pixel;
#define FIND_PLACE(at, i)                                                                          \
    channel_of[i] = (at) % channels;                                                               \
    across[i] = (i32)((at) / channels % wide_window * apart_column);                               \
    down[i] = (i32)((at) / channels / wide_window % high_window * apart_row);                      \
    along[i] = (i32)((at) / channels / wide_window / high_window * apart_layer);
#ifdef PHASES
#define THREE(name) const i64 name##_layer, const i64 name##_row, const i64 name##_column
/* First kernel element of the phase, and the start of x for it; -1 << 30 is out of range. */
#define FIND_PHASE(axis)                                                                           \
    i64 tap_##axis = 0, lead_##axis = phase_##axis + before_##axis;                                \
    while (tap_##axis < every_##axis && lead_##axis % stride_##axis != 0) {                        \
        tap_##axis++;                                                                              \
        lead_##axis -= dilation_##axis;                                                            \
    }                                                                                              \
    lead_##axis = tap_##axis < every_##axis ? lead_##axis / stride_##axis : -(1 << 30);
/* Position in the kernel of an element of the sum; -1 is past the end. */
DEVICE i64 tap(i64 layer, i64 row, i64 column, THREE(taps), i64 apart) {
    if (layer >= taps_layer || row >= taps_row || column >= taps_column) return -1;
    return ((layer * taps_row + row) * taps_column + column) * apart;
}
#define FIND_TAP(at, i)                                                                            \
    taps[i] = tap(tap_layer + (at) / channels / wide_window / high_window * every_layer,           \
                  tap_row + (at) / channels / wide_window % high_window * every_row,               \
                  tap_column + (at) / channels % wide_window * every_column,                       \
                  taps_layer, taps_row, taps_column, y_inner);
#endif
#ifdef __OPENCL_VERSION__
#pragma OPENCL FP_CONTRACT ON
#endif

KERNEL void product(TENSOR(T, out), TENSOR(X, x), TENSOR(Y, y),
                    const i64 m, const i64 n, const i64 k, /* x is m x k, y is k x n */
                    const i64 x_row, const i64 x_inner, const i64 y_inner, const i64 y_column, /* steps in memory */
                    const i64 batch, const i64 second, /* strides */
                    const i64 x_first, const i64 x_second, const i64 y_first, const i64 y_second,
                    const i64 summed, const i64 x_summed, const i64 y_summed, const i64 length, const i64 splits
#ifdef WINDOWS
                    , const i64 depth, const i64 height, const i64 width, const i64 grid_layers, const i64 grid_rows,
                    const i64 grid_columns, const i64 high_window, const i64 wide_window, const i64 channels,
                    const i64 pixel, const i64 step_layer, const i64 step_row, const i64 step_column,
                    const i64 apart_layer, const i64 apart_row, const i64 apart_column,
#ifdef PHASES
                    THREE(before), const i64 out_row, const i64 out_result,
                    THREE(stride), THREE(dilation), THREE(every), THREE(taps), THREE(made)
#else
                    const i64 lead_layer, const i64 lead_row, const i64 lead_column,
                    const i64 out_row, const i64 out_result
#endif
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
#ifdef PHASES
    LOCAL i64 taps[DEPTH];
    const i64 phase_column = result % stride_column, phase_row = result / stride_column % stride_row;
    const i64 phase_layer = result / stride_column / stride_row % stride_layer;
    FIND_PHASE(layer)
    FIND_PHASE(row)
    FIND_PHASE(column)
#endif
    V sums[HIGH][PARTS];
    UNROLL for (int i = 0; i < HIGH; i++) UNROLL for (int j = 0; j < PARTS; j++) sums[i][j] = 0;
#ifdef WINDOWS
#if TRANSPOSED
    LOCAL i32 layers[DEPTH], rows[DEPTH], columns[DEPTH], along[ROWS], down[ROWS], across[ROWS];
    LOCAL i64 images[DEPTH], channel_of[ROWS];
    for (int i = item; i < ROWS; i += ITEMS) { FIND_PLACE(row + i, i) }
#else
    LOCAL i32 layers[ROWS], rows[ROWS], columns[ROWS], along[DEPTH], down[DEPTH], across[DEPTH];
    LOCAL i64 images[ROWS], channel_of[DEPTH];
    for (int i = item; i < ROWS; i += ITEMS) { FIND_WINDOW(row + i, i) }
#endif
#else
    const i64 out_row = n, out_result = m * n;
#endif
    const i64 each = (k + length - 1) / length, pieces = each * summed;
    const i64 last = (split + 1) * pieces / splits;
    for (i64 piece = split * pieces / splits; piece < last; piece++) {
        const i64 begin = piece % each * length, end = begin + length < k ? begin + length : k;
        const i64 x_at = result / second * x_first + result % second * x_second + piece / each * x_summed;
        const i64 y_at = result / second * y_first + result % second * y_second + piece / each * y_summed;
        for (i64 at = begin; at < end; at += DEPTH) {
#ifdef WINDOWS
#if TRANSPOSED
            for (int i = item; i < DEPTH; i += ITEMS) { FIND_WINDOW(at + i, i) }
#else
            for (int i = item; i < DEPTH; i += ITEMS) { FIND_PLACE(at + i, i) }
#endif
#ifdef PHASES
            for (int i = item; i < DEPTH; i += ITEMS) { FIND_TAP(at + i, i) }
#endif
            BARRIER;
#endif
            for (int i = item; i < DEPTH * ROWS; i += ITEMS) {
                const int r = X_ALONG ? i / DEPTH : i % ROWS, d = X_ALONG ? i % DEPTH : i / ROWS;
                COMPUTED(A) value = 0;
                if (row + r < m && at + d < end) {
#ifdef WINDOWS
                    const int window = OF_WINDOW(r, d), place = OF_PLACE(r, d);
                    i64 layer = layers[window] + along[place], h = rows[window] + down[place];
                    i64 w = columns[window] + across[place];
                    if (ON_AXIS(layer, depth) && ON_AXIS(h, height) && ON_AXIS(w, width))
                        value = LOAD(X, x, x_at + images[window] + ((layer * height + h) * width + w) * pixel
                                               + channel_of[place]);
#else
                    value = LOAD(X, x, x_at + (row + r) * x_row + (at + d) * x_inner);
#endif
                }
                left[d * ROWS + r] = value;
            }
            for (int i = item; i < DEPTH * COLUMNS; i += ITEMS) {
                const int c = Y_ALONG ? i % COLUMNS : i / DEPTH, d = Y_ALONG ? i / COLUMNS : i % DEPTH;
                COMPUTED(A) value = 0;
#ifdef PHASES
                if (column + c < n && at + d < end && taps[d] >= 0)
                    value = LOAD(Y, y, y_at + taps[d] + (at + d) % channels + (column + c) * y_column);
#else
                if (column + c < n && at + d < end)
                    value = LOAD(Y, y, y_at + (at + d) * y_inner + (column + c) * y_column);
#endif
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
#ifdef PHASES
    out += split * (m / grid_columns / grid_rows / grid_layers * made_layer * made_row * made_column) * out_row
           + result / second * out_result;
#else
    out += split * batch * m * n + result * out_result;
#endif
    UNROLL for (int i = 0; i < HIGH; i++) {
        COMPUTED(A) parts[WIDE];
        UNROLL for (int j = 0; j < PARTS; j++) WIDE_STORE(sums[i][j], parts + j * LANES);
        i64 to = row + high + i;
        int is_there = to < m;
#ifdef PHASES
        const i64 w = to % grid_columns * stride_column + phase_column;
        const i64 h = to / grid_columns % grid_rows * stride_row + phase_row;
        const i64 layer = to / grid_columns / grid_rows % grid_layers * stride_layer + phase_layer;
        is_there = is_there && w < made_column && h < made_row && layer < made_layer;
        to = ((to / grid_columns / grid_rows / grid_layers * made_layer + layer) * made_row + h) * made_column + w;
#endif
        if (is_there)
            for (int j = 0; j < WIDE && column + wide + j < n; j++)
                STORE(T, out, to * out_row + column + wide + j, parts[j]);
    }
}
