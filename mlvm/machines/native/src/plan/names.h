/* Numbers that C and Python share, by name. They are defined only here, as enumerations; the extension passes them to
 * Python.
 *
 * file_integers(EACH) lists the integers of a call of the kernels in kernels/file.c, in their order. C reads n[NAME].
 * The planners in Python pass name=..., and omit integers that the kernel does not read. Lists of variable length
 * follow these integers; the kernel's file describes them. */
#ifndef MLVM_NAMES_H
#define MLVM_NAMES_H

#define NAME(name) name,

/* M rows of x times N rows of y, of K bytes each, SIGNED or not. X, Y, X_ZERO, Y_ZERO, OUT: indices of parameters; a
 * zero point with index 0 is absent. MANY: y is packed into panels, PANELS_AT_ONCE of them, and a unit is UNIT rows of
 * x; otherwise a unit is UNIT rows of y. AT_ONCE: number of rows of x that are copied. CHILD_SCRATCH and
 * PRODUCT_SCRATCH are in bytes. Each of the GROUPS of channels has N / GROUPS rows of y. With WINDOWS, rows of x are
 * windows over images, which have the integers of windows. */
/* clang-format off */
#define bytes_integers(EACH)                                                             \
    EACH(M) EACH(N) EACH(K) EACH(UNIT) EACH(AT_ONCE) EACH(X_SIGNED) EACH(Y_SIGNED)       \
    EACH(MANY) EACH(PANELS_AT_ONCE) EACH(X) EACH(Y) EACH(OUT) EACH(X_ZERO) EACH(Y_ZERO)  \
    EACH(CHILD_SCRATCH) EACH(PRODUCT_SCRATCH) EACH(GROUPS) EACH(WINDOWS)                 \
    windows_integers(EACH)
/* UNIT: elements per unit. For a single row, the bytes of an element of each parameter follow; a chain
 * has PIECE and the following. PITCH: distance between the rows of a piece, so that rows of windows need
 * not be packed; the elements between them are computed, but not written. NWINDOWS: number of results
 * that are windows. */
#define chain_integers(EACH)                                                             \
    EACH(ELEMENTS) EACH(UNIT) EACH(PIECE) EACH(NAXES) EACH(NVALUES)       \
    EACH(NLINKS) EACH(PITCH) EACH(NWINDOWS)
/* A parameter, a window of a parameter, or a temporary of a chain; the strides of its axes, in elements, follow.
 * OFFSET: number of elements before the first of a window. */
#define chain_value_integers(EACH) EACH(KIND) EACH(PARAMETER) EACH(SIZE) EACH(PLACE) EACH(OFFSET)
/* A window of result OUT, whose other elements are copied from parameter IN. For each axis its length
 * follows, then the first index, the number of indices and the step of the window. */
#define chain_window_integers(EACH) EACH(WINDOW_OUT) EACH(WINDOW_IN) EACH(WINDOW_BYTES) EACH(WINDOW_AXES)
/* COUNT: elements. EXACT_END: whether the last element of a linspace is exactly its end. `eye` has ROWS
 * of ROW_BYTES, HIGH of them per unit, elements of SIZE bytes, and the bit pattern of one. */
#define creation_integers(EACH)                                                          \
    EACH(COUNT) EACH(START) EACH(STEP) EACH(EXACT_END) EACH(ROW_BYTES) EACH(SIZE)        \
    EACH(ROWS) EACH(HIGH) EACH(DIAGONAL) EACH(ONE)

/* The rows of a call widen and narrow half-precision values. TOGETHER: number of units that run together. SHARED_AT,
 * SCRATCH_AT: offsets of the child's memory. For each parameter follow the KIND, the LENGTH per unit, the COUNT of all
 * elements, and the offset in scratch memory (PLACE). */
#define halves_integers(EACH)                                                            \
    EACH(TOGETHER) EACH(SHARED_AT) EACH(SCRATCH_AT)
#define halves_value_integers(EACH) EACH(KIND) EACH(LENGTH) EACH(COUNT) EACH(PLACE)

/* KIND: dtype of the indices (kernels/elements.h). COUNT: number of indices. LENGTH: length of the indexed axis.
 * BEFORE, BEHIND: number of elements before and after that axis. A unit is PIECE of the BEHIND columns, PIECE of the
 * BEFORE * COUNT rows, or PIECE of the COUNT rows. SIZE: bytes of an element. ONE: bit pattern of the number 1. BY: the
 * operation, such as MULTIPLY. */
#define indexing_integers(EACH)                                                          \
    EACH(KIND) EACH(BEFORE) EACH(COUNT) EACH(LENGTH) EACH(BEHIND) EACH(PIECE) EACH(SIZE) \
    EACH(ONE) EACH(UPDATES) EACH(BY) EACH(STEP_BEFORE) EACH(STEP_COUNT)

/* A box: the parameter that it READS (0: VALUE, a pattern of eight bytes); its offsets in the result and
 * in the operand; planes, rows and columns, in total and per tile; their strides in the result and in
 * the operand; the number of axes around a tile, and which of them count tiles of planes, of rows and of
 * columns (none: the number of axes). A copy: BYTES. A triangle: rows of WIDTH bytes, elements of SIZE,
 * ROWS of a matrix and ROWS_IN_ALL, TILE_ROWS per unit, and whether elements ABOVE the DIAGONAL are
 * kept. */
#define layout_integers(EACH)                                                            \
    EACH(READS) EACH(VALUE) EACH(OUT_AT) EACH(IN_AT) EACH(PLANES) EACH(ROWS)             \
    EACH(COLUMNS) EACH(TILE_PLANES) EACH(TILE_ROWS) EACH(TILE_COLUMNS) EACH(OUT_PLANE)   \
    EACH(OUT_ROW) EACH(OUT_COLUMN) EACH(IN_PLANE) EACH(IN_ROW) EACH(IN_COLUMN)           \
    EACH(NAXES) EACH(AXIS_OF_PLANES) EACH(AXIS_OF_ROWS) EACH(AXIS_OF_COLUMNS)            \
    EACH(BYTES) EACH(WIDTH) EACH(SIZE) EACH(ROWS_IN_ALL) EACH(DIAGONAL) EACH(ABOVE)
/* clang-format on */

/* A product is a sum over GROUPS of products M x K by K x N. Blocks of BLOCK elements of K are added in order, group by
 * group. This order determines all bits; no other number affects them. Strides are in elements; one of the two strides
 * of a matrix is 1. X, Y, OUT: indices of the parameters. UNIT: number of rows or columns per unit. COPY_X, COPY_Y:
 * whether to copy the operand; otherwise it is read in place. STRIP_LENGTH: elements of scratch memory for copied rows,
 * which precede the panels. CHILD_SCRATCH, PRODUCT_SCRATCH: offsets of the following scratch memory, in bytes. AXES:
 * number of batch axes. OUT_ROW, OUT_PRODUCT: distance between rows of the result, and between products. PAST: whether
 * stores bypass the cache. If COPY_X is GATHER, a row of x (a column if X_ROW is 1) is a window over images or volumes:
 * RUN elements of a window are contiguous, and a line of the window has RUNS runs. SPARSE: stride of the pixels, with
 * implicit zeros between them. If COPY_X is LINES, lines of images are copied, LINE elements with padding, and tiles
 * read windows from the copy. RUN_Y: number of rows of y that are read in reverse order, RUN_STEP elements apart; or 0.
 * Y_PANEL: y is packed into panels of Y_K columns (mlvm/core/ops/packed.py); the value is their distance in units of
 * four bytes, or of a longer element; or 0. TOTAL: index of the parameter to which the product is added; or 0. */
/* clang-format off */
#define linalg_integers(EACH)                                                            \
    EACH(M) EACH(N) EACH(K) EACH(GROUPS) EACH(BLOCK) EACH(X_ROW) EACH(X_K) EACH(X_GROUP) \
    EACH(Y_K) EACH(Y_COLUMN) EACH(Y_GROUP) EACH(X) EACH(Y) EACH(OUT) EACH(BY_COLUMNS)    \
    EACH(UNIT) EACH(COPY_X) EACH(COPY_Y) EACH(ROWS_AT_ONCE) EACH(COLUMNS_AT_ONCE)        \
    EACH(BLOCKS_AT_ONCE) EACH(STRIP_LENGTH) EACH(CHILD_SCRATCH) EACH(PRODUCT_SCRATCH)    \
    EACH(OUT_ROW) EACH(OUT_PRODUCT) EACH(PAST) EACH(Y_PANEL) EACH(RUN_Y) EACH(RUN_STEP)   \
    EACH(TOTAL) EACH(CHANNELS) EACH(IMAGE_DEPTH) EACH(IMAGE_HEIGHT) EACH(IMAGE_WIDTH)    \
    EACH(RUN) EACH(RUNS)                                                                 \
    EACH(WINDOW_HEIGHT) EACH(STRIDE_BEHIND) EACH(STRIDE_DOWN) EACH(STRIDE_ACROSS)        \
    EACH(PAD_FRONT) EACH(PAD_TOP) EACH(PAD_LEFT) EACH(APART_BEHIND) EACH(APART_DOWN)     \
    EACH(APART_ACROSS) EACH(SPARSE_BEHIND) EACH(SPARSE_DOWN) EACH(SPARSE_ACROSS)         \
    EACH(GRID_DEPTH) EACH(GRID_HEIGHT) EACH(GRID_WIDTH) EACH(LINE) EACH(AXES)

#define amx_integers(EACH) linalg_integers(EACH)
#define pairs_integers(EACH) linalg_integers(EACH)

/* M rows of x times N rows of weights, of K elements each, with GROUPS scales, or PAIRS of scales and
 * offsets. UNIT: rows of weights. AT_ONCE: rows of x that are copied. MANY: weights are copied to
 * panels. */
#define quantized_integers(EACH)                                                         \
    EACH(M) EACH(N) EACH(K) EACH(GROUPS) EACH(PAIRS) EACH(UNIT) EACH(AT_ONCE) EACH(MANY)

/* COUNT: number of elements. CHANCES: number of probabilities, which repeat. PURPOSE: purpose of a stream. KIND: dtype
 * of the integer that selects a stream, or 0. A random integer is from LOW to LOW + MOST, computed from words of WORD
 * bytes. For normal values, the number of steps inside of each layer follows. */
#define random_integers(EACH)                                                            \
    EACH(COUNT) EACH(CHANCES) EACH(PURPOSE) EACH(KIND) EACH(LOW) EACH(MOST) EACH(WORD)

/* Cells of recurrences, named as in mlvm/core/ops/recurrent.py. */
#define recurrent_cells(EACH) EACH(TANH) EACH(RELU) EACH(LSTM) EACH(GRU)

/* See kernels/reduction.c. LENGTH: length of the reduced inner axis, whose rows are contiguous. ROWS_OUTER: length of
 * the reduced outer axis, with stride STRIDE in elements. PARTS: number of parts of an output, PARTS_OF_LENGTH of them
 * for the same outer rows. PART_ROWS: number of outer rows per part. BLOCKS, WIDTH: number of blocks of columns, and
 * columns per block. CONTIGUOUS: whether unit u is output u, and reads the next LENGTH * INNER elements of x. A call of
 * `each` runs its child once per unit: OUT_BYTES, X_BYTES: distances between the operands of two units. SHARED_AT:
 * offset in scratch memory. */
#define reduction_integers(EACH)                                                         \
    EACH(OUTPUTS) EACH(LENGTH) EACH(INNER) EACH(ROWS_OUTER) EACH(MIDDLE) EACH(STRIDE)    \
    EACH(PARTS) EACH(PARTS_OF_LENGTH) EACH(PART_ROWS) EACH(PART_LENGTH) EACH(BLOCKS)     \
    EACH(WIDTH) EACH(CONTIGUOUS) EACH(OUT_BYTES) EACH(X_BYTES) EACH(SHARED_AT)

/* LENGTH: length of a row. INNER: product of the following axes, in BLOCKS of WIDTH columns. KIND: dtype
 * of labels. COUNT: rows, PART per unit. */
#define rows_integers(EACH)                                                              \
    EACH(LENGTH) EACH(INNER) EACH(BLOCKS) EACH(WIDTH) EACH(KIND) EACH(COUNT) EACH(PART)

/* SIZE: rows and columns of a matrix. COLUMNS: columns of the right-hand side. AXES: number of batch
 * axes, each with three further integers. */
#define solving_integers(EACH) EACH(SIZE) EACH(IS_F64) EACH(UPPER) EACH(COLUMNS) EACH(AXES)

/* LENGTH: length of a row, whose elements are INNER apart. DESCENDING: largest first. COUNT: number of positions to
 * write; FEW: equal to COUNT if only these positions are needed, otherwise 0. A search finds COUNT elements among
 * LENGTH edges; RIGHT: insert after equal edges. */
#define sorting_integers(EACH) EACH(LENGTH) EACH(INNER) EACH(DESCENDING) EACH(COUNT) EACH(FEW) EACH(RIGHT)

/* Height, width and channels of the image, number of windows vertically and horizontally, height and
 * width of the window, strides, dilation (APART), padding above and on the left. BLOCK channels of an
 * image are a unit. */
#define windows_integers(EACH)                                                           \
    EACH(HEIGHT) EACH(WIDTH) EACH(CHANNELS) EACH(DOWN) EACH(ACROSS) EACH(TALL)           \
    EACH(WIDE) EACH(STRIDE_Y) EACH(STRIDE_X) EACH(APART_Y) EACH(APART_X) EACH(TOP)       \
    EACH(LEFT) EACH(BLOCK)
/* clang-format on */
/* The same integers. HEIGHT and WIDTH are the size of the operand that is read, DOWN and ACROSS the size of the result
 * or the cotangent. EACH_GROUP: channels per group. */
#define depthwise_integers(EACH) EACH(IMAGES) EACH(EACH_GROUP) windows_integers(EACH)

/* X(name, number). MOST_...: limits of kernels. */
#define CONSTANTS(X)                                                                                        \
    X(MOST_SMALL, 16)                                                                                       \
    X(MOST_PARAMETERS, 256)                                                                                 \
    X(CHAIN_MOST_AXES, 64)                                                                                  \
    X(CHAIN_MOST_OPERANDS, 16) /* of a row function, with its results */                                    \
    /* Ops on the value x of a line and an operand y: x + y, x - y, y - x, x * y, x / y, y / x. */          \
    X(LINE_ADD, 0)                                                                                          \
    X(LINE_SUBTRACT, 1)                                                                                     \
    X(LINE_SUBTRACT_FROM, 2)                                                                                \
    X(LINE_MULTIPLY, 3)                                                                                     \
    X(LINE_DIVIDE, 4)                                                                                       \
    X(LINE_DIVIDE_BY, 5)                                                                                    \
    X(COPY_UNIT, 4096)        /* bytes */                                                                   \
    X(RANGE_UNIT, 4096)       /* elements */                                                                \
    X(DRAW_UNIT, 256)         /* words */                                                                   \
    X(REDUCTION_WIDEST, 1024) /* columns of a block */                                                      \
    X(ROWS_TOGETHER, 1024)    /* elements that stay in the first-level cache */                             \
    X(ROWS_OF_WORK, 32)       /* columns */                                                                 \
    X(MULTIPLY, 0)                                                                                          \
    X(MINIMUM, 1)                                                                                           \
    X(MAXIMUM, 2)                                                                                           \
    X(GATHER, 2)                                                                                            \
    X(LINES, 3)                                                                                             \
    X(MOST_RUNS, 128)                                                                                       \
    /* How a chain finds a value: a parameter of the chain's shape; one row, or a scalar, repeated in  \
     * scratch memory for the rows of a piece; any other parameter, laid out there for each piece;     \
     * what passes between links, in scratch memory. */    \
    X(WHOLE, 0)                                                                                             \
    X(REPEATED, 1)                                                                                          \
    X(SPREAD, 2)                                                                                            \
    X(TEMPORARY, 3)                                                                                         \
    X(SCALAR, 4)  /* BLOCK_BYTES of copies of it, for row functions with steps */                           \
    X(WRITTEN, 5) /* a window of a result */                                                                \
    X(BLOCK_BYTES, 64)                                                                                      \
    X(LINK_BYTES, 48)                                                                                       \
    X(MOST_ITEM, 16) /* bytes of an element */                                                              \
    /* What `halves` does with a parameter: nothing; widens or rounds what some units have; widens all of \
     * it; rounds it when all units are done. */ \
    X(AS_IT_IS, 0)                                                                                          \
    X(PIECES, 1)                                                                                            \
    X(ENTIRE, 2)                                                                                            \
    X(LATER, 3)
#define CONSTANT(name, number) name = number,
enum { CONSTANTS(CONSTANT) };

#endif
