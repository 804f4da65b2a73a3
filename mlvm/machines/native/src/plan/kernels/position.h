/* Position of the extreme of a row: the first of equal extremes, or the first nan. Include it after you define
 *
 *   POSITION(name)  the function's name
 *   EXTREME         the function that finds the extreme itself
 *   BEYOND(x, y)    whether x is nearer to the extreme than y
 */

/* Whether x replaces y, which precedes it. */
#define TAKES(x, y) (BEYOND(x, y) | (IS_NAN(x) & !IS_NAN(y)))

#define IS_IT(x) (((x) == best) | IS_NAN(x))

/* Process W to 2 W elements: the first W and the last W, which may overlap. */
#define FIRST(W)                                                                    \
    if (n >= (W)) {                                                                 \
        const X *last = x + n - (W);                                                \
        int at[W];                                                                  \
        for (int j = 0; j < (W); j++) {                                             \
            const int there = IS_IT(last[j]) ? n - (W) + j : n, here = IS_IT(x[j]); \
            at[j] = here ? j : there;                                               \
        }                                                                           \
        _Pragma("GCC unroll 8") for (int w = (W) / 2; w > 0; w /= 2)                \
        {                                                                           \
            for (int j = 0; j < w; j++)                                             \
                at[j] = at[j] < at[j + w] ? at[j] : at[j + w];                      \
        }                                                                           \
        return at[0];                                                               \
    }

/* Position of `best` or a nan among 1 to 64 elements. */
static int POSITION(first)(const X *x, int n, X best)
{
    FIRST(32)
    FIRST(16)
    FIRST(8)
    FIRST(4)
    FIRST(2)
    return 0;
}

static int64_t POSITION(row)(const X *x, int64_t n)
{
    enum { SEGMENT = 512, STEP = 64 };
    X best = x[0];
    int64_t i = 0;
    for (int64_t k = 0; k < n; k += SEGMENT) {
        const X extreme = EXTREME(x + k, n - k < SEGMENT ? n - k : SEGMENT, 0);
        if (TAKES(extreme, best))
            best = extreme, i = k;
    }
    for (; i + STEP < n; i += STEP) {
        int has_match = 0;
        for (int j = 0; j < STEP; j++)
            has_match |= IS_IT(x[i + j]);
        if (has_match)
            break;
    }
    return i + POSITION(first)(x + i, n - i < STEP ? (int)(n - i) : STEP, best);
}

/* Rows of `width` elements, `stride` apart; the first row has the number `first`. */
static void POSITION(columns)(int64_t *restrict to, const X *x, int64_t rows, int64_t stride, int64_t width,
                              int64_t first, char *scratch)
{
    X *restrict best = (X *)scratch;
    int32_t *restrict at = (int32_t *)(scratch + REDUCTION_WIDEST * sizeof(X));
    for (int64_t j = 0; j < width; j++)
        best[j] = x[j], at[j] = 0;
    for (int32_t r = 1; r < rows; r++) {
        x += stride;
        for (int64_t j = 0; j < width; j++) {
            const int takes = TAKES(x[j], best[j]);
            best[j] = takes ? x[j] : best[j];
            at[j] = takes ? r : at[j];
        }
    }
    for (int64_t j = 0; j < width; j++)
        to[j] = first + at[j];
}

static int POSITION(run)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    const X *x = (const X *)p[1];
    int64_t *out = (int64_t *)p[0];
    if (n[CONTIGUOUS] && n[INNER] == 1) {
        for (int64_t u = begin; u < end; u++)
            out[u] = POSITION(row)(x + u * n[LENGTH], n[LENGTH]);
        return 0;
    }
    for (int64_t u = begin; u < end; u++) {
        const Part part = part_of(n, u);
        int64_t *to = (n[PARTS] > 1 ? (int64_t *)p[2] : out) + part.to;
        if (n[INNER] == 1)
            *to = part.first + POSITION(row)(x + part.from, part.length);
        else
            POSITION(columns)(to, x + part.from, part.length, n[INNER], part.width, part.first, scratch);
    }
    return 0;
}

static int POSITION(finish)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                            char *scratch)
{
    const int64_t *n = call->ints, inner = n[INNER];
    (void)begin, (void)end, (void)scratch;
    for (int64_t output = 0; n[PARTS] > 1 && output < n[OUTPUTS]; output++)
        for (int64_t j = 0; j < inner; j++) {
            const X *x = (const X *)p[1] + output * n[LENGTH] * inner + j;
            const int64_t *at = (const int64_t *)p[2] + output * n[PARTS] * inner + j;
            int64_t best = at[0];
            for (int64_t part = 1; part < n[PARTS]; part++) {
                const X new = x[at[part * inner] * inner], old = x[best * inner];
                if (TAKES(new, old))
                    best = at[part * inner];
            }
            ((int64_t *)p[0])[output * inner + j] = best;
        }
    return 0;
}

#undef TAKES
#undef IS_IT
#undef FIRST
#undef POSITION
#undef EXTREME
#undef BEYOND
