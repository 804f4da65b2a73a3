/* Matrix products of floats with low-bit weights.
 *
 * The order of float additions depends only on shapes: sixteen running sums, each over the 32-bit words of
 * weights at one index modulo 16, and one tree over the sums. So a row of the result has the same bits
 * whatever other rows are computed. */
#include "../plan.h"

#include "elements.h"
#include "fused.h"

#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(USE_NEON)
#include <arm_neon.h>
#endif

enum { quantized_integers(NAME) };
enum { WORDS = 16 }; /* words of weights per step */

/* --- sixteen lanes, in one or more vectors --- */

#if defined(__AVX512F__)
enum { PARTS = 1 };
#elif defined(__FMA__)
enum { PARTS = 2 };
#else
enum { PARTS = 4 };
#endif
#define LANES (WORDS / PARTS)
typedef float V __attribute__((vector_size(64 / PARTS)));
typedef int32_t W __attribute__((vector_size(64 / PARTS)));
typedef uint32_t U __attribute__((vector_size(64 / PARTS)));
typedef V LooseV __attribute__((aligned(4), may_alias));
typedef W LooseW __attribute__((aligned(1), may_alias));
#define EACH_PART for (int part = 0; part < PARTS; part++)
#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)
#if defined(__AVX512F__) || defined(__FMA__)
#define EACH_OF_WORD(j, count) UNROLL_FOR (int j = 0; j < (count); j++)
#else /* a tile would not fit in registers, and would compile slowly */
#define EACH_OF_WORD(j, count) _Pragma("GCC unroll 1") for (int j = 0; j < (count); j++)
#endif

static inline V fma_v(V x, V y, V z)
{
#if defined(__AVX512F__)
    return (V)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__FMA__)
    return (V)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(USE_NEON)
    return (V)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
#else
    for (int i = 0; i < LANES; i++)
        z[i] = FUSED_F32(x[i], y[i], z[i]);
    return z;
#endif
}

/* Packing of elements of BITS in a word; KIND 0 is unsigned, 1 signed. */
typedef struct {
    int bits, kind;
} Element;

/* Element j of each word. */
static inline V element(W words, Element of, int j)
{
    int shift_left = 32 - of.bits * (j + 1), right = 32 - of.bits;
    W values = of.kind ? (words << shift_left) >> right : (W)(((U)words << shift_left) >> right);
    return __builtin_convertvector(values, V);
}

#if defined(__AVX512F__)
/* Look up the lowest four bits of each word: one or two elements, of which the first counts. */
static inline __m512 table_of(Element of)
{
    float values[16];
    for (int code = 0; code < 16; code++) {
        int low = code & ((1 << of.bits) - 1);
        values[code] = (float)(of.kind && low >> (of.bits - 1) ? low - (1 << of.bits) : low);
    }
    return _mm512_loadu_ps(values);
}
#endif

/* --- floats by weights --- */

/* Copy some rows of x in the kernel's order: for each WORDS words of weights, the elements for the first
 * element of each word, then for the second, ..., then their sum; padded with zeros. */
static void lay_out(float *to, const float *x, int64_t k, int per_word, int64_t chunks)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++, to += WORDS * (per_word + 1)) {
        float *sums = to + WORDS * per_word;
        memset(sums, 0, WORDS * sizeof(float));
        for (int j = 0; j < per_word; j++)
            for (int word = 0; word < WORDS; word++) {
                int64_t at = (chunk * WORDS + word) * per_word + j;
                to[j * WORDS + word] = at < k ? x[at] : 0;
                sums[word] += to[j * WORDS + word];
            }
    }
}

/* Description of weights. */
typedef struct {
    const char *weights;
    const float *scale;
} Row;

typedef struct {
    int64_t bytes, groups; /* per row */
    int64_t words;         /* per group, at most all */
    int64_t chunks;
    int pairs; /* whether there are offsets */
} Weights;

static inline void load_words(W *to, const char *from, int64_t rest)
{
#if defined(__AVX512F__)
    __mmask64 mask = rest >= 64 ? ~(__mmask64)0 : ((__mmask64)1 << rest) - 1;
    to[0] = (W)_mm512_maskz_loadu_epi8(mask, from);
#else
    char some[4 * WORDS];
    if (rest < 4 * WORDS) {
        memset(some, 0, sizeof some);
        memcpy(some, from, (size_t)rest);
        from = some;
    }
    EACH_PART to[part] = *(const LooseW *)(from + part * (int)sizeof(W));
#endif
}

/* Load the scale, or the number at distance `behind`, for each word's group; `count` groups remain, other lanes
 * are arbitrary. */
static inline void load_scales(V *to, const float *scale, const Weights *w, int64_t count, int behind)
{
    int step = 1 + w->pairs;
    if (w->words >= WORDS) {
        EACH_PART to[part] = scale[behind] - (V){0};
        return;
    }
    count = count * w->words < WORDS ? count : WORDS / w->words;
#if defined(__AVX512F__)
    __m512i numbers = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    numbers = _mm512_srli_epi32(numbers, w->words == 2 ? 1 : w->words == 4 ? 2 : 3);
    numbers = _mm512_slli_epi32(numbers, (unsigned)w->pairs);
    numbers = _mm512_add_epi32(numbers, _mm512_set1_epi32(behind));
    __m512 some = _mm512_maskz_loadu_ps((__mmask16)((1u << (count * step)) - 1), scale);
    to[0] = (V)_mm512_permutexvar_ps(numbers, some);
#else
    float spread[WORDS];
    for (int i = 0; i < WORDS; i++)
        spread[i] = i / w->words < count ? scale[i / w->words * step + behind] : 0;
    EACH_PART to[part] = *(const LooseV *)(spread + part * LANES);
#endif
}

/* Add the halves until one number remains. */
static inline float total(const V *sums)
{
    float s[4];
#if defined(__AVX512F__)
    __m512 all = (__m512)sums[0];
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
#elif defined(__FMA__)
    __m256 eight = (__m256)(sums[0] + sums[1]);
#endif
#if defined(__FMA__)
    _mm_storeu_ps(s, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
#else
    *(LooseV *)s = (sums[0] + sums[2]) + (sums[1] + sums[3]);
#endif
    return (s[0] + s[2]) + (s[1] + s[3]);
}

/* `rows` rows of weights times `many` rows of x. */
SPECIALIZED void tile(float *out, int64_t out_row, const float *x, int64_t x_row, const Row *row,
                      const Weights *w, int rows, int many, Element of)
{
    V sums[4][4][PARTS];
    int per_word = 32 / of.bits;
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int i = 0; i < many; i++)
            EACH_PART sums[r][i][part] = (V){0};
#if defined(__AVX512F__)
    __m512 table = table_of(of);
#endif
    for (int64_t chunk = 0; chunk < w->chunks; chunk++) {
        W words[4][PARTS];
        V some[4][4][PARTS];
        int64_t byte = chunk * 4 * WORDS, group = chunk * WORDS / w->words;
        UNROLL_FOR (int r = 0; r < rows; r++) {
            load_words(words[r], row[r].weights + byte, w->bytes - byte);
            /* Rows are too short for the hardware prefetcher: prefetch the rows of the tile after the
             * next. */
            __builtin_prefetch(row[r].weights + byte + 8 * w->bytes);
            __builtin_prefetch(row[r].scale + group * (1 + w->pairs) + 8 * w->groups * (1 + w->pairs));
            UNROLL_FOR (int i = 0; i < many; i++)
                EACH_PART some[r][i][part] = (V){0};
        }
        const float *at = x + chunk * WORDS * (per_word + 1);
        EACH_OF_WORD (j, per_word) {
            UNROLL_FOR (int r = 0; r < rows; r++)
                EACH_PART
                {
                    V weight;
#if defined(__AVX512F__)
                    if (of.bits <= 4)
                        weight = (V)_mm512_permutexvar_ps((__m512i)((U)words[r][part] >> (of.bits * j)),
                                                          table);
                    else
#endif
                        weight = element(words[r][part], of, j);
                    UNROLL_FOR (int i = 0; i < many; i++) {
                        V number = *(const LooseV *)(at + i * x_row + j * WORDS + part * LANES);
                        some[r][i][part] = fma_v(weight, number, some[r][i][part]);
                    }
                }
        }
        UNROLL_FOR (int r = 0; r < rows; r++) {
            V scale[PARTS];
            const float *from = row[r].scale + group * (1 + w->pairs);
            load_scales(scale, from, w, w->groups - group, 0);
            UNROLL_FOR (int i = 0; i < many; i++)
                EACH_PART sums[r][i][part] = fma_v(some[r][i][part], scale[part], sums[r][i][part]);
            if (!w->pairs)
                continue;
            load_scales(scale, from, w, w->groups - group, 1);
            UNROLL_FOR (int i = 0; i < many; i++)
                EACH_PART
                {
                    V number = *(const LooseV *)(at + i * x_row + per_word * WORDS + part * LANES);
                    sums[r][i][part] = fma_v(number, scale[part], sums[r][i][part]);
                }
        }
    }
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int i = 0; i < many; i++)
            out[i * out_row + r] = total(sums[r][i]);
}

/* --- many rows of x by panels of weights --- */

/* A panel has COLUMNS rows of weights side by side, one per lane. The sixteen running sums of one row by
 * one row are computed one after the other: the words at one index modulo WORDS are converted to floats
 * once for all rows of x. */
#if defined(__AVX512F__)
enum { ACROSS = 2, TILE_ROWS = 6 };
#else
enum { ACROSS = 1, TILE_ROWS = 3 };
#endif
enum { COLUMNS = ACROSS * WORDS };
#define EACH_ACROSS UNROLL_FOR (int across = 0; across < ACROSS * PARTS; across++)

/* Copy a row of x in the order of panels: for each index, the elements for its words, with their sum. */
static void lay_out_by_place(float *to, const float *x, int64_t k, int per_word, int64_t chunks)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int place = 0; place < WORDS; place++) {
            float *number = to + (place * chunks + chunk) * (per_word + 1), sum = 0;
            int64_t at = (chunk * WORDS + place) * per_word;
            for (int j = 0; j < per_word; j++) {
                number[j] = at + j < k ? x[at + j] : 0;
                sum += number[j];
            }
            number[per_word] = sum;
        }
}

/* Copy words to a panel, [chunks, WORDS, COLUMNS]; missing rows repeat the last of the `rows` rows. */
static void lay_out_words(int32_t *to, const char *weights, int64_t rows, const Weights *w)
{
    for (int64_t chunk = 0; chunk < w->chunks; chunk++, to += WORDS * COLUMNS)
        for (int64_t r = 0; r < COLUMNS; r++) {
            W words[PARTS];
            int64_t byte = chunk * 4 * WORDS;
            load_words(words, weights + (r < rows ? r : rows - 1) * w->bytes + byte, w->bytes - byte);
            const int32_t *each = (const int32_t *)words;
            for (int place = 0; place < WORDS; place++)
                to[place * COLUMNS + r] = each[place];
        }
}

/* Copy their scales, [groups, 1 or 2, COLUMNS], with zeros for groups past the end of a row. */
static void lay_out_scales(float *to, const float *scale, int64_t rows, const Weights *w)
{
    int64_t numbers = w->groups * (1 + w->pairs);
    int64_t count = w->words < WORDS ? w->chunks * WORDS / w->words * (1 + w->pairs) : numbers;
    for (int64_t i = 0; i < count; i++)
        for (int64_t r = 0; r < COLUMNS; r++)
            *to++ = i < numbers ? scale[(r < rows ? r : rows - 1) * numbers + i] : 0;
}

/* Unpack the words at one index, [chunks, per_word, COLUMNS]. */
SPECIALIZED void unfold(float *to, const int32_t *words, int64_t chunks, Element of)
{
    for (int64_t chunk = 0; chunk < chunks; chunk++, words += WORDS * COLUMNS)
        UNROLL_FOR (int j = 0; j < 32 / of.bits; j++, to += COLUMNS)
            EACH_ACROSS
            {
                W some = *(const LooseW *)(words + across * LANES);
                *(LooseV *)(to + across * LANES) = element(some, of, j);
            }
}

/* One of the sixteen sums, for `rows` rows of x by a panel. */
SPECIALIZED void panel_tile(float *out, const float *const *x, const float *weights, const float *scale,
                            int64_t group, const Weights *w, int rows, int per_word)
{
    V sums[TILE_ROWS][ACROSS * PARTS];
    UNROLL_FOR (int i = 0; i < rows; i++)
        EACH_ACROSS sums[i][across] = (V){0};
    int64_t together = w->words < WORDS ? 1 : w->words / WORDS;
    int64_t step = w->words < WORDS ? WORDS / w->words : 1;
    for (int64_t chunk = 0; chunk < w->chunks; group += step) {
        const float *by = scale + group * (1 + w->pairs) * COLUMNS;
        for (int64_t end = least(w->chunks, chunk + together); chunk < end; chunk++) {
            V some[TILE_ROWS][ACROSS * PARTS];
            int64_t at = chunk * (per_word + 1);
            UNROLL_FOR (int i = 0; i < rows; i++)
                EACH_ACROSS some[i][across] = (V){0};
            UNROLL_FOR (int j = 0; j < per_word; j++, weights += COLUMNS) {
                V weight[ACROSS * PARTS];
                EACH_ACROSS weight[across] = *(const LooseV *)(weights + across * LANES);
                UNROLL_FOR (int i = 0; i < rows; i++) {
                    V number = x[i][at + j] - (V){0};
                    EACH_ACROSS some[i][across] = fma_v(weight[across], number, some[i][across]);
                }
            }
            EACH_ACROSS
            {
                V scales = *(const LooseV *)(by + across * LANES);
                UNROLL_FOR (int i = 0; i < rows; i++)
                    sums[i][across] = fma_v(some[i][across], scales, sums[i][across]);
            }
            if (!w->pairs)
                continue;
            EACH_ACROSS
            {
                V offsets = *(const LooseV *)(by + COLUMNS + across * LANES);
                UNROLL_FOR (int i = 0; i < rows; i++)
                    sums[i][across] = fma_v(x[i][at + per_word] - (V){0}, offsets, sums[i][across]);
            }
        }
    }
    UNROLL_FOR (int i = 0; i < rows; i++)
        EACH_ACROSS *(LooseV *)(out + i * COLUMNS + across * LANES) = sums[i][across];
}

/* Add sums, [WORDS, COLUMNS] and `apart` from each other, in the order of `total`. */
static void total_columns(float *out, const float *sums, int64_t apart, int64_t columns)
{
    float results[COLUMNS];
    EACH_ACROSS
    {
        V s[WORDS];
        UNROLL_FOR (int i = 0; i < WORDS; i++)
            s[i] = *(const LooseV *)(sums + i * apart + across * LANES);
        UNROLL_FOR (int i = 0; i < 8; i++)
            s[i] += s[i + 8];
        UNROLL_FOR (int i = 0; i < 4; i++)
            s[i] += s[i + 4];
        *(LooseV *)(results + across * LANES) = (s[0] + s[2]) + (s[1] + s[3]);
    }
    memcpy(out, results, (size_t)columns * sizeof(float));
}

SPECIALIZED void many_rows(const KernelCall *call, char *const *p, int64_t first, int64_t last,
                           float *scratch, const Weights *w, Element of)
{
    const int64_t *n = call->ints;
    const float *x = (const float *)p[1], *scale = (const float *)p[3];
    int per_word = 32 / of.bits, step = 1 + w->pairs;
    int64_t place_row = w->chunks * (per_word + 1), sums_apart = (n[AT_ONCE] + TILE_ROWS) * COLUMNS;
    float *laid = scratch, *unfolded = laid + n[AT_ONCE] * WORDS * place_row;
    float *sums = unfolded + w->chunks * per_word * COLUMNS;
    int32_t *words = (int32_t *)(sums + WORDS * sums_apart);
    float *scales = (float *)(words + w->chunks * WORDS * COLUMNS);
    for (int64_t m = 0; m < n[M]; m += n[AT_ONCE]) {
        int64_t count = least(n[AT_ONCE], n[M] - m);
        for (int64_t i = 0; i < count; i++)
            lay_out_by_place(laid + i * WORDS * place_row, x + (m + i) * n[K], n[K], per_word, w->chunks);
        for (int64_t r = first; r < last; r += COLUMNS) {
            int64_t columns = least(COLUMNS, last - r);
            lay_out_words(words, p[2] + r * w->bytes, columns, w);
            lay_out_scales(scales, scale + r * w->groups * step, columns, w);
            for (int place = 0; place < WORDS; place++) {
                unfold(unfolded, words + place * COLUMNS, w->chunks, of);
                int64_t group = place / w->words;
                for (int64_t i = 0, rows; i < count; i += rows) {
                    const float *row[TILE_ROWS];
                    for (int64_t each = 0; each < TILE_ROWS; each++)
                        row[each] = laid + least(i + each, count - 1) * WORDS * place_row +
                                    place * place_row;
                    float *to = sums + place * sums_apart + i * COLUMNS;
                    rows = count - i > 3 ? TILE_ROWS : 3;
                    if (rows == TILE_ROWS)
                        panel_tile(to, row, unfolded, scales, group, w, TILE_ROWS, per_word);
                    else
                        panel_tile(to, row, unfolded, scales, group, w, 3, per_word);
                }
            }
            for (int64_t i = 0; i < count; i++)
                total_columns((float *)p[0] + (m + i) * n[N] + r, sums + i * COLUMNS, sums_apart, columns);
        }
    }
}

SPECIALIZED int product(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch,
                        Element of)
{
    const int64_t *n = call->ints;
    const float *x = (const float *)p[1], *scale = (const float *)p[3];
    float *out = (float *)p[0], *laid = (float *)scratch;
    int per_word = 32 / of.bits, step = 1 + (int)n[PAIRS];
    int64_t per_chunk = WORDS * per_word;
    Weights w = {.bytes = n[K] * of.bits / 8,
                 .groups = n[GROUPS],
                 .pairs = (int)n[PAIRS],
                 .words = n[GROUPS] == 1 ? INT64_MAX / 2 : n[K] / n[GROUPS] / per_word,
                 .chunks = (n[K] + per_chunk - 1) / per_chunk};
    int64_t x_row = w.chunks * (per_chunk + WORDS);
    int64_t first = begin * n[UNIT], last = least(end * n[UNIT], n[N]);
    if (n[MANY]) {
        many_rows(call, p, first, last, laid, &w, of);
        return 0;
    }
    for (int64_t m = 0; m < n[M]; m += n[AT_ONCE]) {
        int64_t count = least(n[AT_ONCE], n[M] - m);
        for (int64_t i = 0; i < count; i++)
            lay_out(laid + i * x_row, x + (m + i) * n[K], n[K], per_word, w.chunks);
        for (int64_t r = first; r < last; r += 4) {
            int64_t rows = least(4, last - r);
            Row row[4];
            for (int64_t i = 0; i < rows; i++)
                row[i] = (Row){p[2] + (r + i) * w.bytes, scale + (r + i) * n[GROUPS] * step};
            float *to = out + m * n[N] + r;
            int64_t i = 0;
            if (rows == 4) {
                for (; i + 4 <= count; i += 4)
                    for (int pair = 0; pair < 4; pair += 2)
                        tile(to + i * n[N] + pair, n[N], laid + i * x_row, x_row, row + pair, &w, 2, 4, of);
                for (; i < count; i++)
                    tile(to + i * n[N], n[N], laid + i * x_row, x_row, row, &w, 4, 1, of);
            }
            for (int64_t row_at = i; row_at < count; row_at++)
                for (int64_t each = 0; each < rows; each++)
                    tile(to + row_at * n[N] + each, n[N], laid + row_at * x_row, x_row, row + each, &w, 1,
                         1, of);
        }
    }
    return 0;
}

#define PRODUCT(dtype, bits, kind)                                                             \
    static int quantized_matmul_##dtype(const KernelCall *call, char *const *p, int64_t begin, \
                                        int64_t end, char *scratch)                            \
    {                                                                                          \
        return product(call, p, begin, end, scratch, (Element){bits, kind});                   \
    }
PRODUCT(i8, 8, 1)
PRODUCT(u8, 8, 0)
PRODUCT(i4, 4, 1)
PRODUCT(u4, 4, 0)
PRODUCT(i2, 2, 1)
PRODUCT(u2, 2, 0)

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
KERNEL_TABLE(quantized, ENTRY(quantized_matmul_i8) ENTRY(quantized_matmul_u8) ENTRY(quantized_matmul_i4)
                            ENTRY(quantized_matmul_u4) ENTRY(quantized_matmul_i2)
                                ENTRY(quantized_matmul_u2))
/* clang-format on */
