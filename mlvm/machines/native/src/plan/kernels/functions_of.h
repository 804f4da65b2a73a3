/* The functions of functions.h for one type F with bits U; included once per type. */

static inline U FN(bits)(F x)
{
    union {
        F value;
        U bits;
    } both = {.value = x};
    return both.bits;
}

static inline F FN(of_bits)(U bits)
{
    union {
        U bits;
        F value;
    } both = {.bits = bits};
    return both.value;
}

static inline F FN(magnitude)(F x)
{
    return FN(of_bits)(FN(bits)(x) & ~SIGN);
}

static inline F FN(with_sign)(F magnitude, F sign)
{
    return FN(of_bits)((FN(bits)(magnitude) & ~SIGN) | (FN(bits)(sign) & SIGN));
}

/* Limit x from above or below; a nan stays nan. */
static inline F FN(at_most)(F limit, F x)
{
    return limit < x ? limit : x;
}

static inline F FN(at_least)(F limit, F x)
{
    return limit > x ? limit : x;
}

/* Polynomials, from the constant term on: the low-order terms, which are large, are added last, and the
 * chain of roundings is short. */
static inline F FN(poly3)(F x, F c0, F c1, F c2, F c3)
{
    return MAD(x * x, MAD(c3, x, c2), MAD(c1, x, c0));
}

static inline F FN(poly4)(F x, F c0, F c1, F c2, F c3, F c4)
{
    F square = x * x;
    return MAD(square * square, c4, FN(poly3)(x, c0, c1, c2, c3));
}

static inline F FN(poly5)(F x, F c0, F c1, F c2, F c3, F c4, F c5)
{
    F square = x * x;
    return MAD(square * square, MAD(c5, x, c4), FN(poly3)(x, c0, c1, c2, c3));
}

static inline F FN(poly6)(F x, F c0, F c1, F c2, F c3, F c4, F c5, F c6)
{
    F square = x * x;
    F high = MAD(square, c6, MAD(c5, x, c4));
    return MAD(square * square, high, FN(poly3)(x, c0, c1, c2, c3));
}

static inline F FN(poly9)(F x, F c0, F c1, F c2, F c3, F c4, F c5, F c6, F c7, F c8, F c9)
{
    F square = x * x, fourth = square * square;
    F high = FN(poly5)(x, c4, c5, c6, c7, c8, c9);
    return MAD(fourth, high, FN(poly3)(x, c0, c1, c2, c3));
}

static inline F FN(poly10)(F x, F c0, F c1, F c2, F c3, F c4, F c5, F c6, F c7, F c8, F c9, F c10)
{
    F square = x * x, fourth = square * square;
    F high = FN(poly6)(x, c4, c5, c6, c7, c8, c9, c10);
    return MAD(fourth, high, FN(poly3)(x, c0, c1, c2, c3));
}

static inline F FN(poly11)(F x, F c0, F c1, F c2, F c3, F c4, F c5, F c6, F c7, F c8, F c9, F c10, F c11)
{
    F square = x * x, fourth = square * square;
    F middle = FN(poly3)(x, c4, c5, c6, c7), high = FN(poly3)(x, c8, c9, c10, c11);
    return FN(poly3)(x, c0, c1, c2, c3) + fourth * MAD(fourth, high, middle);
}

/* Clear the lower half of x's digits: products of two such numbers are exact. */
static inline F FN(upper)(F x)
{
    return FN(of_bits)(FN(bits)(x) & UPPER);
}

/* 2^n for a shifted n: n + SHIFTER, whose last bits are n as an integer. */
static inline F FN(power_of_2)(F shifted)
{
    return FN(of_bits)((FN(bits)(shifted) + BIAS) << DIGITS);
}

/* 2^n as 2^h times a factor, both normal even if 2^n is not; and 2^-h. */
static inline F FN(halves)(F shifted, F *rest, F *inverse)
{
    U bits = FN(bits)(shifted), half = (bits + 2 * (BIAS + 1)) >> 1; /* h + BIAS + 1 */
    *rest = FN(of_bits)((bits - half + (2 * BIAS + 1)) << DIGITS);
    *inverse = FN(of_bits)((2 * BIAS + 1 - half) << DIGITS);
    return FN(of_bits)((half - 1) << DIGITS);
}

/* x 2^n, rounded once, even if 2^n is not a normal number. */
static inline F FN(scaled)(F x, F shifted)
{
    F rest, inverse, half = FN(halves)(shifted, &rest, &inverse);
    return x * half * rest;
}

/* e^(high + low) = 2^n (1 + p): returns p, and n shifted. |low| is far below |high|. */
static inline F FN(reduced_expm1)(F high, F low, F *shifted)
{
    *shifted = MAD(high, LOG2_E, SHIFTER);
    F n = *shifted - SHIFTER;
    F r = MAD(-n, LN2_HIGH, high) - MAD(n, LN2_LOW, -low);
    return MAD(r * r, EXPM1(r), r);
}

static inline F FN(exp)(F x)
{
    F shifted, within = FN(at_least)(EXP_LEAST, FN(at_most)(EXP_MOST, x));
    F p = FN(reduced_expm1)(within, 0, &shifted);
    return FN(scaled)(1 + p, shifted);
}

/* 2^n (1 + p) - 1 is 2^n p + (2^n - 1), where the difference is exact. */
static inline F FN(expm1)(F x)
{
    F shifted, within = FN(at_least)(EXPM1_LEAST, FN(at_most)(EXP_MOST, x));
    F p = FN(reduced_expm1)(within, 0, &shifted);
    F half = FN(power_of_2)(shifted - 1); /* 2^n may be too large */
    F y = (half * p + (half - (F)0.5)) * 2;
    return FN(with_sign)(shifted == SHIFTER ? p : y, x);
}

/* With m = e^(2|x|) - 1, tanh|x| is m / (m + 2). */
static inline F FN(tanh)(F x)
{
    F shifted, a = FN(magnitude)(x);
    F p = FN(reduced_expm1)(2 * FN(at_most)(TANH_MOST, a), 0, &shifted);
    F power = FN(power_of_2)(shifted);
    F m = power * p + (power - 1);
    return FN(with_sign)(m / (m + 2), x);
}

/* 1 / (1 + e^v) is s / (s + t), where s = 2^-h is in scale: returns s + t. */
static inline F FN(logistic)(F high, F low, F *s, F *t)
{
    F shifted, rest, p = FN(reduced_expm1)(high, low, &shifted);
    FN(halves)(shifted, &rest, s);
    *t = (1 + p) * rest;
    return *s + *t;
}

static inline F FN(sigmoid)(F x)
{
    F s, t, v = FN(at_most)(-EXP_LEAST, FN(at_least)(-SIGMOID_MOST, -x));
    F sum = FN(logistic)(v, 0, &s, &t);
    return s / sum;
}

/* x = 2^k (1 + f), with 1 + f from sqrt(1/2) to sqrt(2), for a normal or subnormal x > 0. */
static inline F FN(fraction)(F x, F *k)
{
    F small = x < LEAST_NORMAL ? (F)1 : (F)0;
    U bits = FN(bits)(x < LEAST_NORMAL ? x * SUBNORMAL_SCALE : x) + (BITS_OF_1 - BITS_OF_SQRT_HALF);
    F power = FN(of_bits)((bits >> DIGITS) | BITS_OF_INTEGERS) - (INTEGERS + BIAS);
    *k = power - small * (DIGITS + 2);
    return FN(of_bits)((bits & (((U)1 << DIGITS) - 1)) + BITS_OF_SQRT_HALF) - 1;
}

/* Replace the logarithm y of x for special values of x. */
static inline F FN(checked_log)(F y, F x)
{
    F odd = x == 0 ? -(F)INFINITY : x < 0 ? (F)NAN : x;
    return x > 0 && x < (F)INFINITY ? y : odd;
}

/* log(1 + f) is f - f^2 / 2 + s (f^2 / 2 + R), where s = f / (2 + f) and R is a polynomial in s^2
 * (from Sun's fdlibm, as are the coefficients). */
static inline F FN(log)(F x)
{
    F k, f = FN(fraction)(x, &k), s = f / (2 + f), z = s * s, half = (F)0.5 * f * f;
    F y = s * (half + LOG_R(z)) + k * LN2_LOW - half + f + k * LN2_HIGH;
    return FN(checked_log)(y, x);
}

static inline F FN(log1p)(F x)
{
    F k, u = 1 + x, f = FN(fraction)(u, &k);
    F lost = (u > 2 ? 1 - (u - x) : x - (u - 1)) / u; /* u (1 + lost) is 1 + x */
    f = k == 0 ? x : f;
    lost = k == 0 ? 0 : lost;
    F s = f / (2 + f), z = s * s, half = (F)0.5 * f * f;
    F y = s * (half + LOG_R(z)) + (k * LN2_LOW + lost) - half + f + k * LN2_HIGH;
    return FN(magnitude)(x) < LEAST_NORMAL ? x : FN(checked_log)(y, u);
}

/* log(1 + f) as the sum of a short number and a remainder. */
static inline F FN(two_logs)(F f, F *rest)
{
    F s = f / (2 + f), z = s * s, half = (F)0.5 * f * f, high = FN(upper)(f - half);
    *rest = (f - high) - half + s * (half + LOG_R(z));
    return high;
}

static inline F FN(log2)(F x)
{
    F k, low, high = FN(two_logs)(FN(fraction)(x, &k), &low);
    F y = (low + high) * LOG2_E_LOW + low * LOG2_E_HIGH + high * LOG2_E_HIGH + k;
    return FN(checked_log)(y, x);
}

static inline F FN(log10)(F x)
{
    F k, low, high = FN(two_logs)(FN(fraction)(x, &k), &low);
    F y = k * LOG10_2_LOW + (low + high) * LOG10_E_LOW + low * LOG10_E_HIGH;
    return FN(checked_log)(y + high * LOG10_E_HIGH + k * LOG10_2_HIGH, x);
}

/* e^(a^2 / 2) erfc(a / sqrt(2)) for 0 <= a <= GELU_ERF_MOST: 1 / (1 + a), nearly. */
static inline F FN(erfcx)(F a)
{
    return (1 + a * ERFCX_P(a) / ERFCX_Q(a)) / (1 + a);
}

static inline F FN(erf)(F x)
{
    F shifted, a = FN(magnitude)(x), z = FN(at_most)(ERF_MOST, a), square = z * z;
    F p = FN(reduced_expm1)(-square, 0, &shifted);
    F far = 1 - (1 + p) * FN(erfcx)(z * SQRT_2) * FN(power_of_2)(shifted);
    return FN(with_sign)(a < (F)0.5 ? a + a * ERF_NEAR(square) : far, x);
}

/* x^2 / 2 as the sum of a number and a remainder. */
static inline F FN(half_square)(F x, F *rest)
{
    F half = x * (F)0.5, product = half * x;
    *rest = MAD(half, x, -product);
    return product;
}

/* x Phi(x). With Q(a) = erfc(a / sqrt(2)) / 2 that is x Q(-x) for x < 0, else x - x Q(x). */
static inline F FN(gelu_erf)(F x)
{
    F shifted, low, within = FN(at_least)(-GELU_ERF_MOST, FN(at_most)(GELU_ERF_MOST, x));
    F high = FN(half_square)(within, &low);
    F p = FN(reduced_expm1)(-high, -low, &shifted);
    F product = (F)0.5 * within * FN(erfcx)(FN(magnitude)(within));
    F y = FN(scaled)(product + product * p, shifted);
    y = x < 0 ? y : x - y;
    return x == -(F)INFINITY ? (F)NAN : y;
}

/* Phi(x) + x Phi'(x). For x < 0 it is e^(-x^2 / 2) (erfcx(-x / sqrt(2)) / 2 + k x), with k = 1 / sqrt(2
 * pi); for x > 0 it is 1 minus the value at -x. It starts with the same computation as gelu_erf, which a
 * loop over both shares. */
static inline F FN(gelu_erf_slope)(F x)
{
    F shifted, low, within = FN(at_least)(-GELU_ERF_MOST, FN(at_most)(GELU_ERF_MOST, x));
    F high = FN(half_square)(within, &low), a = FN(magnitude)(within);
    F p = FN(reduced_expm1)(-high, -low, &shifted);
    F sum = (F)0.5 * FN(erfcx)(a) - a * INVERSE_SQRT_TWO_PI;
    F slope = FN(scaled)(sum + sum * p, shifted);
    return x < 0 ? slope : 1 - slope;
}

/* v = x (c1 + c3 x^2) as the sum of a number and a remainder, where tanh's argument in gelu is v / 2;
 * and v'. All products and sums except those of the remainder are exact. */
static inline F FN(cubic)(F x, F *rest, F *slope)
{
    F c1 = C1_HIGH + C1_LOW, c1_rest = (C1_HIGH - c1) + C1_LOW, c3_rest = (C3_HIGH - C3) + C3_LOW;
    F square = x * x, square_rest = MAD(x, x, -square), factor = MAD(C3, square, c1);
    F cubic_part = factor - c1, linear_part = factor - cubic_part;
    F factor_rest = MAD(C3, square, -cubic_part) + (c1 - linear_part);
    factor_rest += MAD(c3_rest, square, MAD(C3, square_rest, c1_rest));
    F product = x * factor;
    *rest = MAD(x, factor_rest, MAD(x, factor, -product));
    *slope = MAD(3, factor, -2 * c1) + MAD(3, factor_rest, -2 * c1_rest); /* c1 + 3 c3 x^2 */
    return product;
}

/* x / (1 + e^-v), which is x (1 + tanh(v / 2)) / 2. */
static inline F FN(gelu_tanh)(F x)
{
    F s, t, low, slope, above = FN(at_least)(-GELU_TANH_MOST, x);
    F high = FN(cubic)(FN(at_most)(LINEAR_FROM, above), &low, &slope);
    F sum = FN(logistic)(-high, -low, &s, &t);
    F y = above / sum * s;
    return x == -(F)INFINITY ? (F)NAN : y;
}

/* With y = 1 / (1 + e^-v): y (1 + (1 - y) x v'). It starts with the same computation as gelu_tanh. */
static inline F FN(gelu_tanh_slope)(F x)
{
    F s, t, low, slope, within = FN(at_most)(LINEAR_FROM, FN(at_least)(-GELU_TANH_MOST, x));
    F high = FN(cubic)(within, &low, &slope);
    F sum = FN(logistic)(-high, -low, &s, &t);
    F bend = t / sum * (within * slope);
    return (1 + bend) / sum * s;
}
