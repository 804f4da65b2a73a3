/* Products of bytes by bytes, exact, in 32 bits that wrap around.
 *
 * Where the processor multiplies unsigned bytes by signed ones and adds up four products at once, bytes of x
 * are made unsigned and those of y signed: what is of the other kind has its highest bit turned, so that it
 * is 128 more or less than it should. That makes a multiple of the other's sum, which is put right. Many rows
 * of x go through panels of y, PANEL columns with four of their elements side by side, which are copied first
 * unless y lies so; few go by y as it lies. Elsewhere both are made 16 bits wide, whose products never overflow a sum of two. */
#include "../plan.h"
#include "../processor.h"

#include "elements.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { bytes_integers(NAME) };
enum { STEP = 64, PANEL = 16, PANELS = 2, ROWS = 8, FEW = 4 };

/* Where a column of y begins that lies in panels, in words. */
static inline int64_t packed_at(const int64_t *n, int64_t column)
{
    return column / (PANELS * PANEL) * n[Y_PANEL] + column % (PANELS * PANEL);
}

static inline int64_t padded(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

/* --- 16 bits --- */

#if defined(__AVX512F__)
typedef __m512i Sums;
#define ADD_PAIRS(sum, x, y)                                                             \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_loadu_si512(x), _mm512_loadu_si512(y)))
#define TOTAL(sum) (uint32_t) _mm512_reduce_add_epi32(sum)
#elif defined(__AVX2__)
typedef __m256i Sums;
#define ADD_PAIRS(sum, x, y)                                                             \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *)(x)),    \
                                            _mm256_loadu_si256((const __m256i *)(y))))
static inline uint32_t TOTAL(__m256i sum)
{
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
#else
/* Four running sums, as the compiler's vectors have them. */
typedef struct {
    uint32_t of[4];
} Sums;
static inline Sums ADD_PAIRS(Sums sum, const int16_t *x, const int16_t *y)
{
    for (int i = 0; i < 4; i++)
        sum.of[i] += (uint32_t)(x[2 * i] * y[2 * i]) + (uint32_t)(x[2 * i + 1] * y[2 * i + 1]);
    return sum;
}
static inline uint32_t TOTAL(Sums sum)
{
    return (sum.of[0] + sum.of[1]) + (sum.of[2] + sum.of[3]);
}
#endif
enum { PAIRS = sizeof(Sums) / 2 };
#define UNROLL _Pragma("GCC unroll 16")

/* The same of y in panels. */
static void widen_packed(int16_t *to, const uint8_t *from, int64_t k, int64_t row, int64_t is_signed)
{
    for (int64_t j = 0; j < k; j++) {
        const uint8_t byte = from[j / 4 * PANELS * PANEL * 4 + j % 4];
        to[j] = is_signed ? (int8_t)byte : byte;
    }
    memset(to + k, 0, (size_t)(row - k) * sizeof *to);
}

static void widen(int16_t *to, const uint8_t *from, int64_t k, int64_t row, int64_t is_signed)
{
    if (is_signed)
        for (int64_t j = 0; j < k; j++)
            to[j] = (int8_t)from[j];
    else
        for (int64_t j = 0; j < k; j++)
            to[j] = from[j];
    memset(to + k, 0, (size_t)(row - k) * sizeof *to);
}

SPECIALIZED void wide_tile(uint32_t *out, int64_t out_row, const int16_t *x, const int16_t *y,
                           int64_t row, const int many, const int columns)
{
    Sums sums[2][FEW];
    UNROLL for (int i = 0; i < many; i++)
        UNROLL for (int c = 0; c < columns; c++)
            sums[i][c] = (Sums){0};
    for (int64_t j = 0; j < row; j += PAIRS)
        UNROLL for (int i = 0; i < many; i++)
            UNROLL for (int c = 0; c < columns; c++)
                sums[i][c] = ADD_PAIRS(sums[i][c], x + i * row + j, y + c * row + j);
    UNROLL for (int i = 0; i < many; i++)
        UNROLL for (int c = 0; c < columns; c++)
            out[i * out_row + c] = TOTAL(sums[i][c]);
}

static void wide(const int64_t *n, char *const *p, int64_t first, int64_t last, char *scratch)
{
    const uint8_t *x = (const uint8_t *)p[1], *y = (const uint8_t *)p[2];
    const int64_t k = n[K], row = padded(k, STEP / 2);
    int16_t *of_x = (int16_t *)scratch, *of_y = of_x + n[AT_ONCE] * row;
    for (int64_t m = 0; m < n[M]; m += n[AT_ONCE]) {
        const int64_t count = least(n[AT_ONCE], n[M] - m);
        for (int64_t i = 0; i < count; i++)
            widen(of_x + i * row, x + (m + i) * k, k, row, n[X_SIGNED]);
        for (int64_t r = first, columns; r < last; r += columns) {
            columns = last - r >= FEW ? FEW : 1;
            for (int64_t c = 0; c < columns; c++)
                if (n[Y_PANEL])
                    widen_packed(of_y + c * row, y + 4 * packed_at(n, r + c), k, row, n[Y_SIGNED]);
                else
                    widen(of_y + c * row, y + (r + c) * k, k, row, n[Y_SIGNED]);
            uint32_t *out = (uint32_t *)p[0] + m * n[N] + r;
            int64_t i = 0;
            if (columns == FEW)
                for (; i + 2 <= count; i += 2)
                    wide_tile(out + i * n[N], n[N], of_x + i * row, of_y, row, 2, FEW);
            for (; i < count; i++)
                if (columns == FEW)
                    wide_tile(out + i * n[N], n[N], of_x + i * row, of_y, row, 1, FEW);
                else
                    wide_tile(out + i * n[N], n[N], of_x + i * row, of_y, row, 1, 1);
        }
    }
}

/* --- four products at once --- */

#if defined(__AVX512F__)
#define VNNI __attribute__((target("avx512vnni")))

typedef struct {
    const uint8_t *x; /* rows of x, unsigned, `row` bytes apart, with zeros behind */
    const uint32_t *of_x; /* 128 times their sums, if those of y are turned */
    int64_t row, k;
    uint8_t turn_x, turn_y;
} Side;

/* The sums of four vectors each. */
static inline __m128i totals(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Rows of x by four of y, as they lie, or by one of them four times. */
VNNI SPECIALIZED void few_tile(uint32_t *out, int64_t out_row, const Side *side, int64_t i,
                               const uint8_t *y, const int many, const int columns, const int turns)
{
    const int64_t k = side->k, row = side->row;
    __m512i sums[FEW][FEW], of_y[FEW], ones = _mm512_set1_epi8(1);
    const __m512i turn = _mm512_set1_epi8((char)side->turn_y);
    UNROLL for (int c = 0; c < columns; c++) {
        of_y[c] = _mm512_setzero_si512();
        UNROLL for (int r = 0; r < many; r++)
            sums[r][c] = of_y[c];
    }
    for (int64_t j = 0; j < k; j += STEP) {
        const __mmask64 mask = k - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (k - j)) - 1;
        __m512i b[FEW];
        UNROLL for (int c = 0; c < columns; c++) {
            b[c] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, y + c * k + j), turn);
            if (turns)
                of_y[c] = _mm512_dpbusd_epi32(of_y[c], ones, _mm512_maskz_mov_epi8(mask, b[c]));
        }
        UNROLL for (int r = 0; r < many; r++) {
            __m512i a = _mm512_loadu_si512(side->x + (i + r) * row + j);
            UNROLL for (int c = 0; c < columns; c++)
                sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], a, b[c]);
        }
    }
    const int b = columns > 1, c = 2 * b, d = 3 * b;
    __m128i less = _mm_setzero_si128();
    if (turns) { /* 128 times the sums of y, which are 128 k too small if they are turned */
        less = totals(of_y[0], of_y[b], of_y[c], of_y[d]);
        less = _mm_add_epi32(less, _mm_set1_epi32(side->turn_y ? (int)(128 * (uint32_t)k) : 0));
        less = _mm_slli_epi32(less, 7);
    }
    UNROLL for (int r = 0; r < many; r++) {
        __m128i found = totals(sums[r][0], sums[r][b], sums[r][c], sums[r][d]);
        found = _mm_add_epi32(found, _mm_set1_epi32((int)side->of_x[i + r]));
        found = _mm_sub_epi32(found, less);
        _mm_mask_storeu_epi32(out + r * out_row, columns > 1 ? 15 : 1, found);
    }
}

VNNI SPECIALIZED void few_rows(uint32_t *out, int64_t out_row, const Side *side, int64_t count,
                               const uint8_t *y, const int columns, const int turns)
{
    int64_t i = 0;
    for (; i + FEW <= count; i += FEW)
        few_tile(out + i * out_row, out_row, side, i, y, FEW, columns, turns);
    for (; i < count; i++)
        few_tile(out + i * out_row, out_row, side, i, y, 1, columns, turns);
}

/* Columns of y as panels, whose elements behind k are zeros. */
static void copy_panels(uint32_t *to, const uint8_t *y, int64_t k, int64_t columns)
{
    const int64_t quads = padded(k, 4) / 4, width = PANELS * PANEL;
    if (columns < width)
        memset(to, 0, (size_t)(quads * width) * sizeof *to);
    for (int64_t j = 0; j < k / 4; j++)
        for (int64_t c = 0; c < columns; c++)
            memcpy(to + j * width + c, y + c * k + 4 * j, 4);
    for (int64_t c = 0; c < columns && k % 4; c++) {
        uint32_t last = 0;
        memcpy(&last, y + c * k + k / 4 * 4, (size_t)(k % 4));
        to[(quads - 1) * width + c] = last;
    }
}

/* 128 times the sums of a panel's columns, if x is turned. */
VNNI static void sum_panels(__m512i less[PANELS], const uint32_t *panels, const Side *side)
{
    const int64_t quads = padded(side->k, 4) / 4;
    const __m512i ones = _mm512_set1_epi8(1);
    for (int v = 0; v < PANELS; v++) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t j = 0; j < quads && side->turn_x; j++) {
            __m512i b = _mm512_loadu_si512(panels + j * PANELS * PANEL + v * PANEL);
            sum = side->turn_y ? _mm512_dpbusd_epi32(sum, b, ones) : _mm512_dpbusd_epi32(sum, ones, b);
        }
        less[v] = _mm512_slli_epi32(sum, 7);
    }
}

VNNI SPECIALIZED void panel_tile(uint32_t *out, int64_t out_row, const Side *side, int64_t i,
                                 const uint32_t *panels, const __m512i less[PANELS],
                                 int64_t columns, const int rows, const int vectors)
{
    const int64_t quads = padded(side->k, 4) / 4, row = side->row;
    const uint8_t *x = side->x + i * row;
    const __m512i turn = _mm512_set1_epi8((char)side->turn_y);
    __m512i sums[ROWS][PANELS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_setzero_si512();
    for (int64_t j = 0; j < quads; j++, panels += PANELS * PANEL, x += 4) {
        __m512i b[PANELS];
        UNROLL for (int v = 0; v < vectors; v++)
            b[v] = _mm512_xor_si512(_mm512_loadu_si512(panels + v * PANEL), turn);
        UNROLL for (int r = 0; r < rows; r++) {
            int32_t quad;
            memcpy(&quad, x + r * row, 4);
            __m512i a = _mm512_set1_epi32(quad);
            UNROLL for (int v = 0; v < vectors; v++)
                sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], a, b[v]);
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        const int64_t left = columns - v * PANEL;
        const __mmask16 mask = left >= PANEL ? 0xFFFF : (__mmask16)((1u << left) - 1);
        UNROLL for (int r = 0; r < rows; r++) {
            __m512i more = _mm512_set1_epi32((int)side->of_x[i + r]);
            __m512i found = _mm512_sub_epi32(_mm512_add_epi32(sums[r][v], more), less[v]);
            _mm512_mask_storeu_epi32(out + r * out_row + v * PANEL, mask, found);
        }
    }
}

VNNI SPECIALIZED void panel_rows(uint32_t *out, int64_t out_row, const Side *side, int64_t count,
                                 const uint32_t *panels, const __m512i less[PANELS],
                                 int64_t columns, const int vectors)
{
    int64_t i = 0;
    for (; i + ROWS <= count; i += ROWS)
        panel_tile(out + i * out_row, out_row, side, i, panels, less, columns, ROWS, vectors);
    for (; i < count; i++)
        panel_tile(out + i * out_row, out_row, side, i, panels, less, columns, 1, vectors);
}

/* Lays rows of x out, where they do not lie so, and takes their sums. */
VNNI static void lay(Side *side, const int64_t *n, const uint8_t *x, int64_t count, char *scratch)
{
    const int64_t k = n[K], row = padded(k, n[MANY] ? 4 : STEP);
    uint32_t *of_x = (uint32_t *)scratch;
    uint8_t *laid = (uint8_t *)(of_x + padded(n[AT_ONCE], STEP / 4));
    const __m512i turn = _mm512_set1_epi8((char)side->turn_x), ones = _mm512_set1_epi8(1);
    const int copied = side->turn_x || row != k;
    for (int64_t i = 0; i < count && (copied || side->turn_y); i++) {
        __m512i sum = _mm512_setzero_si512();
        for (int64_t j = 0; j < row; j += STEP) {
            const __mmask64 mask = k - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (k - j)) - 1;
            const __mmask64 all = row - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (row - j)) - 1;
            __m512i a = _mm512_maskz_loadu_epi8(mask, x + i * k + j);
            a = _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(a, turn));
            sum = _mm512_dpbusd_epi32(sum, a, ones);
            if (copied)
                _mm512_mask_storeu_epi8(laid + i * row + j, all, a);
        }
        of_x[i] = side->turn_y ? 128 * (uint32_t)_mm512_reduce_add_epi32(sum) : 0;
    }
    if (!copied && !side->turn_y)
        memset(of_x, 0, (size_t)count * sizeof *of_x);
    side->x = copied ? laid : x;
    side->of_x = of_x;
    side->row = row;
}

VNNI static void by_fours(const int64_t *n, char *const *p, int64_t first, int64_t last, char *scratch)
{
    const uint8_t *y = (const uint8_t *)p[2];
    const int64_t k = n[K], width = PANELS * PANEL;
    uint32_t *copied = (uint32_t *)scratch;
    Side side = {.k = k, .turn_x = n[X_SIGNED] ? 0x80 : 0, .turn_y = n[Y_SIGNED] ? 0 : 0x80};
    for (int64_t m = 0; m < n[M]; m += n[AT_ONCE]) {
        const int64_t count = least(n[AT_ONCE], n[M] - m);
        char *rest = n[MANY] ? scratch + padded(k, 4) * width : scratch;
        lay(&side, n, (const uint8_t *)p[1] + m * k, count, rest);
        uint32_t *out = (uint32_t *)p[0] + m * n[N];
        if (n[MANY])
            for (int64_t r = first; r < last; r += width) {
                __m512i less[PANELS];
                const int64_t columns = least(width, last - r);
                const uint32_t *panels = n[Y_PANEL] ? (const uint32_t *)p[2] + packed_at(n, r) : copied;
                if (!n[Y_PANEL])
                    copy_panels(copied, y + r * k, k, columns);
                sum_panels(less, panels, &side);
                if (columns > PANEL)
                    panel_rows(out + r, n[N], &side, count, panels, less, columns, 2);
                else
                    panel_rows(out + r, n[N], &side, count, panels, less, columns, 1);
            }
        else
            for (int64_t r = first, columns; r < last; r += columns) {
                columns = last - r >= FEW ? FEW : 1;
                if (columns > 1 && side.turn_x)
                    few_rows(out + r, n[N], &side, count, y + r * k, FEW, 1);
                else if (columns > 1)
                    few_rows(out + r, n[N], &side, count, y + r * k, FEW, 0);
                else if (side.turn_x)
                    few_rows(out + r, n[N], &side, count, y + r * k, 1, 1);
                else
                    few_rows(out + r, n[N], &side, count, y + r * k, 1, 0);
            }
    }
}
#endif

static int integer_matmul(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                          char *scratch)
{
    const int64_t *n = call->n;
    const int64_t first = begin * n[UNIT], last = least(end * n[UNIT], n[N]);
#if defined(__AVX512F__)
    if (processor_has("avx512_vnni")) {
        by_fours(n, p, first, last, scratch);
        return 0;
    }
#endif
    wide(n, p, first, last, scratch);
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
KERNEL_TABLE(bytes, ENTRY(integer_matmul))
