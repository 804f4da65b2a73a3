/* Matrix products around the tile of tile.h: the loops, and the copies of operands.
 *
 * In:       a KernelCall whose integers are those of names.h (M, N, K, strides, BLOCK ...), p[X] and
 *           p[Y], and scratch memory of STRIP_LENGTH + panels units.
 * Out:      p[OUT], or rows of it for the call that follows in a chain (`Next`).
 * Must hold: the planner (planners/linalg.py) has checked lengths and sized scratch; BLOCK is at most 352;
 *           p[OUT] overlaps no operand. Strides are in elements of type S; copies are units of type T,
 *           each of PACK elements. The order in which an element is summed does not depend on the division.
 * Callers:  linalg.c, which includes this once for each dtype after tile.h and take.h.
 * Locks:    none. Threads run disjoint units, each with separate scratch memory.
 *
 * The loops follow Goto and van de Geijn (TOMS 2008), with one loop moved outwards: a strip of
 * rows is multiplied by several blocks of k while the corresponding part of C stays in the
 * second-level cache. Panels of B are as wide as a tile; the first strip copies them just before it
 * uses them. */

/* Part of a call: some rows and columns of a product of the batch. */
typedef struct {
    const int64_t *n;
    const S *x, *y;
    T *out;            /* first element of the product */
    T *strip, *panels; /* scratch: copied rows of x and panels of y */
    const S *copied;   /* start and number of the rows of x that were copied last */
    int64_t copied_rows;
    int64_t row, rows, column, columns;
    Next *next; /* NULL, or the call that processes rows of the product */
} OF(PartOf);
#define Part OF(PartOf)

/* --- copying rows of x --- */

/* Copy rows. k counts units, here and below. */
static void OF(copy_rows)(T *to, const S *x, int64_t x_row, int64_t rows, int64_t k)
{
    for (int64_t i = 0; i < rows; i++)
        if (sizeof(T) == PACK * sizeof(S))
            memcpy(to + i * k, x + i * x_row, (size_t)k * sizeof(T));
        else
            for (int64_t l = 0; l < k; l++)
                to[i * k + l] = OF(unit)(x + i * x_row + l * PACK, 1);
}

enum { OF(AHEAD) = 16 }; /* rows of x to prefetch, which are far apart */

/* Copy contiguous columns into tiles of [k][height]. The tiles of a strip have heights that are as equal as
 * possible. */
static void OF(copy_columns)(T *to, const S *x, int64_t x_k, int64_t rows, int64_t k, int64_t tiles)
{
    /* Whole vectors read past the end, into the next row of x and the tile, except for the last row. */
    int64_t whole = rows / tiles * 2 >= HEIGHT && x_k >= HEIGHT ? k - 1 : 0;
    for (int64_t some = 0; some < k; some += 8)
        for (int64_t tile = 0, begin = 0, height; tile < tiles; tile++, begin += height) {
            height = rows / tiles + (tile < rows % tiles);
            int64_t l = some, end = least(some + 8, k);
            const S *from = x + begin;
            T *panel = to + begin * k;
            for (int64_t ahead = some + OF(AHEAD); ahead < least(some + OF(AHEAD) + 8, k); ahead++)
                __builtin_prefetch(from + ahead * PACK * x_k);
            for (; l < least(end, whole); l++)
                for (int v = 0; v < HEIGHT; v += LANES)
                    OF(store)(panel + l * height + v, OF(take)(from + l * PACK * x_k + v, x_k));
            for (; l < end; l++)
                for (int64_t i = 0; i < height; i++)
                    panel[l * height + i] = OF(unit)(from + l * PACK * x_k + i, x_k);
        }
}

/* --- copying panels of y: [k][COLUMNS], with zeros where y has fewer --- */

static void OF(copy_panel)(T *to, const S *y, int64_t y_k, int64_t columns, int64_t k)
{
    if (columns == COLUMNS)
        for (int64_t l = 0; l < k; l++)
            for (int v = 0; v < COLUMNS; v += LANES)
                OF(store)(to + l * COLUMNS + v, OF(take)(y + l * PACK * y_k + v, y_k));
    else
        for (int64_t l = 0; l < k; l++)
            for (int64_t j = 0; j < COLUMNS; j++)
                to[l * COLUMNS + j] = j < columns ? OF(unit)(y + l * PACK * y_k + j, y_k) : 0;
}

/* Transpose a square of y, with columns that are far apart, to rows of a panel. */
static inline void OF(transpose)(T *to, const S *y, int64_t y_column)
{
    OF(Side) r[SQUARE];
    UNROLL_FOR (int j = 0; j < SQUARE; j++)
        r[j] = OF(take_side)(y + j * y_column);
    OF(TRANSPOSE)(r);
    UNROLL_FOR (int j = 0; j < SQUARE; j++)
        *(OF(LooseSide) *)(to + j * COLUMNS) = r[j];
}

static void OF(transpose_panel)(T *to, const S *y, int64_t y_column, int64_t columns, int64_t k)
{
    for (int64_t j = 0; j < COLUMNS; j += SQUARE) {
        int64_t l = 0;
        if (j + SQUARE <= columns)
            for (; l + SQUARE <= k; l += SQUARE)
                OF(transpose)(to + l * COLUMNS + j, y + j * y_column + l * PACK, y_column);
        for (; l < k; l++)
            for (int64_t i = j; i < j + SQUARE; i++)
                to[l * COLUMNS + i] = i < columns ? OF(unit)(y + i * y_column + l * PACK, 1) : 0;
    }
}

/* Copy rows of y in runs of RUN_Y elements, last run first; runs are RUN_STEP elements apart. */
static void OF(copy_runs)(T *to, const S *y, const int64_t *n, int64_t column, int64_t columns,
                          int64_t first, int64_t k)
{
    const int64_t last = n[K] / n[RUN_Y] - 1;
    for (int64_t l = 0; l < k;) {
        int64_t at = (first + l) % n[RUN_Y], some = least(n[RUN_Y] - at, k - l);
        const S *from = y + (last - (first + l) / n[RUN_Y]) * n[RUN_STEP] + at;
        OF(transpose_panel)(to + l * COLUMNS, from + column * n[Y_COLUMN], n[Y_COLUMN], columns, some);
        l += some;
    }
}

/* Address in packed y of the columns from `column` on, at element `first` of k. */
static inline const T *OF(packed)(const int64_t *n, const S *y, int64_t column, int64_t first)
{
    const int64_t row = first * (int64_t)sizeof(S) / (int64_t)sizeof(T);
    return (const T *)y + column / n[Y_K] * n[Y_PANEL] + row * n[Y_K] + column % n[Y_K];
}

/* Convert packed pairs of bf16 for k and k + 1 to f32. Other panels are read in place. */
static void OF(widen_panel)(T *to, const T *packed, int64_t y_k, int64_t k)
{
#if HALVES && PACK == 1
    for (int64_t l = 0; l < k; l++)
        for (int v = 0; v < COLUMNS; v += LANES) {
            const OF(Bits) both = *(const OF(Pairs) *)(packed + l / 2 * y_k + v);
            OF(store)(to + l * COLUMNS + v, (V)(l % 2 ? both & 0xffff0000 : both << 16));
        }
#else
    (void)to, (void)packed, (void)y_k, (void)k;
#endif
}

/* --- the loops --- */

/* Compute a tile with fewer columns than its vectors through a buffer. */
static void OF(narrow_tile)(TileFn fn, const Tile *t, int64_t rows, int64_t columns)
{
    _Alignas(64) T whole[ROWS * COLUMNS];
    Tile local = *t;
    local.c = whole;
    local.c_row = COLUMNS;
    local.add = 0;
    fn(&local);
    for (int64_t i = 0; i < rows; i++) {
        T *c = t->c + i * t->c_row, *sum = whole + i * COLUMNS;
        for (int64_t j = 0; t->add && j < columns; j++)
            sum[j] = c[j] + sum[j];
        copy_run((char *)c, (const char *)sum, columns * (int64_t)sizeof(T));
    }
}

/* Position of a pixel if pixels are `sparse` apart; -1 if there is none. */
static inline int64_t OF(pixel)(int64_t at, int64_t sparse, int64_t length)
{
    if (sparse > 1) {
        if (at < 0 || at % sparse)
            return -1;
        at /= sparse;
    }
    return at < 0 || at >= length ? -1 : at;
}

/* Copy the elements first .. first + k - 1 of some windows over images, with zeros outside of the
 * images. */
static void OF(gather_rows)(T *to, const S *x, const int64_t *w, int64_t row, int64_t rows, int64_t first,
                            int64_t k)
{
    const int64_t channels = w[CHANNELS], run = w[RUN], runs = w[RUNS], line = runs * run;
    const int64_t height = w[IMAGE_HEIGHT], image_line = w[IMAGE_WIDTH] * channels;
    const int64_t sparse = w[SPARSE_ACROSS], apart_down = w[APART_DOWN], tall = w[WINDOW_HEIGHT];
    const int64_t apart_across = w[APART_ACROSS], dense_down = w[SPARSE_DOWN] == 1;
    const int64_t first_z = first / line / tall, first_a = first / line % tall;
    const int64_t first_b = first % line / run;
    int64_t across = row % w[GRID_WIDTH], down = row / w[GRID_WIDTH];
    int64_t behind = down / w[GRID_HEIGHT], image = behind / w[GRID_DEPTH];
    down %= w[GRID_HEIGHT];
    behind %= w[GRID_DEPTH];
    for (; rows > 0; rows--) {
        const int64_t left = across * w[STRIDE_ACROSS] - w[PAD_LEFT];
        const int64_t top = down * w[STRIDE_DOWN] - w[PAD_TOP];
        const T *const end = to + k;
        int64_t b = first_b, skip = first % run;
        for (int64_t z = first_z, a = first_a; to < end; z++, a = 0) {
            int64_t plane = behind * w[STRIDE_BEHIND] - w[PAD_FRONT] + z * w[APART_BEHIND];
            plane = OF(pixel)(plane, w[SPARSE_BEHIND], w[IMAGE_DEPTH]);
            const S *planes = x + (image * w[IMAGE_DEPTH] + plane) * height * image_line;
            for (; a < tall && to < end; a++, b = 0) { /* lines of a window */
                int64_t y = top + a * apart_down;
                y = dense_down && y < height ? y : OF(pixel)(y, w[SPARSE_DOWN], height);
                const S *pixels = planes + y * image_line;
                const int outside = y < 0 || plane < 0;
                for (; b < runs && to < end; b++, skip = 0) {
                    int64_t column = left + b * apart_across, count = least(run - skip, end - to);
                    if (sparse > 1)
                        column = OF(pixel)(column, sparse, w[IMAGE_WIDTH]);
                    const int64_t from = column * channels + skip;
                    if (sizeof(S) == sizeof(T) && !outside && from >= 0 && from + count <= image_line) {
                        copy_run((char *)to, (const char *)(pixels + from), count * (int64_t)sizeof(T));
                        to += count;
                        continue;
                    }
                    for (int64_t l = from; l < from + count; l++)
                        *to++ = outside || l < 0 || l >= image_line ? 0 : OF(unit)(pixels + l, 1);
                }
            }
        }
        if (++across == w[GRID_WIDTH]) {
            across = 0;
            if (++down == w[GRID_HEIGHT]) {
                down = 0;
                if (++behind == w[GRID_DEPTH]) {
                    behind = 0;
                    image++;
                }
            }
        }
    }
}

/* Copy lines of an image that the windows of some lines of the grid cover, with zeros outside of it. */
static void OF(copy_lines)(T *to, const S *x, const int64_t *w, int64_t row, int64_t rows)
{
    const int64_t length = w[LINE], image_line = w[IMAGE_WIDTH] * w[CHANNELS];
    const int64_t left = w[PAD_LEFT] * w[CHANNELS], skip = left < 0 ? -left : 0;
    const int64_t begin = least(left + skip, length), some = least(length - begin, image_line - skip);
    const int64_t line = row / w[GRID_WIDTH], image = line / w[GRID_HEIGHT];
    int64_t y = line % w[GRID_HEIGHT] * w[STRIDE_DOWN] - w[PAD_TOP];
    const int64_t last = y + (rows / w[GRID_WIDTH] - 1) * w[STRIDE_DOWN] +
                         (w[WINDOW_HEIGHT] - 1) * w[APART_DOWN];
    for (; y <= last; y++, to += length) {
        const int64_t count = y < 0 || y >= w[IMAGE_HEIGHT] || some < 0 ? 0 : some;
        const S *from = x + (image * w[IMAGE_HEIGHT] + y) * image_line + skip;
        for (int64_t l = 0; l < begin; l++)
            to[l] = 0;
        for (int64_t l = 0; l < count; l++)
            to[begin + l] = OF(unit)(from + l, 1);
        for (int64_t l = begin + count; l < length; l++)
            to[l] = 0;
    }
}

/* Find the runs of the elements first .. first + k - 1 of a window in copied lines. Return the number of runs. */
static int64_t OF(runs_of)(Run *run, const int64_t *w, int64_t first, int64_t k)
{
    int64_t count = 0;
    for (int64_t l = first, end = first + k; l < end; l += run[count++].length) {
        const int64_t skip = l % w[RUN], b = l / w[RUN] % w[RUNS], a = l / w[RUN] / w[RUNS];
        run[count].at = a * w[APART_DOWN] * w[LINE] + b * w[APART_ACROSS] * w[CHANNELS] + skip;
        run[count].length = least(w[RUN] - skip, end - l);
    }
    return count;
}

/* A strip of rows, restricted to one block of k. */
typedef struct {
    int64_t block; /* number, counted over all groups */
    int64_t row, rows, column, columns;
    T *panels; /* memory for all panels, panel_length apart */
    int64_t panel_length;
    int copy;  /* whether to copy the panels */
    int fresh; /* whether to copy the lines of images */
} OF(StripOf);
#define Strip OF(StripOf)

/* Multiply a strip: for each panel of y (jr), for each line of rows, for each tile of rows (ir). */
static void OF(strip)(Part *part, const Strip *strip)
{
    const int64_t *n = part->n, block = strip->block, row = strip->row, rows = strip->rows;
    const int64_t column = strip->column, columns = strip->columns, panel_length = strip->panel_length;
    const int copy = strip->copy;
    int64_t blocks = (n[K] + n[BLOCK] - 1) / n[BLOCK], group = block / blocks;
    int64_t first = block % blocks * n[BLOCK], k = least(n[K] - first, n[BLOCK]) / PACK;
    const int in_lines = n[COPY_X] == LINES;
    int64_t line = in_lines ? n[GRID_WIDTH] : rows, tiles = (line + ROWS - 1) / ROWS;
    const S *x = part->x + group * n[X_GROUP] + row * n[X_ROW] + first * n[X_K];
    const S *y = part->y + group * n[Y_GROUP] + column * n[Y_COLUMN] + first * n[Y_K];
    int64_t row_step = n[X_K] == 1 ? n[X_ROW] / PACK : n[X_ROW]; /* distance between tiles */
    const T *from = (const T *)x;
    Run runs[MOST_RUNS];
    runs[0] = (Run){0, k};
    Tile t = {.runs = 1, .run = runs, .a_row = row_step, .a_k = n[X_K], .c_row = n[OUT_ROW]};
    t.add = block > 0 || n[TOTAL];
    t.far = (n[OUT] < 0 ? n[ROWS_AT_ONCE] : n[M]) * n[N] * (int64_t)sizeof(T) > 1 << 18;
    const int by_columns = n[COPY_X] == GATHER && n[X_K] != 1; /* whether windows are columns */
    const int64_t last_row = part->next ? row + rows : part->row + part->rows;
    if (in_lines) {
        if (strip->fresh)
            OF(copy_lines)(part->strip, part->x, n, row, rows);
        t.runs = OF(runs_of)(runs, n, first, k);
        t.a_row = row_step = n[STRIDE_ACROSS] * n[CHANNELS];
        from = part->strip;
    } else if (by_columns) {
        OF(gather_rows)(part->strip, part->x, n, group * n[K] + first, k, row, rows);
        from = part->strip;
        t.a_k = rows;
    } else if (n[COPY_X]) {
        if (n[COPY_X] == GATHER)
            OF(gather_rows)(part->strip, part->x, n, row, rows, first, k);
        else if (x == part->copied && rows == part->copied_rows)
            ; /* the next product has the same factor x */
        else if (n[X_K] == 1)
            OF(copy_rows)(part->strip, x, n[X_ROW], rows, k);
        else
            OF(copy_columns)(part->strip, x, n[X_K], rows, k, tiles);
        part->copied = x;
        part->copied_rows = rows;
        from = part->strip;
        row_step = k;
        if (n[X_K] == 1)
            t.a_row = k;
    }
    const int64_t least_height = line / tiles, higher = line % tiles;
    const int64_t together = row_step == k ? ROWS : 1; /* contiguous rows */
    const int small = k * columns * (int64_t)sizeof(T) < 1 << 18;
    const int64_t some = (k + tiles - 1) / tiles, across = n[Y_COLUMN] * (int64_t)sizeof(S);
    /* A narrow last panel comes first, because its vectors may write beyond the end of a row: the elements
     * there are computed later, unless the tile has the last rows. */
    const int64_t last = (columns - 1) / COLUMNS * COLUMNS, narrow = columns % LANES;
    for (int64_t done = 0; done < columns; done += COLUMNS) {
        const int64_t jr = !narrow ? done : done ? done - COLUMNS : last;
        const int64_t width = least(columns - jr, COLUMNS);
        int vectors = width > LANES ? 2 : 1, whole = width == vectors * LANES;
        const S *panel_of = y + jr * n[Y_COLUMN];
        t.b = n[Y_PANEL] ? OF(packed)(n, part->y, column + jr, first) : (const T *)panel_of;
        t.b_k = n[Y_K];
        if (n[COPY_Y] || (!whole && !n[Y_PANEL])) {
            T *panel = strip->panels + jr / COLUMNS * panel_length;
            if (copy && n[Y_PANEL])
                OF(widen_panel)(panel, t.b, n[Y_K], k);
            else if (copy && n[RUN_Y])
                OF(copy_runs)(panel, part->y, n, column + jr, width, first, k);
            else if (copy && n[Y_COLUMN] == 1)
                OF(copy_panel)(panel, panel_of, n[Y_K], width, k);
            else if (copy)
                OF(transpose_panel)(panel, panel_of, n[Y_COLUMN], width, k);
            t.b = panel;
            t.b_k = COLUMNS;
        }
        /* Prefetch the next panel, or the source of it, while this panel is read: `lines` cache
         * lines, one per row, or per column if columns are far apart; and `beside` further lines if
         * a copy is not contiguous. A small y is already cached. */
        int64_t lines = small || jr + 2 * COLUMNS > columns ? 0 : k, down = n[Y_K] * (int64_t)sizeof(T);
        const char *next;
        int64_t beside = 0;
        int apart = 0;
        if (n[COPY_Y] && !copy) {
            next = (const char *)(t.b + panel_length);
            down = COLUMNS * (int64_t)sizeof(T);
        } else if (n[Y_PANEL]) {
            next = (const char *)OF(packed)(n, part->y, column + jr + COLUMNS, first);
        } else {
            next = (const char *)(panel_of + COLUMNS * n[Y_COLUMN]);
            down = n[Y_K] * PACK * (int64_t)sizeof(S);
            apart = n[Y_COLUMN] != 1;
            lines = n[RUN_Y] ? 0 : lines;
            if (COLUMNS * sizeof(T) > 64) /* a row of a panel has two lines, or covers two rows of y */
                beside = apart ? k / COLUMNS * 64 : PACK > 1 ? n[Y_K] * (int64_t)sizeof(S) : 64;
        }
        const T *a = from;
        for (int64_t begin = 0; begin < rows; begin += line, a += n[STRIDE_DOWN] * n[LINE])
            for (int64_t tile = 0, ir = 0; tile < tiles; tile++) {
                const int64_t height = least_height + (tile < higher), end = ir + height;
                TileFn fn = OF(tiles)[height - 1][vectors - 1];
                t.a = a + ir * row_step;
                if (!n[COPY_X] && n[X_K] == 1 && !done) /* prefetch the next tile's short rows */
                    for (int64_t i = 0; i < height; i += together)
                        for (int64_t l = 0; l < together * k; l += 64 / (int64_t)sizeof(T))
                            __builtin_prefetch(t.a + (height + i) * row_step + l);
                for (int64_t l = tile * some; begin == 0 && l < least((tile + 1) * some, lines); l++) {
                    const char *at = next + (apart ? l % COLUMNS * across + l / COLUMNS * 64 : l * down);
                    __builtin_prefetch(at, 0, 2);
                    if (beside)
                        __builtin_prefetch(at + beside, 0, 2);
                }
                if (n[COPY_X] && n[X_K] != 1 && !by_columns)
                    t.a_k = height;
                t.c = part->out + (row + begin + ir) * n[OUT_ROW] + column + jr;
                const int64_t after = (last_row - row - begin - end) * columns;
                if (whole || (!t.add && t.c_row == columns && after >= COLUMNS))
                    fn(&t);
                else
                    OF(narrow_tile)(fn, &t, height, width);
                ir = end;
            }
    }
}

/* Multiply this part's rows and columns. Loops, outermost first: columns (jc), blocks of k (pc), rows (ic). */
static int OF(product)(Part *part)
{
    const int64_t *n = part->n;
    int64_t blocks = n[K] ? (n[K] + n[BLOCK] - 1) / n[BLOCK] * n[GROUPS] : 0;
    int64_t last_row = part->row + part->rows, last_column = part->column + part->columns;
    int64_t panel_length = COLUMNS * least(n[K], n[BLOCK]) / PACK;
    /* A strip of lines belongs to one image. */
    const int64_t image = n[COPY_X] == LINES ? n[GRID_HEIGHT] * n[GRID_WIDTH] : 0;
    int once = part->rows <= n[ROWS_AT_ONCE] && /* a panel is used by only one strip */
               (!image || part->row % image + part->rows <= image);
    for (int64_t jc = part->column; jc < last_column; jc += n[COLUMNS_AT_ONCE]) {
        int64_t columns = least(last_column - jc, n[COLUMNS_AT_ONCE]);
        int64_t all = (columns + COLUMNS - 1) / COLUMNS * panel_length;
        Strip strip = {.column = jc, .columns = columns, .panel_length = once ? 0 : panel_length};
        for (int64_t pc = 0; pc == 0 || pc < blocks; pc += n[BLOCKS_AT_ONCE])
            for (int64_t ic = part->row, rows; ic < last_row; ic += rows) {
                rows = least(last_row - ic, n[ROWS_AT_ONCE]);
                if (image)
                    rows = least(rows, image - ic % image);
                int64_t end = least(pc + n[BLOCKS_AT_ONCE], blocks);
                if (part->next)
                    part->out = begin_rows(part->next, part->out, ic);
                strip.row = ic;
                strip.rows = rows;
                strip.copy = once || ic == part->row;
                for (int64_t block = pc; block < end; block++) {
                    strip.block = block;
                    strip.panels = part->panels + (once ? 0 : (block - pc) * all);
                    strip.fresh = block == pc;
                    OF(strip)(part, &strip);
                }
                for (int64_t i = ic; !blocks && !n[TOTAL] && i < ic + rows; i++)
                    memset(part->out + i * n[OUT_ROW] + jc, 0, (size_t)columns * sizeof(T));
                if (part->next && end_rows(part->next, ic, rows))
                    return 1;
            }
    }
    return 0;
}

/* A unit is UNIT rows or columns of one of the products. */
static int OF(units)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch,
                     Next *next)
{
    const int64_t *n = call->ints;
    int64_t length = n[BY_COLUMNS] ? n[N] : n[M], units = (length + n[UNIT] - 1) / n[UNIT];
    Part part = {.n = n, .rows = n[M], .columns = n[N], .next = next};
    part.strip = (T *)scratch;
    part.panels = part.strip + n[STRIP_LENGTH];
    while (begin < end) {
        int64_t product = begin / units, from = begin % units, x_offset, y_offset;
        int64_t upto = least(units, from + end - begin), place = from * n[UNIT];
        offsets(n, product, &x_offset, &y_offset);
        part.x = (const S *)p[n[X]] + x_offset;
        part.y = (const S *)p[n[Y]] + y_offset;
        part.out = n[OUT] < 0 ? NULL : (T *)p[n[OUT]] + product * n[OUT_PRODUCT];
        if (n[BY_COLUMNS]) {
            part.column = place;
            part.columns = least(upto * n[UNIT], length) - place;
        } else {
            part.row = place;
            part.rows = least(upto * n[UNIT], length) - place;
        }
        if (next)
            next->first_row = product * n[M];
        if (n[TOTAL]) /* units are rows of a product */
            memmove(part.out + place * n[OUT_ROW], (T *)p[n[TOTAL]] + place * n[OUT_ROW],
                    (size_t)(part.rows * n[OUT_ROW]) * sizeof(T));
        if (OF(product)(&part))
            return 1;
        begin += upto - from;
    }
    return 0;
}

static int OF(matmul)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    return OF(units)(call, p, begin, end, scratch, NULL);
}

/* The call has a child. The child's units are rows of all products, and its parameters are those of the
 * call, then (if OUT is -1) the product, of which only the rows of a strip are in memory. */
static int OF(matmul_chain)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                            char *scratch)
{
    const int64_t *n = call->ints;
    char *q[MOST_PARAMETERS + 2];
    Next next = {.child = call->children[0], .p = q, .row_bytes = n[N] * (int64_t)sizeof(T)};
    memcpy(q, p, (size_t)(call->nparams + 1) * sizeof *q);
    next.product = &q[call->nparams];
    next.scratch = scratch + n[CHILD_SCRATCH];
    next.strip = n[OUT] < 0 ? scratch + n[PRODUCT_SCRATCH] : NULL;
    return OF(units)(call, p, begin, end, scratch, &next);
}

/* --- vectors --- */

enum { OF(AT_ONCE) = 2048 }; /* columns that are summed together */

/* M is 1, and rows of y are packed: add the rows, times the elements of x. A unit is UNIT columns. The
 * order of the sums is the order in tiles. The last vector overlaps the one before, with separate sums. */
static void OF(add_rows)(T *sum, const T *x, const S *y, int64_t y_k, int64_t columns, int64_t k)
{
    const int64_t step = PACK * y_k, last = columns - LANES;
    int64_t l = 0, j;
    for (; l + 4 <= k; l += 4, y += 4 * step) {
        const V x0 = OF(SPREAD)(x[l]), x1 = OF(SPREAD)(x[l + 1]);
        const V x2 = OF(SPREAD)(x[l + 2]), x3 = OF(SPREAD)(x[l + 3]);
        for (j = 0; j < columns; j += LANES) {
            const S *from = y + least(j, last);
            V s = OF(load)(sum + j);
            s = OF(FMA)(x0, OF(take)(from, y_k), s);
            s = OF(FMA)(x1, OF(take)(from + step, y_k), s);
            s = OF(FMA)(x2, OF(take)(from + 2 * step, y_k), s);
            OF(store)(sum + j, OF(FMA)(x3, OF(take)(from + 3 * step, y_k), s));
        }
    }
    for (; l < k; l++, y += step) {
        const V factor = OF(SPREAD)(x[l]);
        for (j = 0; j < columns; j += LANES)
            OF(store)(sum + j, OF(FMA)(factor, OF(take)(y + least(j, last), y_k), OF(load)(sum + j)));
    }
}

/* The same for less than a vector of columns. */
static void OF(add_narrow)(T *sum, const T *x, const S *y, int64_t y_k, int64_t columns, int64_t k)
{
    V total = {0};
    for (int64_t l = 0; l < k; l++, y += PACK * y_k) {
        _Alignas(64) T row[LANES] = {0};
        for (int64_t j = 0; j < columns; j++)
            row[j] = OF(unit)(y + j, y_k);
        total = OF(FMA)(OF(SPREAD)(x[l]), OF(load)(row), total);
    }
    for (int64_t j = 0; j < columns; j++)
        sum[j] = total[j];
}

#if HALVES
enum { OF(LOADS) = 4, OF(SHORT_RUN) = 512 };

/* The same for bf16: the even and odd columns of a load are split, and summed separately. `ahead`:
 * prefetch the next rows. */
SPECIALIZED void OF(add_loads)(T *sum, const V *factor, const S *y, int64_t y_k, const int rows,
                               const int loads, const int ahead)
{
    V s[2 * OF(LOADS)];
    UNROLL_FOR (int i = 0; i < 2 * loads; i++)
        s[i] = OF(load)(sum + i * LANES);
    UNROLL_FOR (int r = 0; r < rows; r++) {
        const S *from = y + r * PACK * y_k;
        for (int i = 0; i < ahead * PACK; i++)
            UNROLL_FOR (int at = 0; at < loads * VECTOR_BYTES; at += 64)
                __builtin_prefetch((const char *)(from + (rows * PACK + i) * y_k) + at);
        UNROLL_FOR (int i = 0; i < loads; i++) {
            V even, odd;
            OF(take_apart)(from + i * 2 * LANES, y_k, &even, &odd);
            s[2 * i] = OF(FMA)(factor[r], even, s[2 * i]);
            s[2 * i + 1] = OF(FMA)(factor[r], odd, s[2 * i + 1]);
        }
    }
    UNROLL_FOR (int i = 0; i < 2 * loads; i++)
        OF(store)(sum + i * LANES, s[i]);
}

SPECIALIZED void OF(add_apart)(T *sum, const T *x, const S *y, int64_t y_k, int64_t columns, const int rows,
                               const int ahead)
{
    enum { WIDE = 2 * LANES, SOME = OF(LOADS) * WIDE };
    V factor[4];
    UNROLL_FOR (int r = 0; r < rows; r++)
        factor[r] = OF(SPREAD)(x[r]);
    int64_t j = 0;
    for (; j + SOME <= columns; j += SOME)
        OF(add_loads)(sum + j, factor, y + j, y_k, rows, OF(LOADS), ahead);
    for (; j < columns; j += WIDE)
        OF(add_loads)(sum + j, factor, y + least(j, columns - WIDE), y_k, rows, 1, ahead);
}

static void OF(total_apart)(T *total, const T *x, const S *y, int64_t y_k, int64_t columns, int64_t k)
{
    enum { WIDE = 2 * LANES };
    _Alignas(64) T sum[OF(AT_ONCE)], pair[WIDE];
    int64_t l = 0, j = 0;
    memset(sum, 0, (size_t)((columns + WIDE - 1) / WIDE * WIDE) * sizeof(T));
    if (columns < OF(SHORT_RUN) && columns < y_k) /* a row does not fill a cache line */
        for (; l + 8 <= k; l += 4)
            OF(add_apart)(sum, x + l, y + l * PACK * y_k, y_k, columns, 4, 1);
    for (; l + 4 <= k; l += 4)
        OF(add_apart)(sum, x + l, y + l * PACK * y_k, y_k, columns, 4, 0);
    for (; l < k; l++)
        OF(add_apart)(sum, x + l, y + l * PACK * y_k, y_k, columns, 1, 0);
    for (; j < columns; j += WIDE) {
        for (int i = 0; i < LANES; i++) {
            pair[2 * i] = sum[j + i];
            pair[2 * i + 1] = sum[j + LANES + i];
        }
        const int64_t at = least(j, columns - WIDE);
        for (int64_t i = j - at; i < WIDE; i++)
            total[at + i] += pair[i];
    }
}
#endif

/* Add the contribution of a block of k to some columns. */
static void OF(add_block)(T *total, const T *x, const S *y, int64_t y_k, int64_t columns, int64_t k)
{
#if HALVES
    if (columns >= 2 * LANES) {
        OF(total_apart)(total, x, y, y_k, columns, k);
        return;
    }
#endif
    _Alignas(64) T sum[OF(AT_ONCE)];
    const int64_t whole = columns / LANES * LANES, rest = columns - whole;
    memset(sum, 0, (size_t)((columns + LANES - 1) / LANES * LANES) * sizeof(T));
    if (whole)
        OF(add_rows)(sum, x, y, y_k, columns, k);
    else
        OF(add_narrow)(sum, x, y, y_k, columns, k);
    if (whole && rest)
        memmove(sum + whole, sum + whole + LANES - rest, (size_t)rest * sizeof(T));
    for (int64_t j = 0; j < columns; j++)
        total[j] += sum[j];
}

/* Return the units of a row of x, contiguously: in `row`, or in place. */
static inline const T *OF(row_of)(T *row, const S *x, int64_t x_k, int64_t k)
{
    if (sizeof(S) == sizeof(T) && x_k == 1)
        return (const T *)x;
    for (int64_t l = 0; l < k; l++)
        row[l] = OF(unit)(x + l * PACK * x_k, x_k);
    return row;
}

static void OF(row_product)(const int64_t *n, const S *x, const S *y, T *total, int64_t columns)
{
    enum { LONGEST = 512 }; /* BLOCK is smaller */
    T row[LONGEST];
    for (int64_t group = 0; group < n[GROUPS]; group++)
        for (int64_t first = 0; first < n[K]; first += n[BLOCK]) {
            int64_t k = least(n[K] - first, n[BLOCK]) / PACK;
            const S *a = x + group * n[X_GROUP] + first * n[X_K];
            const S *b = y + group * n[Y_GROUP] + first * n[Y_K];
            OF(add_block)(total, OF(row_of)(row, a, n[X_K], k), b, n[Y_K], columns, k);
        }
}

/* M is 1, and columns of y are packed: squares of y are transposed in registers, so an element is also
 * summed in the order of tiles. Two consecutive squares make a cache line; for bf16 one square does,
 * with two elements each. */
SPECIALIZED OF(Side) OF(add_squares)(OF(Side) sum, const T *x, const S *y, int64_t y_column)
{
    OF(Side) r[SQUARE];
#if HALVES && PACK == 1
    UNROLL_FOR (int i = 0; i < SQUARE; i++)
        r[i] = *(const OF(LooseSide) *)(y + i * y_column);
    OF(TRANSPOSE)(r);
    UNROLL_FOR (int i = 0; i < SQUARE; i++) {
        sum = OF(FMA_SIDE)(x[2 * i], (OF(Side))((OF(SideBits))r[i] << 16), sum);
        sum = OF(FMA_SIDE)(x[2 * i + 1], (OF(Side))((OF(SideBits))r[i] & 0xffff0000), sum);
    }
#else
    UNROLL_FOR (int half = 0; half < 2 * SQUARE; half += SQUARE) {
        UNROLL_FOR (int i = 0; i < SQUARE; i++)
            r[i] = OF(take_side)(y + i * y_column + half * PACK);
        OF(TRANSPOSE)(r);
        UNROLL_FOR (int i = 0; i < SQUARE; i++)
            sum = OF(FMA_SIDE)(x[half + i], r[i], sum);
    }
#endif
    return sum;
}

SPECIALIZED void OF(turned_squares)(T *total, const T *x, const S *y, int64_t y_column, int64_t k,
                                    const int squares)
{
    OF(Side) sum[2];
    int64_t l = 0;
    UNROLL_FOR (int s = 0; s < squares; s++)
        sum[s] = (OF(Side)){0};
    for (; l + 2 * SQUARE <= k; l += 2 * SQUARE)
        UNROLL_FOR (int s = 0; s < squares; s++)
            sum[s] = OF(add_squares)(sum[s], x + l, y + s * SQUARE * y_column + l * PACK, y_column);
    for (; l < k; l++)
        for (int s = 0; s < squares; s++) {
            OF(Side) row = {0};
            UNROLL_FOR (int i = 0; i < SQUARE; i++)
                row[i] = OF(unit)(y + (s * SQUARE + i) * y_column + l * PACK, 1);
            sum[s] = OF(FMA_SIDE)(x[l], row, sum[s]);
        }
    UNROLL_FOR (int s = 0; s < squares; s++)
        UNROLL_FOR (int i = 0; i < SQUARE; i++)
            total[s * SQUARE + i] += sum[s][i];
}

/* Process 1, SQUARE or 2 SQUARE complete columns, which are read sequentially. k counts
 * elements. */
SPECIALIZED void OF(turned_columns)(T *total, const T *x, const S *y, int64_t y_column, int64_t k,
                                    int64_t block, const int columns)
{
    for (int64_t first = 0; first < k; first += block) {
        const T *a = x + first / PACK;
        const S *b = y + first;
        const int64_t some = least(k - first, block) / PACK;
        if (columns > 1) {
            OF(turned_squares)(total, a, b, y_column, some, columns / SQUARE);
            continue;
        }
        OF(Side) sum = {0};
        for (int64_t l = 0; l < some; l++) {
            OF(Side) one = {OF(unit)(b + l * PACK, 1)};
            sum = OF(FMA_SIDE)(a[l], one, sum);
        }
        *total += sum[0];
    }
}

static void OF(turned_product)(const int64_t *n, const S *x, const S *y, T *total, int64_t columns)
{
    enum { LONGEST = 4096 };
    T row[LONGEST];
    const int64_t y_column = n[Y_COLUMN], block = n[BLOCK];
    const int64_t span = n[K] <= LONGEST ? n[K] : LONGEST / block * block;
    for (int64_t group = 0; group < n[GROUPS]; group++)
        for (int64_t first = 0; first < n[K]; first += span) {
            const int64_t k = least(n[K] - first, span);
            const T *a = OF(row_of)(row, x + group * n[X_GROUP] + first * n[X_K], n[X_K], k / PACK);
            const S *b = y + group * n[Y_GROUP] + first;
            int64_t j = 0;
            for (; j + 2 * SQUARE <= columns; j += 2 * SQUARE)
                OF(turned_columns)(total + j, a, b + j * y_column, y_column, k, block, 2 * SQUARE);
            for (; j + SQUARE <= columns; j += SQUARE)
                OF(turned_columns)(total + j, a, b + j * y_column, y_column, k, block, SQUARE);
            for (; j < columns; j++)
                OF(turned_columns)(total + j, a, b + j * y_column, y_column, k, block, 1);
        }
}

/* If y is a vector, it is treated as x: compute dot products with some rows. A sum has the same number of
 * lanes in every instruction set, folded in halves. */
enum { OF(DOT) = 64 / sizeof(T) };
typedef T OF(Half) __attribute__((vector_size(16)));
typedef OF(Lane) OF(Mask) __attribute__((vector_size(VECTOR_BYTES), may_alias));

static inline T OF(fold)(const V *sum)
{
    _Alignas(64) V whole[OF(DOT) / LANES];
    OF(Half) *part = (OF(Half) *)whole;
    UNROLL_FOR (int v = 0; v < OF(DOT) / LANES; v++)
        whole[v] = sum[v];
    UNROLL_FOR (int half = 2; half; half /= 2)
        UNROLL_FOR (int i = 0; i < half; i++)
            part[i] += part[i + half];
    return sizeof(T) == 8
               ? part[0][0] + part[0][1]
               : (part[0][0] + part[0][16 / sizeof(T) / 2]) + (part[0][1] + part[0][16 / sizeof(T) - 1]);
}

/* x, padded with zeros; `kept` masks the same lanes of y. k counts units. */
typedef struct {
    const S *x;
    int64_t k;
    _Alignas(64) T end[OF(DOT)];
    _Alignas(64) OF(Lane) masks[OF(DOT)];
} OF(FactorOf);
#define Factor OF(FactorOf)

/* `beyond`: memory after each column may be read. */
SPECIALIZED void OF(dot)(T *out, const Factor *factor, const S *y, int64_t y_column, const int columns,
                         int beyond)
{
    enum { VECTORS = OF(DOT) / LANES };
    V sum[4][VECTORS];
    int64_t l = 0, rest = factor->k % OF(DOT), whole = factor->k - rest;
    UNROLL_FOR (int j = 0; j < columns; j++)
        UNROLL_FOR (int v = 0; v < VECTORS; v++)
            sum[j][v] = (V){0};
    for (; l < whole; l += OF(DOT))
        UNROLL_FOR (int v = 0; v < VECTORS; v++) {
            int64_t at = (l + v * LANES) * PACK;
            V row = OF(take_run)(factor->x + at);
            UNROLL_FOR (int j = 0; j < columns; j++)
                sum[j][v] = OF(FMA)(row, OF(take_run)(y + j * y_column + at), sum[j][v]);
        }
    if (rest)
        UNROLL_FOR (int j = 0; j < columns; j++) {
            _Alignas(64) S copy[OF(DOT) * PACK] = {0};
            const S *from = y + j * y_column + l * PACK;
            if (!beyond)
                from = memcpy(copy, from, (size_t)(rest * PACK) * sizeof(S));
            UNROLL_FOR (int v = 0; v < VECTORS; v++) {
                OF(Mask) bits = (OF(Mask))OF(take_run)(from + v * LANES * PACK);
                bits &= *(const OF(Mask) *)(factor->masks + v * LANES);
                sum[j][v] = OF(FMA)(OF(load)(factor->end + v * LANES), (V)bits, sum[j][v]);
            }
        }
    UNROLL_FOR (int j = 0; j < columns; j++)
        out[j] += OF(fold)(sum[j]);
}

static void OF(dots)(const int64_t *n, const S *x, const S *y, T *total, int64_t columns)
{
    enum { LONGEST = 4096 };
    int64_t y_column = n[Y_COLUMN];
    for (int64_t group = 0; group < n[GROUPS]; group++)
        for (int64_t first = 0; first < n[K]; first += LONGEST) {
            const S *b = y + group * n[Y_GROUP] + first;
            Factor a = {.x = x + group * n[X_GROUP] + first, .k = least(n[K] - first, LONGEST) / PACK};
            /* Number of columns, from j on, that contain the memory after the column j + 3. */
            const int64_t beyond = y_column > 0 ? 4 + (OF(DOT) * PACK + y_column - 2) / y_column
                                                : INT64_MAX;
            int64_t rest = a.k % OF(DOT), j = 0;
            for (int64_t i = 0; i < rest; i++) {
                a.end[i] = OF(unit)(a.x + (a.k - rest + i) * PACK, 1);
                a.masks[i] = -1;
            }
            for (; j + 4 <= columns; j += 4)
                OF(dot)(total + j, &a, b + j * y_column, y_column, 4, beyond <= columns - j);
            for (; j < columns; j++)
                OF(dot)(total + j, &a, b + j * y_column, y_column, 1, 0);
        }
}

static int OF(gemv)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    int64_t units = (n[N] + n[UNIT] - 1) / n[UNIT];
    void (*add)(const int64_t *, const S *, const S *, T *, int64_t) = n[Y_COLUMN] == 1 ? OF(row_product)
                                                                       : n[BY_COLUMNS]  ? OF(turned_product)
                                                                                        : OF(dots);
    (void)scratch;
    while (begin < end) {
        int64_t product = begin / units, from = begin % units, x_offset, y_offset;
        int64_t upto = least(units, from + end - begin), stop = least(upto * n[UNIT], n[N]);
        offsets(n, product, &x_offset, &y_offset);
        for (int64_t j = from * n[UNIT]; j < stop; j += OF(AT_ONCE)) {
            _Alignas(64) T total[OF(AT_ONCE)];
            int64_t columns = least(stop - j, OF(AT_ONCE));
            memset(total, 0, (size_t)columns * sizeof(T));
            add(n, (const S *)p[n[X]] + x_offset, (const S *)p[n[Y]] + y_offset + j * n[Y_COLUMN], total,
                columns);
            OF(put)((S *)p[n[OUT]] + product * n[N] + j, total, columns);
        }
        begin += upto - from;
    }
    return 0;
}
