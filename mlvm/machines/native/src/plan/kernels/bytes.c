/* Matrix products of bytes minus their zero points, exact, in 32-bit integers that wrap around. Rows of x are rows of a
 * matrix, or windows over images, which are gathered row by row. Pixels outside of an image equal x's zero point.
 *
 * Some processors multiply unsigned bytes by signed bytes and add four products with one instruction. It needs unsigned
 * x and signed y, so the kernel flips the highest bit of an operand with the wrong sign, which
 * shifts the elements and the zero point by 128. Each zero point contributes a multiple of the
 * other operand's sum, which the kernel subtracts. For many rows of x, y is first packed into
 * panels of PANELS times PANEL columns, with four elements of a column adjacent: [chunks][k /
 * 4][32][4], followed by a multiple of the sums of each chunk. For few rows, y is read unpacked. On
 * other processors, both operands minus their zero points are widened to 16 bits, so that a sum of
 * two products cannot overflow. `integer_depthwise` multiplies each channel in 32 bits. */
#include "../plan.h"
#include "../processor.h"

#include "elements.h"
#include "next.h"

#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(USE_NEON)
#include <arm_neon.h>
#endif

enum { bytes_integers(NAME) };
enum { STEP = 64, PANEL = 16, PANELS = 2, ROWS = 8, FEW = 4 };

static inline int64_t padded(int64_t count, int64_t to)
{
    return (count + to - 1) / to * to;
}

/* --- operands --- */

static inline int zero_of(char *const *p, int64_t parameter, int64_t is_signed)
{
    if (!parameter)
        return 0;
    return is_signed ? *(const int8_t *)p[parameter] : *(const uint8_t *)p[parameter];
}

/* Copy window m over the images, for one group of channels. */
static void gather(uint8_t *to, const int64_t *n, const uint8_t *x, int64_t m, int64_t group, int zero)
{
    const int64_t channels = n[CHANNELS], each = channels / n[GROUPS], line = n[WIDE] * each;
    const int64_t places = n[DOWN] * n[ACROSS], image = m / places, place = m % places;
    const int64_t top = place / n[ACROSS] * n[STRIDE_Y] - n[TOP];
    const int64_t left = place % n[ACROSS] * n[STRIDE_X] - n[LEFT];
    const int inside = left >= 0 && left + (n[WIDE] - 1) * n[APART_X] < n[WIDTH];
    x += image * n[HEIGHT] * n[WIDTH] * channels + group * each;
    for (int64_t i = 0; i < n[TALL]; i++, to += line) {
        const int64_t row = top + i * n[APART_Y];
        const uint8_t *from = x + (row * n[WIDTH] + left) * channels;
        if (row < 0 || row >= n[HEIGHT])
            memset(to, zero, (size_t)line);
        else if (inside && n[APART_X] == 1 && each == channels)
            copy_run((char *)to, (const char *)from, line);
        else
            for (int64_t j = 0; j < n[WIDE]; j++) {
                const int64_t column = left + j * n[APART_X];
                if (column < 0 || column >= n[WIDTH])
                    memset(to + j * each, zero, (size_t)each);
                else
                    copy_run((char *)to + j * each, (const char *)from + j * n[APART_X] * channels, each);
            }
    }
}

/* --- 16 bits --- */

#if defined(__AVX512F__)
typedef __m512i Sums;
#define ADD_PAIRS(sum, x, y) \
    _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_loadu_si512(x), _mm512_loadu_si512(y)))
#define TOTAL(sum) (uint32_t) _mm512_reduce_add_epi32(sum)
#elif defined(__AVX2__)
typedef __m256i Sums;
#define ADD_PAIRS(sum, x, y)                                                          \
    _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_loadu_si256((const __m256i *)(x)), \
                                            _mm256_loadu_si256((const __m256i *)(y))))
static inline uint32_t TOTAL(__m256i sum)
{
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4E));
    return (uint32_t)_mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xB1)));
}
#elif defined(USE_NEON)
typedef int32x4_t Sums;
#define ADD_PAIRS(sum, x, y) \
    vmlal_s16(vmlal_s16(sum, vld1_s16(x), vld1_s16(y)), vld1_s16((x) + 4), vld1_s16((y) + 4))
#define TOTAL(sum) (uint32_t) vaddvq_s32(sum)
#else /* one sum: gcc 12 compiles several in a loop for aarch64 to wrong sums */
typedef uint32_t Sums;
#define ADD_PAIRS(sum, x, y) ((sum) + (uint32_t)((x)[0] * (y)[0] + (x)[1] * (y)[1]))
#define TOTAL(sum) (sum)
#endif
enum { PAIRS = sizeof(Sums) / 2 };
#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)

/* Widen to 16 bits, and subtract the zero point. */
static void widen(int16_t *to, const uint8_t *from, int64_t k, int64_t row, int64_t is_signed, int zero)
{
    if (is_signed)
        for (int64_t j = 0; j < k; j++)
            to[j] = (int16_t)((int8_t)from[j] - zero);
    else
        for (int64_t j = 0; j < k; j++)
            to[j] = (int16_t)(from[j] - zero);
    memset(to + k, 0, (size_t)(row - k) * sizeof *to);
}

SPECIALIZED void wide_tile(uint32_t *out, int64_t out_row, const int16_t *x, const int16_t *y, int64_t row,
                           const int many, const int columns)
{
    Sums sums[2][FEW];
    UNROLL_FOR (int i = 0; i < many; i++)
        UNROLL_FOR (int c = 0; c < columns; c++)
            sums[i][c] = (Sums){0};
    for (int64_t j = 0; j < row; j += PAIRS)
        UNROLL_FOR (int i = 0; i < many; i++)
            UNROLL_FOR (int c = 0; c < columns; c++)
                sums[i][c] = ADD_PAIRS(sums[i][c], x + i * row + j, y + c * row + j);
    UNROLL_FOR (int i = 0; i < many; i++)
        UNROLL_FOR (int c = 0; c < columns; c++)
            out[i * out_row + c] = TOTAL(sums[i][c]);
}

/* Part of the result: rows and columns. */
typedef struct {
    int64_t row, end_row, column, end_column;
} Part;

static int wide(const int64_t *n, char *const *p, Part part, char *scratch, Next *next)
{
    const uint8_t *x = (const uint8_t *)p[n[X]], *y = (const uint8_t *)p[n[Y]];
    const int64_t k = n[K], row = padded(k, STEP / 2), each = n[N] / n[GROUPS];
    const int x_zero = zero_of(p, n[X_ZERO], n[X_SIGNED]);
    const int y_zero = zero_of(p, n[Y_ZERO], n[Y_SIGNED]);
    int16_t *of_x = (int16_t *)scratch, *of_y = of_x + n[AT_ONCE] * row;
    uint8_t *window = (uint8_t *)(of_y + FEW * row);
    for (int64_t m = part.row; m < part.end_row; m += n[AT_ONCE]) {
        const int64_t count = least(n[AT_ONCE], part.end_row - m);
        uint32_t *all = next ? begin_rows(next, p[n[OUT]], m) : (uint32_t *)p[n[OUT]];
        int64_t laid = -1;
        for (int64_t r = part.column, columns; r < part.end_column; r += columns) {
            const int64_t group = r / each;
            for (int64_t i = 0; i < count && group != laid; i++) {
                const uint8_t *from = x + (m + i) * k;
                if (n[WINDOWS])
                    gather(window, n, x, m + i, group, x_zero), from = window;
                widen(of_x + i * row, from, k, row, n[X_SIGNED], x_zero);
            }
            laid = group;
            columns = least(part.end_column, (group + 1) * each) - r >= FEW ? FEW : 1;
            for (int64_t c = 0; c < columns; c++)
                widen(of_y + c * row, y + (r + c) * k, k, row, n[Y_SIGNED], y_zero);
            uint32_t *out = all + m * n[N] + r;
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
        if (next && end_rows(next, m, count))
            return 1;
    }
    return 0;
}

/* --- four products per instruction --- */

#if defined(__AVX512F__)
#define VNNI __attribute__((target("avx512vnni")))

typedef struct {
    const uint8_t *x;     /* rows of x, unsigned, `row` bytes apart, padded with zeros */
    const uint32_t *of_x; /* correction of their sums for y's zero point */
    int64_t row, k;
    uint8_t turn_x, turn_y;
    uint32_t x_zero, y_zero; /* after the conversion of signs */
} Side;

/* Sum each of four vectors. */
static inline __m128i totals(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

/* Multiply rows of x by four rows of y in place, or by one of them repeated. */
VNNI SPECIALIZED void few_tile(uint32_t *out, int64_t out_row, const Side *side, int64_t i,
                               const uint8_t *y, const int many, const int columns, const int turns)
{
    const int64_t k = side->k, row = side->row;
    __m512i sums[FEW][FEW], of_y[FEW], ones = _mm512_set1_epi8(1);
    const __m512i turn = _mm512_set1_epi8((char)side->turn_y);
    UNROLL_FOR (int c = 0; c < columns; c++) {
        of_y[c] = _mm512_setzero_si512();
        UNROLL_FOR (int r = 0; r < many; r++)
            sums[r][c] = of_y[c];
    }
    for (int64_t j = 0; j < k; j += STEP) {
        const __mmask64 mask = k - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (k - j)) - 1;
        __m512i b[FEW];
        UNROLL_FOR (int c = 0; c < columns; c++) {
            b[c] = _mm512_xor_si512(_mm512_maskz_loadu_epi8(mask, y + c * k + j), turn);
            if (turns)
                of_y[c] = _mm512_dpbusd_epi32(of_y[c], ones, _mm512_maskz_mov_epi8(mask, b[c]));
        }
        UNROLL_FOR (int r = 0; r < many; r++) {
            __m512i a = _mm512_loadu_si512(side->x + (i + r) * row + j);
            UNROLL_FOR (int c = 0; c < columns; c++)
                sums[r][c] = _mm512_dpbusd_epi32(sums[r][c], a, b[c]);
        }
    }
    const int b = columns > 1, c = 2 * b, d = 3 * b;
    __m128i less = _mm_setzero_si128();
    if (turns) { /* sums of y minus its zero point, times the zero point of x */
        less = totals(of_y[0], of_y[b], of_y[c], of_y[d]);
        less = _mm_sub_epi32(less, _mm_set1_epi32((int)(side->y_zero * (uint32_t)k)));
        less = _mm_mullo_epi32(less, _mm_set1_epi32((int)side->x_zero));
    }
    UNROLL_FOR (int r = 0; r < many; r++) {
        __m128i total = totals(sums[r][0], sums[r][b], sums[r][c], sums[r][d]);
        total = _mm_sub_epi32(total, _mm_set1_epi32((int)side->of_x[i + r]));
        total = _mm_sub_epi32(total, less);
        _mm_mask_storeu_epi32(out + r * out_row, columns > 1 ? 15 : 1, total);
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

/* Transpose 16 x 16 numbers of 32 bits. */
static inline void turn_square(__m512i r[PANEL])
{
    __m512i t[PANEL];
    UNROLL_FOR (int i = 0; i < PANEL; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    UNROLL_FOR (int i = 0; i < PANEL; i += 4)
        UNROLL_FOR (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    UNROLL_FOR (int j = 0; j < 4; j++) {
        t[j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88);
        t[4 + j] = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xDD);
        t[8 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
        t[12 + j] = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xDD);
    }
    UNROLL_FOR (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xDD);
    }
}

/* Copy columns of y to panels, padded with zeros along k, followed by the corrections of the column
 * sums for x's zero point. */
VNNI static void copy_panels(uint32_t *to, const uint8_t *y, int64_t k, int64_t columns, const Side *side)
{
    const int64_t quads = padded(k, 4) / 4, width = PANELS * PANEL, whole = k / 4;
    const uint32_t turn = side->turn_y * 0x01010101u;
    const __m512i turns = _mm512_set1_epi32((int)turn), ones = _mm512_set1_epi8(1);
    const __m512i lanes = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32((int)k));
    for (int v = 0; v < PANELS; v++) {
        const int64_t rest = columns - v * PANEL;
        const __mmask16 mask = rest >= PANEL ? 0xFFFF : rest > 0 ? (__mmask16)((1u << rest) - 1) : 0;
        const uint8_t *from = y + v * PANEL * k;
        uint32_t *panel = to + v * PANEL;
        __m512i sum = _mm512_setzero_si512();
        int64_t j = 0;
        for (; j + PANEL <= whole; j += PANEL) {
            __m512i square[PANEL];
            UNROLL_FOR (int c = 0; c < PANEL; c++)
                square[c] = c < rest ? _mm512_xor_si512(_mm512_loadu_si512(from + c * k + 4 * j), turns)
                                     : _mm512_setzero_si512();
            turn_square(square);
            UNROLL_FOR (int i = 0; i < PANEL; i++) {
                _mm512_storeu_si512(panel + (j + i) * width, square[i]);
                sum = _mm512_dpbusd_epi32(sum, ones, square[i]);
            }
        }
        for (; j < quads; j++) {
            __m512i quad = _mm512_setzero_si512();
            if (j < whole) {
                quad = _mm512_mask_i32gather_epi32(quad, mask, lanes, from + 4 * j, 1);
                quad = _mm512_maskz_xor_epi32(mask, quad, turns);
            } else {
                uint32_t last[PANEL] = {0};
                for (int64_t c = 0; c < PANEL && c < rest; c++) {
                    memcpy(last + c, from + c * k + 4 * j, (size_t)(k % 4));
                    last[c] ^= turn & (0xFFFFFFFFu >> (32 - 8 * (k % 4)));
                }
                quad = _mm512_loadu_si512(last);
            }
            _mm512_storeu_si512(panel + j * width, quad);
            sum = _mm512_dpbusd_epi32(sum, ones, quad);
        }
        sum = _mm512_sub_epi32(sum, _mm512_set1_epi32((int)(side->y_zero * (uint32_t)k)));
        sum = _mm512_mullo_epi32(sum, _mm512_set1_epi32((int)side->x_zero));
        _mm512_storeu_si512(to + quads * width + v * PANEL, sum);
    }
}

VNNI SPECIALIZED void panel_tile(uint32_t *out, int64_t out_row, const Side *side, int64_t i,
                                 const uint32_t *panels, int64_t columns, const int rows, const int vectors)
{
    const int64_t quads = padded(side->k, 4) / 4, row = side->row;
    const uint8_t *x = side->x + i * row;
    __m512i sums[ROWS][PANELS];
    UNROLL_FOR (int r = 0; r < rows; r++)
        UNROLL_FOR (int v = 0; v < vectors; v++)
            sums[r][v] = _mm512_setzero_si512();
    for (int64_t j = 0; j < quads; j++, panels += PANELS * PANEL, x += 4) {
        __m512i b[PANELS];
        UNROLL_FOR (int v = 0; v < vectors; v++)
            b[v] = _mm512_loadu_si512(panels + v * PANEL);
        UNROLL_FOR (int r = 0; r < rows; r++) {
            int32_t quad;
            memcpy(&quad, x + r * row, 4);
            __m512i a = _mm512_set1_epi32(quad);
            UNROLL_FOR (int v = 0; v < vectors; v++)
                sums[r][v] = _mm512_dpbusd_epi32(sums[r][v], a, b[v]);
        }
    }
    UNROLL_FOR (int v = 0; v < vectors; v++) {
        const int64_t rest = columns - v * PANEL;
        const __mmask16 mask = rest >= PANEL ? 0xFFFF : (__mmask16)((1u << rest) - 1);
        UNROLL_FOR (int r = 0; r < rows; r++) {
            __m512i total = _mm512_sub_epi32(sums[r][v], _mm512_set1_epi32((int)side->of_x[i + r]));
            total = _mm512_sub_epi32(total, _mm512_loadu_si512(panels + v * PANEL));
            _mm512_mask_storeu_epi32(out + r * out_row + v * PANEL, mask, total);
        }
    }
}

VNNI SPECIALIZED void panel_rows(uint32_t *out, int64_t out_row, const Side *side, int64_t count,
                                 const uint32_t *panels, int64_t columns, const int vectors)
{
    int64_t i = 0;
    for (; i + ROWS <= count; i += ROWS)
        panel_tile(out + i * out_row, out_row, side, i, panels, columns, ROWS, vectors);
    for (; i < count; i++)
        panel_tile(out + i * out_row, out_row, side, i, panels, columns, 1, vectors);
}

/* Copy rows of x, or windows, unless they can be read in place, and compute the sums. */
VNNI static void lay(Side *side, const int64_t *n, const uint8_t *x, int64_t m, int64_t count,
                     int64_t group, char *scratch)
{
    const int64_t k = n[K], row = padded(k, n[MANY] ? 4 : STEP);
    uint32_t *of_x = (uint32_t *)scratch;
    uint8_t *laid = (uint8_t *)(of_x + padded(n[AT_ONCE], STEP / 4));
    const __m512i turn = _mm512_set1_epi8((char)side->turn_x), ones = _mm512_set1_epi8(1);
    const int copied = side->turn_x || row != k, outside = (int)side->x_zero ^ side->turn_x;
    memset(of_x, 0, (size_t)count * sizeof *of_x);
    for (int64_t i = 0; i < count && (n[WINDOWS] || copied || side->y_zero); i++) {
        const uint8_t *from = n[WINDOWS] ? laid + i * row : x + (m + i) * k;
        __m512i sum = _mm512_setzero_si512();
        if (n[WINDOWS])
            gather(laid + i * row, n, x, m + i, group, outside);
        for (int64_t j = 0; j < row && (copied || side->y_zero); j += STEP) {
            const __mmask64 mask = k - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (k - j)) - 1;
            const __mmask64 all = row - j >= STEP ? ~(__mmask64)0 : ((__mmask64)1 << (row - j)) - 1;
            __m512i a = _mm512_maskz_loadu_epi8(mask, from + j);
            a = _mm512_maskz_mov_epi8(mask, _mm512_xor_si512(a, turn));
            sum = _mm512_dpbusd_epi32(sum, a, ones);
            if (copied)
                _mm512_mask_storeu_epi8(laid + i * row + j, all, a);
        }
        of_x[i] = side->y_zero * (uint32_t)_mm512_reduce_add_epi32(sum);
    }
    side->x = copied || n[WINDOWS] ? laid : x + m * k;
    side->of_x = of_x;
    side->row = row;
}

VNNI static int by_panels(Side *side, const int64_t *n, char *const *p, Part part, char *scratch,
                          Next *next)
{
    const uint8_t *x = (const uint8_t *)p[n[X]], *y = (const uint8_t *)p[n[Y]];
    const int64_t k = n[K], width = PANELS * PANEL, each = n[N] / n[GROUPS];
    const int64_t size = (padded(k, 4) / 4 + 1) * width, of_group = padded(each, width) / width;
    const int64_t chunks = of_group * n[GROUPS];
    uint32_t *panels = (uint32_t *)scratch;
    char *rest = (char *)(panels + n[PANELS_AT_ONCE] * size);
    for (int64_t first = 0; first < chunks; first += n[PANELS_AT_ONCE]) {
        const int64_t last = least(chunks, first + n[PANELS_AT_ONCE]);
        for (int64_t c = first; c < last; c++) {
            const int64_t r = c % of_group * width, from = c / of_group * each + r;
            copy_panels(panels + (c - first) * size, y + from * k, k, least(width, each - r), side);
        }
        for (int64_t m = part.row; m < part.end_row; m += n[AT_ONCE]) {
            const int64_t count = least(n[AT_ONCE], part.end_row - m);
            uint32_t *out = next ? begin_rows(next, p[n[OUT]], m) : (uint32_t *)p[n[OUT]];
            for (int64_t c = first; c < last; c++) {
                const int64_t r = c % of_group * width, columns = least(width, each - r);
                const uint32_t *panel = panels + (c - first) * size;
                uint32_t *to = out + m * n[N] + c / of_group * each + r;
                if (c == first || c % of_group == 0)
                    lay(side, n, x, m, count, c / of_group, rest);
                if (columns > PANEL)
                    panel_rows(to, n[N], side, count, panel, columns, 2);
                else
                    panel_rows(to, n[N], side, count, panel, columns, 1);
            }
            if (next && end_rows(next, m, count))
                return 1;
        }
    }
    return 0;
}

VNNI static int by_fours(const int64_t *n, char *const *p, Part part, char *scratch, Next *next)
{
    const uint8_t *y = (const uint8_t *)p[n[Y]];
    const int64_t k = n[K];
    Side side = {.k = k, .turn_x = n[X_SIGNED] ? 0x80 : 0, .turn_y = n[Y_SIGNED] ? 0 : 0x80};
    side.x_zero = (uint32_t)(zero_of(p, n[X_ZERO], n[X_SIGNED]) + side.turn_x);
    side.y_zero = (uint32_t)(zero_of(p, n[Y_ZERO], n[Y_SIGNED]) - side.turn_y);
    if (n[MANY])
        return by_panels(&side, n, p, part, scratch, next);
    for (int64_t m = part.row; m < part.end_row; m += n[AT_ONCE]) {
        const int64_t count = least(n[AT_ONCE], part.end_row - m);
        uint32_t *out = (uint32_t *)p[n[OUT]] + m * n[N];
        lay(&side, n, (const uint8_t *)p[n[X]], m, count, 0, scratch);
        for (int64_t r = part.column, columns; r < part.end_column; r += columns) {
            columns = part.end_column - r >= FEW ? FEW : 1;
            if (columns > 1 && side.x_zero)
                few_rows(out + r, n[N], &side, count, y + r * k, FEW, 1);
            else if (columns > 1)
                few_rows(out + r, n[N], &side, count, y + r * k, FEW, 0);
            else if (side.x_zero)
                few_rows(out + r, n[N], &side, count, y + r * k, 1, 1);
            else
                few_rows(out + r, n[N], &side, count, y + r * k, 1, 0);
        }
    }
    return 0;
}
#endif

static int products(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch,
                    Next *next)
{
    const int64_t *n = call->ints;
    Part part = {0, n[M], 0, n[N]};
    if (n[MANY])
        part.row = begin * n[UNIT], part.end_row = least(end * n[UNIT], n[M]);
    else
        part.column = begin * n[UNIT], part.end_column = least(end * n[UNIT], n[N]);
#if defined(__AVX512F__)
    if (processor_has("avx512_vnni"))
        return by_fours(n, p, part, scratch, next);
#endif
    return wide(n, p, part, scratch, next);
}

static int integer_matmul(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    return products(call, p, begin, end, scratch, NULL);
}

/* Prepare the call that follows on rows of the result, with its parameters. */
static Next chained(const KernelCall *call, char *const *p, char **q, char *scratch)
{
    const int64_t *n = call->ints;
    memcpy(q, p, (size_t)(call->nparams + 1) * sizeof *q);
    return (Next){
        .child = call->children[0],
        .p = q,
        .product = &q[call->nparams],
        .row_bytes = n[N] * (int64_t)sizeof(int32_t),
        .scratch = scratch + n[CHILD_SCRATCH],
        .strip = n[OUT] < 0 ? scratch + n[PRODUCT_SCRATCH] : NULL,
    };
}

static int integer_chain(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    char *q[MOST_PARAMETERS + 2];
    Next next = chained(call, p, q, scratch);
    return products(call, p, begin, end, scratch, &next);
}

/* --- depthwise: channel by channel --- */

/* Bytes widened to 32 bits. Compilers convert vectors one by one. */
#if defined(__AVX512F__)
typedef int32_t Wide __attribute__((vector_size(64)));
#define LOAD_BYTES(x) _mm_loadu_si128((const __m128i *)(x))
#define WIDE_UNSIGNED(x) (Wide) _mm512_cvtepu8_epi32(LOAD_BYTES(x))
#define WIDE_SIGNED(x) (Wide) _mm512_cvtepi8_epi32(LOAD_BYTES(x))
#elif defined(__AVX2__)
typedef int32_t Wide __attribute__((vector_size(32)));
#define LOAD_BYTES(x) _mm_loadl_epi64((const __m128i *)(x))
#define WIDE_UNSIGNED(x) (Wide) _mm256_cvtepu8_epi32(LOAD_BYTES(x))
#define WIDE_SIGNED(x) (Wide) _mm256_cvtepi8_epi32(LOAD_BYTES(x))
#else
typedef int32_t Wide __attribute__((vector_size(16)));
#define WIDE_UNSIGNED(x) ((Wide){(x)[0], (x)[1], (x)[2], (x)[3]})
#define WIDE_SIGNED(x) ((Wide){(int8_t)(x)[0], (int8_t)(x)[1], (int8_t)(x)[2], (int8_t)(x)[3]})
#endif
enum { WIDE_LANES = sizeof(Wide) / 4 };

/* One pixel of the result, for `vectors` of channels: sum over the window elements from `begin` to
 * `end`. */
SPECIALIZED void pixel(int32_t *out, const int64_t *n, const uint8_t *x, const int32_t *y, int64_t row,
                       const int64_t begin[2], const int64_t end[2], int zero, const int vectors,
                       const int is_signed)
{
    Wide sums[4];
    UNROLL_FOR (int v = 0; v < vectors; v++)
        sums[v] = (Wide){0};
    for (int64_t i = begin[0]; i < end[0]; i++) {
        const uint8_t *line = x + (i * n[APART_Y] * n[WIDTH] + begin[1] * n[APART_X]) * n[CHANNELS];
        const int32_t *by = y + (i * n[WIDE] + begin[1]) * row;
        for (int64_t j = begin[1]; j < end[1]; j++, by += row, line += n[APART_X] * n[CHANNELS])
            UNROLL_FOR (int v = 0; v < vectors; v++) {
                const uint8_t *from = line + v * WIDE_LANES;
                Wide w;
                memcpy(&w, by + v * WIDE_LANES, sizeof w);
                sums[v] += ((is_signed ? WIDE_SIGNED(from) : WIDE_UNSIGNED(from)) - zero) * w;
            }
    }
    UNROLL_FOR (int v = 0; v < vectors; v++)
        memcpy(out + v * WIDE_LANES, &sums[v], sizeof sums[v]);
}

SPECIALIZED void line_of_pixels(int32_t *out, const int64_t *n, const uint8_t *x, const int32_t *y,
                                int64_t row, int64_t top, int zero, const int is_signed)
{
    const int64_t channels = n[CHANNELS];
    int64_t begin[2] = {0, 0}, end[2] = {n[TALL], n[WIDE]};
    while (begin[0] < end[0] && top + begin[0] * n[APART_Y] < 0)
        begin[0]++;
    while (end[0] > begin[0] && top + (end[0] - 1) * n[APART_Y] >= n[HEIGHT])
        end[0]--;
    for (int64_t a = 0; a < n[ACROSS]; a++, out += channels) {
        const int64_t left = a * n[STRIDE_X] - n[LEFT];
        begin[1] = 0, end[1] = n[WIDE];
        while (begin[1] < end[1] && left + begin[1] * n[APART_X] < 0)
            begin[1]++;
        while (end[1] > begin[1] && left + (end[1] - 1) * n[APART_X] >= n[WIDTH])
            end[1]--;
        const uint8_t *from = x + (top * n[WIDTH] + left) * channels;
        int64_t c = 0;
        for (; c + 4 * WIDE_LANES <= channels; c += 4 * WIDE_LANES)
            pixel(out + c, n, from + c, y + c, row, begin, end, zero, 4, is_signed);
        for (; c < channels; c += WIDE_LANES) {
            if (c + WIDE_LANES > channels && channels >= WIDE_LANES)
                c = channels - WIDE_LANES; /* the last vector overlaps the previous one */
            if (channels >= WIDE_LANES) {
                pixel(out + c, n, from + c, y + c, row, begin, end, zero, 1, is_signed);
                continue;
            }
            for (int64_t one = 0; one < channels; one++) {
                int32_t sum = 0;
                for (int64_t i = begin[0]; i < end[0]; i++)
                    for (int64_t j = begin[1]; j < end[1]; j++) {
                        const uint8_t each =
                            from[(i * n[APART_Y] * n[WIDTH] + j * n[APART_X]) * channels + one];
                        sum += ((is_signed ? (int8_t)each : each) - zero) *
                               y[(i * n[WIDE] + j) * row + one];
                    }
                out[one] = sum;
            }
        }
    }
}

static int depthwise_lines(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                           char *scratch, Next *next)
{
    const int64_t *n = call->ints, channels = n[CHANNELS], row = padded(channels, 32);
    const int64_t window = n[TALL] * n[WIDE], image = n[HEIGHT] * n[WIDTH] * channels;
    const uint8_t *y = (const uint8_t *)p[n[Y]];
    const int x_zero = zero_of(p, n[X_ZERO], n[X_SIGNED]);
    const int y_zero = zero_of(p, n[Y_ZERO], n[Y_SIGNED]);
    int32_t *turned = (int32_t *)scratch; /* with contiguous channels */
    for (int64_t c = 0; c < channels; c++)
        for (int64_t i = 0; i < window; i++) {
            const uint8_t each = y[c * window + i];
            turned[i * row + c] = (n[Y_SIGNED] ? (int8_t)each : each) - y_zero;
        }
    for (int64_t u = begin; u < end; u++) {
        const int64_t m = u * n[ACROSS], top = u % n[DOWN] * n[STRIDE_Y] - n[TOP];
        const uint8_t *x = (const uint8_t *)p[n[X]] + u / n[DOWN] * image;
        int32_t *out = next ? begin_rows(next, p[n[OUT]], m) : (int32_t *)p[n[OUT]];
        if (n[X_SIGNED])
            line_of_pixels(out + m * channels, n, x, turned, row, top, x_zero, 1);
        else
            line_of_pixels(out + m * channels, n, x, turned, row, top, x_zero, 0);
        if (next && end_rows(next, m, n[ACROSS]))
            return 1;
    }
    return 0;
}

static int integer_depthwise(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                             char *scratch)
{
    return depthwise_lines(call, p, begin, end, scratch, NULL);
}

static int integer_depthwise_chain(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                   char *scratch)
{
    char *q[MOST_PARAMETERS + 2];
    Next next = chained(call, p, q, scratch);
    return depthwise_lines(call, p, begin, end, scratch, &next);
}

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
KERNEL_TABLE(bytes, ENTRY(integer_matmul) ENTRY(integer_chain) ENTRY(integer_depthwise)
                        ENTRY(integer_depthwise_chain))
/* clang-format on */
