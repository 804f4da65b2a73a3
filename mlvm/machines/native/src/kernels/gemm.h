/* Matrix products around the tile: what is copied where, and in which order. Included once for each
 * dtype, after tile.h.
 *
 * The loops are Goto's (Goto and van de Geijn, TOMS 2008), with one turned outwards: a strip of rows
 * goes through several blocks of k while its part of C stays in the second-level cache. Panels of B
 * are as wide as a tile; the first strip copies them, just before it uses them. */

typedef struct {
    const int64_t *n; /* as enum Product says */
    const T *x, *y;
    T *out;
    T *strip, *panels; /* scratch: copied rows of x and panels of y */
    int64_t row, rows, column, columns;
    int64_t first_row; /* of `out` */
} OF(Part);

/* --- copying rows of x --- */

/* The strip's tiles are as equally high as can be: tile i begins here. */
static inline int64_t OF(tile_begin)(int64_t i, int64_t tiles, int64_t rows)
{
    int64_t height = rows / tiles, higher = rows % tiles;
    return i * height + (i < higher ? i : higher);
}

/* Rows stay rows. */
static void OF(copy_rows)(T *to, const T *x, int64_t x_row, int64_t rows, int64_t k)
{
    for (int64_t i = 0; i < rows; i++)
        memcpy(to + i * BLOCK_K, x + i * x_row, (size_t)k * sizeof(T));
}

/* What lies side by side for each k is cut into tiles: [k][HEIGHT] each. */
static void OF(copy_columns)(T *to, const T *x, int64_t x_k, int64_t rows, int64_t k, int64_t tiles)
{
    /* A vector may reach beyond a tile, but not beyond the last row of x. */
    int64_t whole = x_k >= 2 * HEIGHT ? k - 1 : 0;
    for (int64_t some = 0; some < k; some += 8)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t begin = OF(tile_begin)(tile, tiles, rows);
            int64_t height = OF(tile_begin)(tile + 1, tiles, rows) - begin;
            int64_t end = some + 8 < k ? some + 8 : k;
            const T *from = x + begin;
            T *panel = to + tile * HEIGHT * BLOCK_K;
            for (int64_t l = some; l < end; l++)
                if (l < whole)
                    for (int v = 0; v < HEIGHT; v += LANES)
                        OF(store)(panel + l * HEIGHT + v, OF(load)(from + l * x_k + v));
                else
                    for (int64_t i = 0; i < height; i++)
                        panel[l * HEIGHT + i] = from[l * x_k + i];
        }
}

/* --- copying panels of y: [k][COLUMNS], with zeros where y has fewer --- */

static void OF(copy_panel)(T *to, const T *y, int64_t y_k, int64_t columns, int64_t k)
{
    if (columns == COLUMNS)
        for (int64_t l = 0; l < k; l++)
            for (int v = 0; v < COLUMNS; v += LANES)
                OF(store)(to + l * COLUMNS + v, OF(load)(y + l * y_k + v));
    else
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < COLUMNS; j++)
                to[l * COLUMNS + j] = j < columns ? y[l * y_k + j] : 0;
}

typedef T OF(Side) __attribute__((vector_size(SQUARE_BYTES)));
typedef T OF(LooseSide) __attribute__((vector_size(SQUARE_BYTES), aligned(sizeof(T)), may_alias));

/* A square of y, whose columns are far apart, becomes rows of a panel. */
static inline void OF(transpose)(T *to, const T *y, int64_t y_column)
{
    OF(Side) r[SQUARE];
    UNROLL for (int j = 0; j < SQUARE; j++)
        r[j] = *(const OF(LooseSide) *)(y + j * y_column);
    OF(TRANSPOSE)(r);
    UNROLL for (int j = 0; j < SQUARE; j++)
        *(OF(LooseSide) *)(to + j * COLUMNS) = r[j];
}

static void OF(transpose_panel)(T *to, const T *y, int64_t y_column, int64_t columns, int64_t k)
{
    for (int64_t j = 0; j < COLUMNS; j += SQUARE) {
        int64_t l = 0;
        if (j + SQUARE <= columns)
            for (; l + SQUARE <= k; l += SQUARE)
                OF(transpose)(to + l * COLUMNS + j, y + j * y_column + l, y_column);
        for (; l < k; l++)
            for (int64_t i = j; i < j + SQUARE; i++)
                to[l * COLUMNS + i] = i < columns ? y[i * y_column + l] : 0;
    }
}

/* --- the loops --- */

/* A tile with fewer columns than its vectors hold goes by way of memory. */
static void OF(narrow_tile)(OF(TileFn) fn, const OF(Tile) *t, int64_t rows, int64_t columns)
{
    _Alignas(64) T whole[ROWS * COLUMNS];
    OF(Tile) local = *t;
    local.c = whole;
    local.c_row = COLUMNS;
    local.add = 0;
    fn(&local);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            T *c = t->c + i * t->c_row + j;
            *c = t->add ? *c + whole[i * COLUMNS + j] : whole[i * COLUMNS + j];
        }
}

/* One block of k of one strip of rows: for each panel of y (jr), for each tile of rows (ir). */
static void OF(strip)(const OF(Part) *part, int64_t block, int64_t row, int64_t rows, int64_t column,
                      int64_t columns, T *panels, int64_t panel_length, int copy)
{
    const int64_t *n = part->n;
    int64_t blocks = (n[K] + BLOCK_K - 1) / BLOCK_K, group = block / blocks;
    int64_t first = block % blocks * BLOCK_K, k = n[K] - first < BLOCK_K ? n[K] - first : BLOCK_K;
    int64_t tiles = (rows + ROWS - 1) / ROWS;
    const T *x = part->x + group * n[X_GROUP] + row * n[X_ROW] + first * n[X_K];
    const T *y = part->y + group * n[Y_GROUP] + column * n[Y_COLUMN] + first * n[Y_K];
    OF(Tile) t = {.k = k, .c_row = n[N], .add = block > 0};
    int64_t a_step = 0; /* from tile to tile, beyond the rows */
    t.a = x;
    t.a_row = n[X_ROW];
    t.a_k = n[X_K];
    if (n[COPY_X]) {
        t.a = part->strip;
        if (n[X_K] == 1) {
            OF(copy_rows)(part->strip, x, n[X_ROW], rows, k);
            t.a_row = BLOCK_K;
            t.a_k = 1;
        } else {
            OF(copy_columns)(part->strip, x, n[X_K], rows, k, tiles);
            t.a_row = 1;
            t.a_k = HEIGHT;
            a_step = HEIGHT * BLOCK_K;
        }
    }
    const T *a = t.a;
    for (int64_t jr = 0; jr < columns; jr += COLUMNS) {
        int64_t width = columns - jr < COLUMNS ? columns - jr : COLUMNS;
        int vectors = width > LANES ? 2 : 1;
        int whole = width == vectors * LANES;
        if (n[COPY_Y] || !whole) {
            T *panel = panels + jr / COLUMNS * panel_length;
            if (copy && n[Y_COLUMN] == 1)
                OF(copy_panel)(panel, y + jr, n[Y_K], width, k);
            else if (copy)
                OF(transpose_panel)(panel, y + jr * n[Y_COLUMN], n[Y_COLUMN], width, k);
            t.b = panel;
            t.b_k = COLUMNS;
        } else {
            t.b = y + jr;
            t.b_k = n[Y_K];
        }
        for (int64_t tile = 0, ir = 0; tile < tiles; tile++) {
            int64_t end = OF(tile_begin)(tile + 1, tiles, rows), height = end - ir;
            OF(TileFn) fn = OF(tiles)[height - 1][vectors - 1];
            t.a = a_step ? a + tile * a_step : a + ir * t.a_row;
            t.c = part->out + (row + ir - part->first_row) * n[N] + column + jr;
            if (whole)
                fn(&t);
            else
                OF(narrow_tile)(fn, &t, height, width);
            ir = end;
        }
    }
}

/* A part of a product: rows row .. row + rows - 1, and columns likewise. */
static void OF(product)(const OF(Part) *part)
{
    const int64_t *n = part->n;
    int64_t blocks = (n[K] + BLOCK_K - 1) / BLOCK_K * n[GROUPS];
    int64_t last_row = part->row + part->rows, last_column = part->column + part->columns;
    int64_t panel_length = COLUMNS * least(n[K], BLOCK_K);
    if (!blocks)
        for (int64_t i = part->row; i < last_row; i++)
            memset(part->out + i * n[N] + part->column, 0, (size_t)part->columns * sizeof(T));
    for (int64_t jc = part->column; jc < last_column; jc += n[COLUMNS_AT_ONCE]) {
        int64_t columns = least(last_column - jc, n[COLUMNS_AT_ONCE]);
        int64_t panels = (columns + COLUMNS - 1) / COLUMNS;
        for (int64_t pc = 0; pc < blocks; pc += n[BLOCKS_AT_ONCE])
            for (int64_t ic = part->row; ic < last_row; ic += n[ROWS_AT_ONCE]) {
                int64_t rows = least(last_row - ic, n[ROWS_AT_ONCE]);
                int64_t end = least(pc + n[BLOCKS_AT_ONCE], blocks);
                for (int64_t block = pc; block < end; block++)
                    if (part->rows <= n[ROWS_AT_ONCE]) /* a panel is used but once */
                        OF(strip)(part, block, ic, rows, jc, columns, part->panels, 0, 1);
                    else
                        OF(strip)(part, block, ic, rows, jc, columns,
                                  part->panels + (block - pc) * panels * panel_length,
                                  panel_length, ic == part->row);
            }
    }
}

/* A unit is UNIT rows or columns of one of the products. */
static int OF(matmul)(const Plan *plan, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = plan->n;
    int64_t length = n[BY_COLUMNS] ? n[N] : n[M], units = (length + n[UNIT] - 1) / n[UNIT];
    OF(Part) part = {.n = n, .rows = n[M], .columns = n[N]};
    part.strip = (T *)scratch;
    part.panels = part.strip + n[STRIP_LENGTH];
    while (begin < end) {
        int64_t product = begin / units, from = begin % units;
        int64_t upto = least(units, from + end - begin);
        int64_t x_offset, y_offset;
        offsets(n, product, &x_offset, &y_offset);
        part.x = (const T *)p[n[X]] + x_offset;
        part.y = (const T *)p[n[Y]] + y_offset;
        part.out = (T *)p[n[OUT]] + product * n[M] * n[N];
        int64_t place = from * n[UNIT], count = least(upto * n[UNIT], length) - place;
        if (n[BY_COLUMNS]) {
            part.column = place;
            part.columns = count;
        } else {
            part.row = place;
            part.rows = count;
        }
        OF(product)(&part);
        begin += upto - from;
    }
    return 0;
}
