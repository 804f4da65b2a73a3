/* Row functions of the elementwise ops, for every dtype: add_f32, less_i64, astype_u8_f32, ...
 * elementwise_ops.def defines what they compute, one row per op. This file has the loops and helpers.
 *
 * Integers wrap around as numpy's do: their arithmetic is that of a wide enough unsigned type. */
#include "../plan.h"
#include "functions.h"
#include "half.h"
#include "trigonometric.h"

#include <string.h>

#include "digest.h"

#define PASTE_(x, y) x##y
#define PASTE(x, y) PASTE_(x, y)

/* Lists of (dtype, C type, type of the computation). */
#define EACH_UNSIGNED(X)       \
    X(u8, uint8_t, uint32_t)   \
    X(u16, uint16_t, uint32_t) \
    X(u32, uint32_t, uint32_t) \
    X(u64, uint64_t, uint64_t)
#define EACH_SIGNED(X)        \
    X(i8, int8_t, uint32_t)   \
    X(i16, int16_t, uint32_t) \
    X(i32, int32_t, uint32_t) \
    X(i64, int64_t, uint64_t)
#define INTEGERS(X) EACH_UNSIGNED(X) EACH_SIGNED(X)
#define FLOATS(X) X(f32, float, float) X(f64, double, double)
#define EACH_BOOL(X) X(bool, uint8_t, uint32_t)
/* Two f64 are moved as one complex number. */
/* clang-format off */
#define SIZES(X)                                                                         \
    X(1, uint8_t, ) X(2, uint16_t, ) X(4, uint32_t, ) X(8, uint64_t, ) X(16, _Complex double, )
/* clang-format on */

/* Function `name` of a single element, with operands of types X, Y, Z, defined by an expression of x, y, z. */
#define ELEMENT(name, R, X, Y, Z, expression)                  \
    static const Link *PASTE(name, _element)(const Link *link) \
    {                                                          \
        X x = *(const X *)link->at[1];                         \
        Y y = *(const Y *)link->at[2];                         \
        Z z = *(const Z *)link->at[3];                         \
        (void)y, (void)z;                                      \
        *(R *)link->at[0] = (R)(expression);                   \
        return link[1].run(link + 1);                          \
    }
/* One element, computed by the row function. */
static const Link *row_element(const Link *link)
{
    static const int64_t ones[] = {1, 1, 1, 1};
    link->row(link->at, 1, ones);
    return link[1].run(link + 1);
}
/* Function of a single element, and a row function. */
#define UNARY_ROW(name, R, X, expression)                                      \
    ELEMENT(name, R, X, X, X, expression)                                      \
    static void PASTE(name, _row)(char *const *p, int64_t n, const int64_t *a) \
    {                                                                          \
        (void)a;                                                               \
        R *out = (R *)p[0];                                                    \
        const X *xs = (const X *)p[1];                                         \
        INDEPENDENT_FOR (int64_t i = 0; i < n; i++) {                          \
            X x = xs[i];                                                       \
            out[i] = (R)(expression);                                          \
        }                                                                      \
    }
#define BINARY_ROW(name, R, X, expression)                                     \
    ELEMENT(name, R, X, X, X, expression)                                      \
    static void PASTE(name, _row)(char *const *p, int64_t n, const int64_t *a) \
    {                                                                          \
        (void)a;                                                               \
        R *out = (R *)p[0];                                                    \
        const X *xs = (const X *)p[1], *ys = (const X *)p[2];                  \
        INDEPENDENT_FOR (int64_t i = 0; i < n; i++) {                          \
            X x = xs[i], y = ys[i];                                            \
            out[i] = (R)(expression);                                          \
        }                                                                      \
    }
#define TERNARY_ROW(name, R, X, Y, expression) MIXED_ROW(name, R, X, Y, Y, expression)
#define MIXED_ROW(name, R, X, Y, Z, expression)                                \
    ELEMENT(name, R, X, Y, Z, expression)                                      \
    static void PASTE(name, _row)(char *const *p, int64_t n, const int64_t *a) \
    {                                                                          \
        (void)a;                                                               \
        R *out = (R *)p[0];                                                    \
        const X *xs = (const X *)p[1];                                         \
        const Y *ys = (const Y *)p[2];                                         \
        const Z *zs = (const Z *)p[3];                                         \
        INDEPENDENT_FOR (int64_t i = 0; i < n; i++) {                          \
            X x = xs[i];                                                       \
            Y y = ys[i];                                                       \
            Z z = zs[i];                                                       \
            out[i] = (R)(expression);                                          \
        }                                                                      \
    }
/* A row function with steps. Blocks are loaded as vectors, by expressions of vectors. */
#if defined(__AVX512F__)
#define ROW_VECTOR 64
#elif defined(__AVX2__)
#define ROW_VECTOR 32
#else
#define ROW_VECTOR 16
#endif
typedef float Part_f32 __attribute__((vector_size(ROW_VECTOR), aligned(4), may_alias));
typedef double Part_f64 __attribute__((vector_size(ROW_VECTOR), aligned(8), may_alias));
#define STEPPED_ROW(name, part, T, expression)                                   \
    ELEMENT(name, T, T, T, T, expression)                                        \
    static void PASTE(name, _row)(char *const *p, int64_t n, const int64_t *by)  \
    {                                                                            \
        enum { BLOCK = BLOCK_BYTES / sizeof(T), PART = ROW_VECTOR / sizeof(T) }; \
        T *out = (T *)p[0];                                                      \
        const T *xs = (const T *)p[1], *ys = (const T *)p[2];                    \
        int64_t dx = by[1] * BLOCK, dy = by[2] * BLOCK;                          \
        for (; n >= BLOCK; n -= BLOCK) {                                         \
            _Pragma("GCC unroll 4") for (int i = 0; i < BLOCK; i += PART)        \
            {                                                                    \
                part x = *(const part *)(xs + i), y = *(const part *)(ys + i);   \
                *(part *)(out + i) = expression;                                 \
            }                                                                    \
            out += BLOCK, xs += dx, ys += dy;                                    \
        }                                                                        \
        int64_t i = 0;                                                           \
        for (; i + PART <= n; i += PART) {                                       \
            part x = *(const part *)(xs + i), y = *(const part *)(ys + i);       \
            *(part *)(out + i) = expression;                                     \
        }                                                                        \
        for (; i < n; i++) {                                                     \
            T x = xs[i], y = ys[i];                                              \
            out[i] = expression;                                                 \
        }                                                                        \
    }
/* Two results of an operand in one pass. */
#define PAIR_ROW(name, T, first, second)                                       \
    static void PASTE(name, _row)(char *const *p, int64_t n, const int64_t *a) \
    {                                                                          \
        (void)a;                                                               \
        T *out = (T *)p[0], *other = (T *)p[1];                                \
        const T *xs = (const T *)p[2];                                         \
        INDEPENDENT_FOR (int64_t i = 0; i < n; i++) {                          \
            T x = xs[i], y = (T)(first), z = (T)(second);                      \
            out[i] = y;                                                        \
            other[i] = z;                                                      \
        }                                                                      \
    }
/* --- arithmetic --- */

#define INTEGER_ORDER(t, T, W)             \
    static inline T greatest_##t(T x, T y) \
    {                                      \
        return x > y ? x : y;              \
    }                                      \
    static inline T least_##t(T x, T y)    \
    {                                      \
        return x < y ? x : y;              \
    }
INTEGERS(INTEGER_ORDER)

/* Return a nan if x or y is nan; return y for zeros of different signs. */
#define FLOAT_ORDER(t, T, W)               \
    static inline T greatest_##t(T x, T y) \
    {                                      \
        T larger = x > y ? x : y;          \
        return x != x ? x : larger;        \
    }                                      \
    static inline T least_##t(T x, T y)    \
    {                                      \
        T smaller = x < y ? x : y;         \
        return x != x ? x : smaller;       \
    }
FLOATS(FLOAT_ORDER)

/* Division rounds down, and gives 0 for a divisor of 0. */
#define UNSIGNED_DIVISION(t, T, W)         \
    static inline T quotient_##t(T x, T y) \
    {                                      \
        return y ? x / y : 0;              \
    }                                      \
    static inline T modulus_##t(T x, T y)  \
    {                                      \
        return y ? x % y : 0;              \
    }
EACH_UNSIGNED(UNSIGNED_DIVISION)

#define SIGNED_DIVISION(t, T, W)                                         \
    static inline T quotient_##t(T x, T y)                               \
    {                                                                    \
        if (y == 0 || y == -1) /* the minimum integer has no negative */ \
            return y ? (T)(0 - (W)x) : 0;                                \
        return (T)(x / y - (x % y && (x < 0) != (y < 0)));               \
    }                                                                    \
    static inline T modulus_##t(T x, T y)                                \
    {                                                                    \
        if (y == 0 || y == -1)                                           \
            return 0;                                                    \
        T rest = (T)(x % y);                                             \
        return (T)(rest && (x < 0) != (y < 0) ? rest + y : rest);        \
    }
EACH_SIGNED(SIGNED_DIVISION)

/* Computed from the exact remainder, as in numpy. For an infinity and for division by 0, the quotient
 * follows the Array API standard. `s` is the suffix of C's functions of the type. */
#define FLOAT_DIVISION(t, T, s)                                               \
    static inline T modulus_##t(T x, T y)                                     \
    {                                                                         \
        T rest = fmod##s(x, y);                                               \
        if (y == 0)                                                           \
            return rest;                                                      \
        if (rest == 0)                                                        \
            return copysign##s(0, y);                                         \
        return (y < 0) != (rest < 0) ? rest + y : rest;                       \
    }                                                                         \
    static inline T quotient_##t(T x, T y)                                    \
    {                                                                         \
        if (y == 0 || fabs##s(x) == (T)INFINITY || fabs##s(y) == (T)INFINITY) \
            return x / y;                                                     \
        T rest = fmod##s(x, y), quotient = (x - rest) / y;                    \
        if (rest != 0 && (y < 0) != (rest < 0))                               \
            quotient -= 1;                                                    \
        if (quotient == 0)                                                    \
            return copysign##s(0, x / y);                                     \
        T whole = floor##s(quotient);                                         \
        return quotient - whole > (T)0.5 ? whole + 1 : whole;                 \
    }

/* A version without fmod for cases with the same result: the floor of the rounded quotient is correct,
 * or too large by one, which the sign of the exact remainder shows. It requires finite quotients that
 * are small enough to be exact; other blocks use the slow version. f32 computes in f64, in which
 * products with such quotients are exact. */
#define SHORT_DIVISION(name, t, T, rest_of, limit, result, exact)              \
    static void name##_##t##_row(char *const *p, int64_t n, const int64_t *a)  \
    {                                                                          \
        (void)a;                                                               \
        T block[DIVISION_BLOCK];                                               \
        for (int64_t at = 0; at < n; at += DIVISION_BLOCK) {                   \
            int64_t count = n - at < DIVISION_BLOCK ? n - at : DIVISION_BLOCK; \
            const T *xs = (const T *)p[1] + at, *ys = (const T *)p[2] + at;    \
            int others = 0;                                                    \
            for (int64_t i = 0; i < count; i++) {                              \
                double x = xs[i], y = ys[i], whole = __builtin_floor(x / y);   \
                double rest = rest_of(whole, x, y);                            \
                others |= rest != rest;                                        \
                whole -= (rest != 0) & ((rest < 0) != (y < 0));                \
                rest = rest_of(whole, x, y);                                   \
                others |= !(fabs(whole) < limit);                              \
                block[i] = (T)(result);                                        \
            }                                                                  \
            if (others)                                                        \
                for (int64_t i = 0; i < count; i++)                            \
                    block[i] = exact(xs[i], ys[i]);                            \
            memcpy((T *)p[0] + at, block, (size_t)count * sizeof(T));          \
        }                                                                      \
    }
#define SHORT_DIVISIONS(t, T, rest_of, limit)                               \
    SHORT_DIVISION(floor_divide, t, T, rest_of, limit, whole, quotient_##t) \
    SHORT_DIVISION(remainder, t, T, rest_of, limit, rest == 0 ? copysign(0, y) : rest, modulus_##t)
enum { DIVISION_BLOCK = 256 };
#define REST(whole, x, y) (x - whole * y)
#define FUSED_REST(whole, x, y) FUSED_F64(-whole, y, x)
FLOAT_DIVISION(f32, float, f)
FLOAT_DIVISION(f64, double, )
SHORT_DIVISIONS(f32, float, REST, 4194304.0)                 /* 2^22 */
SHORT_DIVISIONS(f64, double, FUSED_REST, 2251799813685248.0) /* 2^51 */

/* An element has the same bits in any row: elements beyond TURNS_MOST, and only these, use the C library
 * in a wider type, because the last bits in the same type are not always correct. */
#define TURNING(name, t, T, longer)                                           \
    static void name##_##t##_row(char *const *p, int64_t n, const int64_t *a) \
    {                                                                         \
        (void)a;                                                              \
        T block[TURNING_BLOCK];                                               \
        for (int64_t at = 0; at < n; at += TURNING_BLOCK) {                   \
            int64_t count = n - at < TURNING_BLOCK ? n - at : TURNING_BLOCK;  \
            const T *xs = (const T *)p[1] + at;                               \
            int others = 0;                                                   \
            for (int64_t i = 0; i < count; i++) {                             \
                others |= !(fabs((double)xs[i]) <= TURNS_MOST);               \
                block[i] = name##_##t(xs[i]);                                 \
            }                                                                 \
            for (int64_t i = 0; others && i < count; i++)                     \
                if (!(fabs((double)xs[i]) <= TURNS_MOST))                     \
                    block[i] = (T)longer(xs[i]);                              \
            memcpy((T *)p[0] + at, block, (size_t)count * sizeof(T));         \
        }                                                                     \
    }
enum { TURNING_BLOCK = 256 };
TURNING(sin, f32, float, sin)
TURNING(cos, f32, float, cos)
TURNING(tan, f32, float, tan)
TURNING(sin, f64, double, sinl)
TURNING(cos, f64, double, cosl)
TURNING(tan, f64, double, tanl)

/* For equal operands, which may be infinite, add log(2). */
#define LOG_OF_SUM(t, T, s)                                                           \
    static inline T log_of_sum_##t(T x, T y)                                          \
    {                                                                                 \
        return greatest_##t(x, y) + log1p_##t(exp_##t(x == y ? 0 : -fabs##s(x - y))); \
    }
LOG_OF_SUM(f32, float, f)
LOG_OF_SUM(f64, double, )

/* x to the power y: for f32, e^(y log |x|) in f64, whose error is far below the last bit of f32. */
static inline float power_f32(float x, float y)
{
    const double size = fabs((double)x), exponent = y, half = exponent * 0.5;
    const double floor_of = __builtin_floor(exponent), floor_of_half = __builtin_floor(half);
    double power = exp_f64(exponent * log_f64(size)), sign = copysign(1, (double)x);
    power = size == 1 && y == y ? 1 : power;
    power = x < 0 && size < INFINITY && floor_of != exponent ? NAN : power;
    power = floor_of == exponent && floor_of_half != half ? sign * power : power;
    return (float)(y == 0 || x == 1 ? 1 : power);
}
#define power_f64 pow

/* A shift by the width or more leaves only the sign. */
#define SHORT_SHIFT ((uint64_t)y < 8 * sizeof x)

/* --- moves --- */

#define MOVES(size, T, unused)                                                 \
    TERNARY_ROW(where_##size, T, uint8_t, T, x ? y : z)                        \
    ELEMENT(copy_##size, T, T, T, T, x)                                        \
    static void copy_##size##_row(char *const *p, int64_t n, const int64_t *a) \
    {                                                                          \
        (void)a;                                                               \
        if (p[0] != p[1])                                                      \
            memcpy(p[0], p[1], (size_t)n *size);                               \
    }
SIZES(MOVES)

/* --- conversion from type `from` (A in C) to t, whose maximum is `most` --- */

#define TO_INTEGERS(X, from, A)           \
    X(from, A, u8, uint8_t, UINT8_MAX)    \
    X(from, A, u16, uint16_t, UINT16_MAX) \
    X(from, A, u32, uint32_t, UINT32_MAX) \
    X(from, A, u64, uint64_t, UINT64_MAX) \
    X(from, A, i8, int8_t, INT8_MAX)      \
    X(from, A, i16, int16_t, INT16_MAX)   \
    X(from, A, i32, int32_t, INT32_MAX)   \
    X(from, A, i64, int64_t, INT64_MAX)
#define CONVERSION(from, A, t, T, most) UNARY_ROW(astype_##from##_##t, T, A, x)
#define CONVERSIONS(from, A, W)        \
    CONVERSION(from, A, f32, float, )  \
    CONVERSION(from, A, f64, double, ) \
    UNARY_ROW(astype_##from##_bool, uint8_t, A, x != 0)
#define OF_INTEGERS(from, A, W) TO_INTEGERS(CONVERSION, from, A)
EACH_BOOL(OF_INTEGERS)
INTEGERS(OF_INTEGERS)
EACH_BOOL(CONVERSIONS)
INTEGERS(CONVERSIONS)
FLOATS(CONVERSIONS)

/* Values out of range are clamped first, because C leaves their conversion undefined; nan becomes 0.
 * Both limits are exact: the minimum integer, and the power of two after `most`. */
#define TRUNCATION(from, A, t, T, most)                                  \
    static inline T truncated_##from##_##t(A x)                          \
    {                                                                    \
        const A low = (A)(T) ~(T)(most), end = 2 * (A)((most) / 2 + 1);  \
        const T inside = (T)(x >= low && x < end ? x : 0);               \
        return x >= end ? (T)(most) : x < low ? (T) ~(T)(most) : inside; \
    }                                                                    \
    UNARY_ROW(astype_##from##_##t, T, A, truncated_##from##_##t(x))
#define TRUNCATIONS(from, A, W) TO_INTEGERS(TRUNCATION, from, A)
FLOATS(TRUNCATIONS)

/* --- between floats and quantized integers --- */

#define QUANTIZED(t, T, least, most)                                                        \
    static inline T quantized_##t(float x, float scale, T zero)                             \
    {                                                                                       \
        const float y = __builtin_rintf(x / scale) + (float)zero;                           \
        const float inside = y < (most) ? y : (most), all = y > (least) ? inside : (least); \
        return (T)(int32_t)(y != y ? 0 : all);                                              \
    }                                                                                       \
    MIXED_ROW(quantize_linear_##t, T, float, float, T, quantized_##t(x, y, z))
QUANTIZED(u8, uint8_t, 0.0f, 255.0f)
QUANTIZED(i8, int8_t, -128.0f, 127.0f)
#define DEQUANTIZED(t, T) \
    MIXED_ROW(dequantize_linear_##t, float, T, float, T, (float)(int32_t)((uint32_t)x - (uint32_t)z) * y)
DEQUANTIZED(u8, uint8_t)
DEQUANTIZED(i8, int8_t)
DEQUANTIZED(i32, int32_t)

/* --- half precision: see half.h --- */

/* Round an f64 to f32, to odd: a second rounding then equals one direct rounding of the f64. */
static inline float to_odd(double x)
{
    float nearest = (float)x;
    uint32_t bits = bits_of_float(nearest);
    bits -= fabs((double)nearest) > fabs(x);
    bits |= nearest != x && x == x;
    return float_of_bits(bits);
}

#define HALF(t, T, W)                                          \
    UNARY_ROW(astype_##t##_f32, float, uint16_t, widen_##t(x)) \
    UNARY_ROW(astype_f32_##t, uint16_t, float, narrow_##t(x))  \
    UNARY_ROW(astype_f64_##t, uint16_t, double, narrow_##t(to_odd(x)))
#define HALVES(X) X(f16, , ) X(bf16, , )
HALVES(HALF)

/* Ops on bf16 that avoid rows of f32. GELUs are accurate to eight bits: within 2^-15 of the true value,
 * except for x < -10, where the result is 0 instead of less than 1e-36. */
#define SHORT_C1 1.5957691216057308f /* 2 sqrt(2 / pi), and 0.044715 times that */
#define SHORT_C3 0.07135481282553068f
#define LOG2_E 1.44269504f

/* 2^x for |x| <= 126, within 2^-18: 2^r by a minimax polynomial, where r is the fractional part of x. */
static inline float short_exp2(float x)
{
    float shifted = x + 0x1.8p23f, r = x - (shifted - 0x1.8p23f);
    float p = MAD_F32(MAD_F32(0.00958285294f, r, 0.0559064262f), r, 0.240240991f);
    p = MAD_F32(MAD_F32(p, r, 0.693124175f), r, 1);
    return float_of_bits(bits_of_float(p) + (bits_of_float(shifted) << 23));
}

/* y = 1 / (1 + e^-v) for v = x (c1 + c3 x^2); also (1 - y) x v'. */
static inline float short_logistic(float x, float *bend)
{
    float within = at_most_f32(10, at_least_f32(-10, x)), square = within * within;
    float power = within * MAD_F32(-SHORT_C3 * LOG2_E, square, -SHORT_C1 * LOG2_E);
    float e = short_exp2(power), y = 1 / (1 + e);
    *bend = e * y * (within * MAD_F32(3 * SHORT_C3, square, SHORT_C1));
    return x < -10 ? 0 : y;
}

static inline float short_gelu_tanh(float x)
{
    float bend;
    return x * short_logistic(x, &bend);
}

static inline float short_gelu_tanh_slope(float x)
{
    float bend, y = short_logistic(x, &bend);
    return y * (1 + bend);
}

/* Round an f32 that was computed from bf16 inputs only. Its NaNs have zero low bits, so rounding cannot
 * carry. */
static inline uint16_t narrow_from_bf16(float x)
{
    uint32_t bits = bits_of_float(x);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

#define BF16_UNARY(op, result) \
    UNARY_ROW(op##_bf16, uint16_t, uint16_t, narrow_from_bf16(result(widen_bf16(x))))
#define BF16_BINARY(op, result) \
    BINARY_ROW(op##_bf16, uint16_t, uint16_t, narrow_from_bf16(result(widen_bf16(x), widen_bf16(y))))
#define SUM_OF(x, y) (x) + (y)
#define DIFFERENCE(x, y) (x) - (y)
#define PRODUCT(x, y) (x) * (y)
BF16_BINARY(add, SUM_OF)
BF16_BINARY(subtract, DIFFERENCE)
BF16_BINARY(multiply, PRODUCT)
BF16_UNARY(gelu_tanh, short_gelu_tanh)
BF16_UNARY(gelu_tanh_slope, short_gelu_tanh_slope)
PAIR_ROW(gelu_tanh_and_slope_bf16, uint16_t, narrow_from_bf16(short_gelu_tanh(widen_bf16(x))),
         narrow_from_bf16(short_gelu_tanh_slope(widen_bf16(x))))

/* --- lines --- */

#define DT f32
#define T float
#include "line_of.h"
#define DT f64
#define T double
#include "line_of.h"

/* Two ops of a line on single elements. */
#define ELEMENT_add(x, y) (x + y)
#define ELEMENT_subtract(x, y) (x - y)
#define ELEMENT_subtract_from(x, y) (y - x)
#define ELEMENT_multiply(x, y) (x * y)
#define ELEMENT_divide(x, y) (x / y)
#define ELEMENT_divide_by(x, y) (y / x)
#define EACH_SECOND(X, t, T, first) \
    X(t, T, first, add)             \
    X(t, T, first, subtract)        \
    X(t, T, first, subtract_from) X(t, T, first, multiply) X(t, T, first, divide) X(t, T, first, divide_by)
#define EACH_TWO(X, t, T)     \
    EACH_SECOND(X, t, T, add) \
    EACH_SECOND(X, t, T, subtract) EACH_SECOND(X, t, T, multiply) EACH_SECOND(X, t, T, divide)
#define TWO_ELEMENTS(t, T, first, second) \
    ELEMENT(first##_then_##second##_##t, T, T, T, T, ELEMENT_##second(ELEMENT_##first(x, y), z))
EACH_TWO(TWO_ELEMENTS, f32, float)
EACH_TWO(TWO_ELEMENTS, f64, double)

/* --- the ops --- */

#define BOOL 1
#define UNSIGNED 2
#define SIGNED 3
#define FLOAT 4
#define OF(function) MLVM_JOIN(function, DT)
#define MATH(function) PASTE(function, SUFFIX)

#define UNARY(op, cost, result) UNARY_ROW(OF(op), T, T, result)
#define BINARY(op, cost, result) BINARY_ROW(OF(op), T, T, result)
#define STEPPED(op, cost, result) STEPPED_ROW(OF(op), OF(Part), T, result)
#define TERNARY(op, cost, result) TERNARY_ROW(OF(op), T, T, T, result)
#define PAIR(op, cost, first, second) PAIR_ROW(OF(PASTE(op, _and_slope)), T, first, second)
#define PREDICATE(op, cost, result) UNARY_ROW(OF(op), uint8_t, T, result)
#define COMPARISON(op, cost, result) BINARY_ROW(OF(op), uint8_t, T, result)
#define OWN_LOOP(op, cost)
#define SAME(op)
#include "elementwise_dtypes.h"

/* --- the table --- */

#define SIMPLE 0.03
#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
#define ENTRY_(name, row, cost) ROW_(name, TEXT(name), PASTE(row, _row), PASTE(row, _element), cost)
#define ONLY_ROW(name, cost) ROW_(name, TEXT(name), PASTE(name, _row), row_element, cost)
#define ENTRY(name) ENTRY_(name, name, SIMPLE)
#define TWO_ENTRY(t, T, first, second)                                         \
    ROW_(first##_then_##second##_##t, TEXT(first##_then_##second##_##t), NULL, \
         first##_then_##second##_##t##_element, SIMPLE)
/* clang-format off */
#define ENTRIES_OF_ALL(t, T, W)                                                          \
    ENTRY(astype_##t##_u8) ENTRY(astype_##t##_u16) ENTRY(astype_##t##_u32)               \
    ENTRY(astype_##t##_u64) ENTRY(astype_##t##_i8) ENTRY(astype_##t##_i16)               \
    ENTRY(astype_##t##_i32) ENTRY(astype_##t##_i64) ENTRY(astype_##t##_f32)              \
    ENTRY(astype_##t##_f64) ENTRY(astype_##t##_bool)
#define ENTRIES_OF_HALF(t, T, W)                                                         \
    ENTRY(astype_##t##_f32) ENTRY(astype_f32_##t) ENTRY(astype_f64_##t)
/* clang-format on */
#define ENTRIES_OF_SIZE(size, T, unused) ENTRY(where_##size) ENTRY(copy_##size)

#undef UNARY
#undef BINARY
#undef STEPPED
#undef TERNARY
#undef PAIR
#undef PREDICATE
#undef COMPARISON
#undef OWN_LOOP
#undef SAME
#define UNARY(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define BINARY(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define STEPPED(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define TERNARY(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define PAIR(op, cost, first, second) ONLY_ROW(OF(PASTE(op, _and_slope)), cost)
#define PREDICATE(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define COMPARISON(op, cost, result) ENTRY_(OF(op), OF(op), cost)
#define OWN_LOOP(op, cost) ONLY_ROW(OF(op), cost)
#define SAME(op) ENTRY_(OF(op), MLVM_JOIN(copy, SIZE), SIMPLE)

/* clang-format off */
#ifndef WANTED
const RowEntry TARGETED(elementwise_rows)[] = {
#endif
    ONLY_ROW(digest, SIMPLE) /* the first, as digests of small tensors search for it often */
    EACH_BOOL(ENTRIES_OF_ALL) INTEGERS(ENTRIES_OF_ALL) FLOATS(ENTRIES_OF_ALL)
    HALVES(ENTRIES_OF_HALF) SIZES(ENTRIES_OF_SIZE)
    ONLY_ROW(line_f32, SIMPLE) ONLY_ROW(line_f64, SIMPLE)
    EACH_TWO(TWO_ENTRY, f32, float) EACH_TWO(TWO_ENTRY, f64, double)
    ENTRY(add_bf16) ENTRY(subtract_bf16) ENTRY(multiply_bf16)
    ENTRY_(quantize_linear_u8, quantize_linear_u8, 0.2)
    ENTRY_(quantize_linear_i8, quantize_linear_i8, 0.2)
    ENTRY(dequantize_linear_u8) ENTRY(dequantize_linear_i8) ENTRY(dequantize_linear_i32)
    ENTRY_(gelu_tanh_bf16, gelu_tanh_bf16, 0.15)
    ENTRY_(gelu_tanh_slope_bf16, gelu_tanh_slope_bf16, 0.15)
    ONLY_ROW(gelu_tanh_and_slope_bf16, 0.2)
#include "elementwise_dtypes.h"
#ifndef WANTED
    {NULL, NULL, NULL, 0}
};
#endif
