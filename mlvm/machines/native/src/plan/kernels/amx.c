/* Matrix products of bf16 in tiles of registers (tiles.h), for the sets of instructions that have them.
 *
 * A block of the result is 32 x 32: two tiles of rows of x by two tiles of columns of y, with
 * elements in pairs of k and k + 1, TILE_DEPTH of k per step. A sum is computed step by step, one
 * group after the other. The rounding does not depend on the division of rows, columns and
 * steps. */
#include "../plan.h"

#if defined(USE_AMX) || defined(AMX_EMULATED)
#include "batch.h"
#include "elements.h"
#include "tiles.h"

enum { SIDE = 32, PANEL_HALVES = 2 * TILE_HALVES };

/* Work of a unit: some rows and columns of a product of the batch. */
typedef struct {
    const int64_t *n;
    const uint16_t *x, *y;
    uint16_t *out;
    uint16_t *strip, *panels; /* scratch: copied rows of x, panels of y */
    float *sums;              /* scratch: sums that are computed in several blocks */
    int64_t row, rows, column, columns;
    Next *next; /* NULL, or the call that processes rows of the product */
} Part;

/* --- copying --- */

static inline uint32_t first_bits(int64_t count)
{
    return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1;
}

/* Load elements k and k + 1 of 16 contiguous rows or columns; elements from `count` on are zeros.
 * Without `pairs`, all elements of k + 1 are zeros. */
static inline __m512i pairs_of(const uint16_t *from, int64_t step, int64_t count, int pairs)
{
    __mmask16 mask = (__mmask16)first_bits(count > 16 ? 16 : count);
    __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
    if (!pairs)
        return low;
    __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from + step));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* Transpose 16 rows of 16 pairs. */
SPECIALIZED void transpose_pairs(__m512i r[16])
{
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Fill a tile, with rows `to_row` apart, from runs that are `apart`: row i has k elements of run i, then
 * zeros. `turned` transposes it to pairs of columns. `count` of the 16 runs exist. */
SPECIALIZED void tile_of_runs(uint16_t *to, const int to_row, const uint16_t *from, int64_t apart,
                              int64_t count, int64_t k, const int turned)
{
    __m512i r[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
        r[i] = i < count ? _mm512_maskz_loadu_epi16(first_bits(k), from + i * apart)
                         : _mm512_setzero_si512();
    if (turned)
        transpose_pairs(r);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * to_row, r[i]);
}

/* The same for strided runs: consecutive elements of a run are `step` apart. */
SPECIALIZED void tile_of_pairs(uint16_t *to, const int to_row, const uint16_t *from, int64_t step,
                               int64_t count, int64_t k, const int turned)
{
    __m512i r[16];
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++)
        r[i] = 2 * i < k ? pairs_of(from + 2 * i * step, step, count, 2 * i + 1 < k)
                         : _mm512_setzero_si512();
    if (turned)
        transpose_pairs(r);
    _Pragma("GCC unroll 16") for (int i = 0; i < 16; i++) _mm512_store_si512(to + i * to_row, r[i]);
}

/* Copy at most SIDE rows of x, for k elements of a sum: two tiles per step. */
static void copy_x(uint16_t *to, const uint16_t *x, int64_t x_row, int64_t x_k, int64_t rows, int64_t k)
{
    for (int64_t l = 0; l < k; l += TILE_DEPTH)
        for (int64_t i = 0; i < SIDE; i += TILE_ROWS, to += TILE_HALVES) {
            const uint16_t *from = x + i * x_row + l * x_k;
            if (i >= rows)
                continue; /* that tile is not read */
            if (x_k == 1)
                tile_of_runs(to, TILE_DEPTH, from, x_row, rows - i, k - l, 0);
            else
                tile_of_pairs(to, TILE_DEPTH, from, x_k, rows - i, k - l, 1);
        }
}

/* Copy at most SIDE columns of y in the same way: two adjacent tiles of pairs per step, a panel in the
 * format of `pack_panels`. */
static void copy_y(uint16_t *to, const uint16_t *y, int64_t y_k, int64_t y_column, int64_t columns,
                   int64_t k)
{
    for (int64_t l = 0; l < k; l += TILE_DEPTH, to += PANEL_HALVES)
        for (int64_t j = 0; j < columns; j += TILE_ROWS) {
            const uint16_t *from = y + l * y_k + j * y_column;
            if (y_column == 1)
                tile_of_pairs(to + 2 * j, 2 * SIDE, from, y_k, columns - j, k - l, 0);
            else
                tile_of_runs(to + 2 * j, 2 * SIDE, from, y_column, columns - j, k - l, 1);
        }
}

/* --- the block --- */

/* C (+)= x y, for `high` tiles of rows and `wide` tiles of columns. Rows of x are x_row apart, the
 * second tile of x is at x_tile, and the steps of x are x_step apart. Rows of C are c_row apart. */
SPECIALIZED void block_of(const uint16_t *x, int64_t x_row, int64_t x_tile, int64_t x_step,
                          const uint16_t *y, int64_t steps, float *c, int64_t c_row, int add,
                          const int high, const int wide)
{
    const int64_t x_bytes = x_row * 2, c_bytes = c_row * 4;
    float *lower = c + TILE_ROWS * c_row;
    tiles_read(x);
    if (add) {
        TILE_LOAD(0, c, c_bytes);
        if (wide > 1)
            TILE_LOAD(1, c + TILE_ROWS, c_bytes);
        if (high > 1)
            TILE_LOAD(2, lower, c_bytes);
        if (high > 1 && wide > 1)
            TILE_LOAD(3, lower + TILE_ROWS, c_bytes);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (; steps > 0; steps--, x += x_step, y += PANEL_HALVES) {
        TILE_LOAD(6, y, 2 * TILE_ROW_BYTES);
        if (wide > 1)
            TILE_LOAD(7, y + TILE_DEPTH, 2 * TILE_ROW_BYTES);
        TILE_LOAD(4, x, x_bytes);
        TILE_DOT(0, 4, 6);
        if (wide > 1)
            TILE_DOT(1, 4, 7);
        if (high > 1) {
            TILE_LOAD(5, x + x_tile, x_bytes);
            TILE_DOT(2, 5, 6);
            if (wide > 1)
                TILE_DOT(3, 5, 7);
        }
    }
    TILE_STORE(0, c, c_bytes);
    if (wide > 1)
        TILE_STORE(1, c + TILE_ROWS, c_bytes);
    if (high > 1)
        TILE_STORE(2, lower, c_bytes);
    if (high > 1 && wide > 1)
        TILE_STORE(3, lower + TILE_ROWS, c_bytes);
}

#define BLOCK(high, wide)                                                                                 \
    static void block_##high##x##wide(const uint16_t *x, int64_t x_row, int64_t x_tile, int64_t x_step,   \
                                      const uint16_t *y, int64_t steps, float *c, int64_t c_row, int add) \
    {                                                                                                     \
        block_of(x, x_row, x_tile, x_step, y, steps, c, c_row, add, high, wide);                          \
    }
BLOCK(1, 1)
BLOCK(1, 2)
BLOCK(2, 1)
BLOCK(2, 2)
typedef void (*BlockFn)(const uint16_t *, int64_t, int64_t, int64_t, const uint16_t *, int64_t, float *,
                        int64_t, int);
static const BlockFn blocks_of[2][2] = {{block_1x1, block_1x2}, {block_2x1, block_2x2}};

/* --- processing of a block --- */

/* Convert f32 to bf16, to nearest even, as `narrow_bf16` does. */
static inline __m512i rounded_bits(__m512 x)
{
    __m512i bits = _mm512_castps_si512(x), upper = _mm512_srli_epi32(bits, 16);
    __m512i even = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    __m512i more = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), even);
    __m512i nan = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(_mm512_srli_epi32(more, 16), is_nan, nan);
}

static inline __m256i rounded(const float *from)
{
    return _mm512_cvtepi32_epi16(rounded_bits(_mm512_loadu_ps(from)));
}

/* Convert rows of sums to bf16; with `past`, whole cache lines bypass the cache. */
static void round_rows(uint16_t *out, int64_t out_row, const float *sums, int64_t sums_row, int64_t rows,
                       int64_t columns, int past)
{
    for (int64_t i = 0; i < rows; i++, out += out_row, sums += sums_row)
        for (int64_t j = 0; j < columns; j += SIDE) {
            __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(rounded(sums + j)),
                                              rounded(sums + j + 16), 1);
            if (past && columns - j >= SIDE && !((uintptr_t)(out + j) % 64))
                _mm512_stream_si512((void *)(out + j), both);
            else
                _mm512_mask_storeu_epi16(out + j, first_bits(columns - j), both);
        }
}

/* --- the loops --- */

/* Multiply all steps of one block of k into rows of `sums`, which hold whole tiles unless `exact`. */
static void make_block(const uint16_t *x, int64_t x_row, int64_t x_tile, int64_t x_step, const uint16_t *y,
                       int64_t steps, float *sums, int64_t sums_row, int add, int64_t rows, int64_t columns,
                       int exact)
{
    const int high = rows > TILE_ROWS, wide = columns > TILE_ROWS;
    if (!exact || (rows % TILE_ROWS == 0 && columns % TILE_ROWS == 0)) {
        blocks_of[high][wide](x, x_row, x_tile, x_step, y, steps, sums, sums_row, add);
        return;
    }
    _Alignas(64) float whole[SIDE * SIDE] = {0};
    for (int64_t i = 0; add && i < rows; i++)
        memcpy(whole + i * SIDE, sums + i * sums_row, (size_t)columns * sizeof *whole);
    blocks_of[high][wide](x, x_row, x_tile, x_step, y, steps, whole, SIDE, add);
    for (int64_t i = 0; i < rows; i++)
        memcpy(sums + i * sums_row, whole + i * SIDE, (size_t)columns * sizeof *whole);
}

/* Multiply one strip of rows by some columns, for each group and block of k; `copy`: y's panels must be
 * copied first. */
static void make_strip(const Part *part, int64_t row, int64_t rows, int64_t column, int64_t columns,
                       int copy, float *product)
{
    const int64_t *n = part->n;
    const int64_t blocks = (n[K] + n[BLOCK] - 1) / n[BLOCK], all = blocks * n[GROUPS];
    const int64_t steps_of_k = (n[K] + TILE_DEPTH - 1) / TILE_DEPTH;
    const int64_t panel = n[GROUPS] * steps_of_k * PANEL_HALVES;
    const int past = n[PAST] && !product;
    _Alignas(64) float alone[SIDE * SIDE];
    for (int64_t block = 0; block < all; block++) {
        const int64_t group = block / blocks, first = block % blocks * n[BLOCK];
        const int64_t k = least(n[K] - first, n[BLOCK]), steps = (k + TILE_DEPTH - 1) / TILE_DEPTH;
        const uint16_t *x = part->x + group * n[X_GROUP] + row * n[X_ROW] + first * n[X_K];
        const uint16_t *y = part->y + group * n[Y_GROUP] + column * n[Y_COLUMN] + first * n[Y_K];
        uint16_t *panels = n[Y_PANEL] ? (uint16_t *)part->y + column / SIDE * panel : part->panels;
        panels += (group * steps_of_k + first / TILE_DEPTH) * PANEL_HALVES;
        for (int64_t i = 0; i < rows; i += SIDE)
            if (n[COPY_X] || rows - i < SIDE)
                copy_x(part->strip + i * steps * TILE_DEPTH, x + i * n[X_ROW], n[X_ROW], n[X_K],
                       least(rows - i, SIDE), k);
        for (int64_t j = 0; j < columns; j += SIDE, panels += panel) {
            const int64_t width = least(columns - j, SIDE);
            if (copy && !n[Y_PANEL])
                copy_y(panels, y + j * n[Y_COLUMN], n[Y_K], n[Y_COLUMN], width, k);
            for (int64_t i = 0; i < rows; i += SIDE) {
                const int64_t height = least(rows - i, SIDE);
                const int in_place = !n[COPY_X] && height == SIDE, add = block > 0;
                const uint16_t *from = in_place ? x + i * n[X_ROW] : part->strip + i * steps * TILE_DEPTH;
                const int64_t x_row = in_place ? n[X_ROW] : TILE_DEPTH;
                const int64_t x_tile = in_place ? TILE_ROWS * n[X_ROW] : TILE_HALVES;
                const int64_t x_step = in_place ? TILE_DEPTH : PANEL_HALVES;
                float *sums = product    ? product + i * n[N] + j
                              : all == 1 ? alone
                                         : part->sums + i * n[COLUMNS_AT_ONCE] + j;
                const int64_t sums_row = product ? n[N] : all == 1 ? SIDE : n[COLUMNS_AT_ONCE];
                make_block(from, x_row, x_tile, x_step, panels, steps, sums, sums_row, add, height, width,
                           product != NULL);
                if (!product && block == all - 1)
                    round_rows(part->out + (row + i) * n[OUT_ROW] + column + j, n[OUT_ROW], sums, sums_row,
                               height, width, past);
            }
        }
    }
    if (past)
        _mm_sfence();
}

static int make_part(const Part *part)
{
    const int64_t *n = part->n;
    const int64_t last_row = part->row + part->rows, last_column = part->column + part->columns;
    for (int64_t jc = part->column; jc < last_column; jc += n[COLUMNS_AT_ONCE])
        for (int64_t ic = part->row; ic < last_row; ic += n[ROWS_AT_ONCE]) {
            const int64_t rows = least(last_row - ic, n[ROWS_AT_ONCE]);
            float *product = NULL;
            if (part->next) /* the strip has all columns */
                product = (float *)begin_rows(part->next, NULL, ic) + ic * n[N];
            make_strip(part, ic, rows, jc, least(last_column - jc, n[COLUMNS_AT_ONCE]), ic == part->row,
                       product);
            if (part->next && end_rows(part->next, ic, rows))
                return 1;
        }
    return 0;
}

/* A unit is UNIT rows or columns of one of the products. */
static int make_units(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch,
                      Next *next)
{
    const int64_t *n = call->ints;
    const int64_t length = n[BY_COLUMNS] ? n[N] : n[M], units = (length + n[UNIT] - 1) / n[UNIT];
    Part part = {.n = n, .rows = n[M], .columns = n[N], .next = next};
    part.strip = (uint16_t *)scratch;
    part.panels = part.strip + n[STRIP_LENGTH];
    part.sums = (float *)(scratch + n[PRODUCT_SCRATCH]);
    while (begin < end) {
        int64_t product = begin / units, from = begin % units, x_offset, y_offset;
        int64_t upto = least(units, from + end - begin), place = from * n[UNIT];
        int64_t some = least(upto * n[UNIT], length) - place;
        offsets(n, product, &x_offset, &y_offset);
        part.x = (const uint16_t *)p[n[X]] + x_offset;
        part.y = (const uint16_t *)p[n[Y]] + y_offset;
        part.out = next ? NULL : (uint16_t *)p[n[OUT]] + product * n[OUT_PRODUCT];
        *(n[BY_COLUMNS] ? &part.column : &part.row) = place;
        *(n[BY_COLUMNS] ? &part.columns : &part.rows) = some;
        if (next)
            next->first_row = product * n[M];
        if (make_part(&part))
            return 1;
        begin += upto - from;
    }
    return 0;
}

static int matmul_bf16_amx(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                           char *scratch)
{
    tiles_begin();
    make_units(call, p, begin, end, scratch, NULL);
    tiles_end();
    return 0;
}

/* As `matmul_chain_bf16` (gemm.h): the child call receives rows of the product in f32. */
static int matmul_chain_bf16_amx(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                 char *scratch)
{
    const int64_t *n = call->ints;
    char *q[MOST_PARAMETERS + 2];
    Next next = {.child = call->children[0], .p = q, .row_bytes = n[N] * (int64_t)sizeof(float)};
    memcpy(q, p, (size_t)(call->nparams + 1) * sizeof *q);
    next.product = &q[call->nparams];
    next.scratch = scratch + n[CHILD_SCRATCH];
    next.strip = scratch + n[PRODUCT_SCRATCH];
    tiles_begin();
    int refused = make_units(call, p, begin, end, scratch, &next);
    tiles_end();
    return refused;
}

#define AMX_ENTRIES                                \
    KERNEL(matmul_bf16_amx, matmul_bf16_amx, NULL) \
    KERNEL(matmul_chain_bf16_amx, matmul_chain_bf16_amx, NULL)
#else
#define AMX_ENTRIES
#endif

KERNEL_TABLE(amx, AMX_ENTRIES)
