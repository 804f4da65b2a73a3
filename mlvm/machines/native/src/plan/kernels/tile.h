/* The innermost loop of a matrix product: a tile of C in registers. Included once for each dtype,
 * with the C type T, and the macro OF(name) the name with the dtype's suffix.
 *
 * BLIS (Van Zee and van de Geijn, TOMS 2015) calls this the micro-kernel. Each element is summed in
 * the order of k with one accumulator, for any tile size, so tiles may be cut anywhere. */

/* Arguments of a tile: C (+)= A B, with A[i, k] at a[i * a_row + k * a_k] and contiguous columns of B,
 * B[k, j] at b[k * b_k + j]. k is divided into runs, each with its own offset in A. */
typedef struct {
    int64_t at, length;
} OF(RunOf);
#define Run OF(RunOf)
typedef struct {
    int64_t runs;
    const Run *run;
    const T *a;
    int64_t a_row, a_k;
    const T *b;
    int64_t b_k;
    T *c;
    int64_t c_row;
    int add; /* add to C, instead of writing it */
    int far; /* C may not be in the cache */
} OF(TileOf);
#define Tile OF(TileOf)

typedef void (*OF(TileFnOf))(const Tile *);
#define TileFn OF(TileFnOf)

SPECIALIZED void OF(tile)(const Tile *t, const int rows, const int vectors, const int64_t a_row)
{
    V sum[ROWS][2];
    const T *b = t->b;
    const int64_t a_k = t->a_k, b_k = t->b_k;
    const int across = sizeof(V) == 64 ? vectors : 1, lines = rows * across; /* cache lines of C */
    UNROLL_FOR (int i = 0; i < rows; i++)
        UNROLL_FOR (int j = 0; j < vectors; j++)
            sum[i][j] = (V){0};
    for (const Run *run = t->run, *end = run + t->runs; run < end; run++) {
        /* With two pointers, the offsets of rows stay in registers. */
        const T *a = t->a + run->at, *below = a + a_row * (rows / 2);
        /* Prefetch lines of C one by one before the last products: all together would delay the loads of
         * B. */
        const int64_t late = t->far && run + 1 == end ? least(run->length, 64) - lines : INT64_MAX;
        for (int64_t k = run->length; k > 0; k--) {
            if ((uint64_t)(k - late) < (uint64_t)lines)
                __builtin_prefetch(t->c + (k - late) / across * t->c_row + (k - late) % across * LANES, 1);
            V row[2];
            UNROLL_FOR (int j = 0; j < vectors; j++)
                row[j] = OF(load)(b + j * LANES);
            UNROLL_FOR (int i = 0; i < rows; i++) {
                V factor = OF(SPREAD)(i < rows / 2 ? a[i * a_row] : below[(i - rows / 2) * a_row]);
                UNROLL_FOR (int j = 0; j < vectors; j++)
                    sum[i][j] = OF(FMA)(factor, row[j], sum[i][j]);
            }
            a += a_k;
            below += a_k;
            b += b_k;
        }
    }
    T *c = t->c;
    const int64_t c_row = t->c_row;
    if (t->add)
        UNROLL_FOR (int i = 0; i < rows; i++)
            UNROLL_FOR (int j = 0; j < vectors; j++)
                sum[i][j] = OF(load)(c + i * c_row + j * LANES) + sum[i][j];
    UNROLL_FOR (int i = 0; i < rows; i++)
        UNROLL_FOR (int j = 0; j < vectors; j++)
            OF(store)(c + i * c_row + j * LANES, sum[i][j]);
}

/* If rows of A are contiguous for each k, address computation is simpler. */
#define TILE(rows, vectors)                                \
    static void OF(tile_##rows##x##vectors)(const Tile *t) \
    {                                                      \
        if (t->a_row == 1)                                 \
            OF(tile)(t, rows, vectors, 1);                 \
        else                                               \
            OF(tile)(t, rows, vectors, t->a_row);          \
    }
#define TILES(rows) TILE(rows, 1) TILE(rows, 2)
EACH_HEIGHT(TILES)
#undef TILES
#undef TILE
#define TILES(rows) {OF(tile_##rows##x1), OF(tile_##rows##x2)},
static const TileFn OF(tiles)[ROWS][2] = {EACH_HEIGHT(TILES)};
#undef TILES
