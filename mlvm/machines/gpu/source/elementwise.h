/* Elementwise functions that C lacks, for each dtype: floor_divide_f32(x, y). */

/* Functions that also accept vectors. */
#define FUNCTIONS_OF_VECTORS(T)                                                                     \
    DEVICE T greatest_##T(T x, T y) { return x >= y || x != x ? x : y; }                           \
    DEVICE T least_##T(T x, T y) { return x <= y || x != x ? x : y; }                              \
    DEVICE T gelu_tanh_##T(T x) {                                                                  \
        const T u = (T)0.797884560802865355879892119869 * (x + (T)0.044715 * x * x * x);           \
        return x / ((T)1 + exp((T)-2 * u)); /* equals (1 + tanh(u)) / 2, accurate in the tail */ \
    }                                                                                              \
    DEVICE T gelu_tanh_slope_##T(T given) {                                                        \
        const T x = fmin(fmax(given, (T)-100), (T)100), square = x * x;                            \
        const T u = (T)1.595769121605730711759784239738 * (x + (T)0.044715 * square * x);          \
        const T slope = (T)1.595769121605730711759784239738 * ((T)1 + (T)0.134145 * square);       \
        const T y = ((T)1 + x * slope / ((T)1 + exp(u))) / ((T)1 + exp(-u));                       \
        return given != given ? given : y;                                                         \
    }

#define FUNCTIONS_OF_FLOATS(T)                                                           \
    DEVICE T sign_##T(T x) { return x > 0 ? (T)1 : x < 0 ? (T)-1 : x == 0 ? (T)0 : x; }            \
    DEVICE T quotient_##T(T x, T y) {                                                              \
        const T whole = x / y;                                                                     \
        if (y == 0 || isinf(x) || isinf(y)) return whole;                                          \
        const T rest = fmod(x, y);                                                                 \
        const T exact = (x - rest) / y - (T)(rest != 0 && (rest < 0) != (y < 0));                  \
        const T low = floor(exact);                                                                \
        return exact != 0 ? low + (T)(exact - low > (T)0.5) : copysign((T)0, whole);               \
    }                                                                                              \
    DEVICE T modulus_##T(T x, T y) {                                                               \
        const T rest = fmod(x, y);                                                                 \
        if (y == 0) return rest;                                                                   \
        if (rest == 0) return copysign(rest, y);                                                   \
        return (rest < 0) != (y < 0) ? rest + y : rest;                                            \
    }                                                                                              \
    DEVICE T log_of_sum_##T(T x, T y) {                                                            \
        if (x == y) return x + (T)0.693147180559945309417232121458;                                \
        const T apart = x - y;                                                                     \
        return apart > 0    ? x + log1p(exp(-apart))                                               \
               : apart <= 0 ? y + log1p(exp(apart))                                                \
                            : apart;                                                               \
    }                                                                                              \
    DEVICE T gelu_erf_##T(T x) {                                                                   \
        return x * ((T)0.5 * ((T)1 + erf(x * (T)0.707106781186547524400844362105)));               \
    }                                                                                              \
    DEVICE T gelu_erf_slope_##T(T given) {                                                         \
        const T x = fmin(fmax(given, (T)-100), (T)100);                                            \
        const T bell = (T)0.797884560802865355879892119869 * exp((T)-0.5 * x * x);                 \
        const T y = (T)0.5 * ((T)1 + erf(x * (T)0.707106781186547524400844362105) + x * bell);     \
        return given != given ? given : y;                                                         \
    }
FUNCTIONS_OF_VECTORS(f32)
FUNCTIONS_OF_FLOATS(f32)
#ifdef HAVE_F64
FUNCTIONS_OF_VECTORS(f64)
FUNCTIONS_OF_FLOATS(f64)
#endif

#ifdef LANES /* vectors of f32, on a processor */
typedef PASTE(float, LANES) lanes;
FUNCTIONS_OF_VECTORS(lanes)
DEVICE lanes load_lanes(const GLOBAL f32 *x, int count) {
    if (count == LANES) return PASTE(vload, LANES)(0, x);
    f32 parts[LANES];
    for (int j = 0; j < LANES; j++) parts[j] = x[j < count ? j : 0];
    return PASTE(vload, LANES)(0, parts);
}
DEVICE void store_lanes(GLOBAL f32 *x, lanes v, int count) {
    if (count == LANES) {
        PASTE(vstore, LANES)(v, 0, x);
        return;
    }
    f32 parts[LANES];
    PASTE(vstore, LANES)(v, 0, parts);
    for (int j = 0; j < count; j++) x[j] = parts[j];
}
#endif

#define FUNCTIONS_OF_INTEGERS(T)                                                                   \
    DEVICE T greatest_##T(T x, T y) { return x >= y ? x : y; }                                     \
    DEVICE T least_##T(T x, T y) { return x <= y ? x : y; }                                        \
    DEVICE T quotient_##T(T x, T y) {                                                              \
        if (y == 0) return 0;                                                                      \
        if ((T)-1 < 0 && y == (T)-1) return (T)(0 - (u64)x);                                       \
        const T whole = (T)(x / y);                                                                \
        return (T)(whole - (T)(whole * y != x && (x < 0) != (y < 0)));                             \
    }                                                                                              \
    DEVICE T modulus_##T(T x, T y) {                                                               \
        if (y == 0 || ((T)-1 < 0 && y == (T)-1)) return 0;                                         \
        const T rest = (T)(x % y);                                                                 \
        return (T)(rest != 0 && (rest < 0) != (y < 0) ? rest + y : rest);                          \
    }                                                                                              \
    DEVICE T power_##T(T x, T y) {                                                                 \
        u64 base = (u64)x, rest = (u64)y, product = 1;                                             \
        for (; rest; rest >>= 1, base *= base)                                                     \
            if (rest & 1) product *= base;                                                         \
        return (T)product;                                                                         \
    }
FUNCTIONS_OF_INTEGERS(u8)
FUNCTIONS_OF_INTEGERS(i8)
FUNCTIONS_OF_INTEGERS(u16)
FUNCTIONS_OF_INTEGERS(i16)
FUNCTIONS_OF_INTEGERS(u32)
FUNCTIONS_OF_INTEGERS(i32)
FUNCTIONS_OF_INTEGERS(u64)
FUNCTIONS_OF_INTEGERS(i64)

/* Convert a float to an integer: out of range to the nearest limit, nan to 0. */
#define TRUNCATE(T, LOW, HIGH, END, x)                                                             \
    ((x) != (x) ? (T)0 : (x) < (LOW) ? (T)(LOW) : (x) >= (END) ? (T)(HIGH) : (T)(x))
