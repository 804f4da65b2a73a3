/* sin, cos and tan, computed in f64. With n the nearest integer, x is n pi / 2 + r, where |r| is at most
 * pi / 4; n selects sin(r), cos(r) or their negatives. pi / 2 is split into numbers with so few digits
 * that their products with n are exact (Cody and Waite, Software manual for the elementary functions,
 * 1980); the rounding errors of the differences are kept. The polynomials are from Sun's fdlibm, for f32
 * from FreeBSD's. Rows use the C library for numbers beyond TURNS_MOST. */
#ifndef MLVM_TRIGONOMETRIC_H
#define MLVM_TRIGONOMETRIC_H

#include "functions.h"

#define TURNS_MOST 1.6e6 /* n has 20 digits */
#define TWO_BY_PI 6.36619772367581382433e-01
#define PI_1 1.57079632673412561417e+00 /* 33 digits of pi / 2, and the next, and the next */
#define PI_2 6.07710050630396597660e-11
#define PI_3 2.02226624871116645580e-21
#define PI_4 8.47842766036889956997e-32
#define PI_2_TO_4 6.07710050650619224932e-11

/* The rounding error of x - y; `difference` is the rounded result (Knuth's TwoSum). */
static inline double lost(double x, double y, double difference)
{
    double of_y = x - difference, of_x = difference + of_y;
    return (x - of_x) - (y - of_y);
}

typedef struct {
    double sine, cosine;
    uint64_t quarter; /* the last digits of n */
} Turn;

static inline Turn turn_f64(double x)
{
    double shifted = MAD_F64(x, TWO_BY_PI, 0x1.8p52), n = shifted - 0x1.8p52;
    double first = x - n * PI_1, second = first - n * PI_2, third = second - n * PI_3;
    double rest = lost(first, n * PI_2, second) + (lost(second, n * PI_3, third) - n * PI_4);
    double r = third + rest, low = (third - r) + rest, z = r * r, half = 0.5 * z, upper = 1 - half;
    double s = poly4_f64(z, 8.33333333332248946124e-03, -1.98412698298579493134e-04,
                         2.75573137070700676789e-06, -2.50507602534068634195e-08,
                         1.58969099521155010221e-10);
    double c = poly5_f64(z, 4.16666666666666019037e-02, -1.38888888888741095749e-03,
                         2.48015872894767294178e-05, -2.75573143513906633035e-07,
                         2.08757232129817482790e-09, -1.13596475577881948265e-11);
    double cube = z * r, bend = (z * (0.5 * low - cube * s) - low) + cube * 1.66666666666666324348e-01;
    return (Turn){r - bend, upper + (((1 - upper) - half) + (z * (z * c) - r * low)), bits_f64(shifted)};
}

static inline Turn turn_f32(float angle)
{
    double x = angle, shifted = MAD_F64(x, TWO_BY_PI, 0x1.8p52), n = shifted - 0x1.8p52;
    double r = (x - n * PI_1) - n * PI_2_TO_4, z = r * r;
    double s = poly3_f64(z, -0x15555554cbac77.0p-55, 0x111110896efbb2.0p-59, -0x1a00f9e2cae774.0p-65,
                         0x16cd878c3b46a7.0p-71);
    double c = poly3_f64(z, -0x1ffffffd0c5e81.0p-54, 0x155553e1053a42.0p-57, -0x16c087e80f1e27.0p-62,
                         0x199342e0ee5069.0p-68);
    return (Turn){MAD_F64(r * z, s, r), MAD_F64(z, c, 1), bits_f64(shifted)};
}

/* x, or -x if the second lowest bit of `quarter` is 1. */
static inline double turned(double x, uint64_t quarter)
{
    return of_bits_f64(bits_f64(x) ^ (quarter & 2) << 62);
}

/* Return x if n is odd, otherwise y. */
static inline double where_odd(uint64_t quarter, double x, double y)
{
    return of_bits_f64(bits_f64(y) ^ ((bits_f64(x) ^ bits_f64(y)) & (0 - (quarter & 1))));
}

/* For a tiny x, the function returns x, also for -0. */
#define TINY(x, y) (fabs(x) < 0x1p-27 ? (x) : (y))

#define TURNS(t, T)                                                                       \
    static inline T sin_##t(T x)                                                          \
    {                                                                                     \
        const Turn at = turn_##t(x);                                                      \
        return (T)TINY(x, turned(where_odd(at.quarter, at.cosine, at.sine), at.quarter)); \
    }                                                                                     \
    static inline T cos_##t(T x)                                                          \
    {                                                                                     \
        const Turn at = turn_##t(x);                                                      \
        return (T)turned(where_odd(at.quarter, at.sine, at.cosine), at.quarter + 1);      \
    }                                                                                     \
    static inline T tan_##t(T x)                                                          \
    {                                                                                     \
        const Turn at = turn_##t(x);                                                      \
        const double below = where_odd(at.quarter, at.sine, at.cosine);                   \
        return (T)TINY(x, where_odd(at.quarter, -at.cosine, at.sine) / below);            \
    }
TURNS(f32, float)
TURNS(f64, double)

#endif
