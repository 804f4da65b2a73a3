/* The reductions of the same dtype: included after defining
 *
 *   TYPE, X          the name and the C type
 *   SUM              the C type of sums and products; integers wrap around
 *   LOWEST, HIGHEST  no element is beyond
 *   FLOAT            for floating-point numbers
 *   NO_PRODUCTS      to leave products to numpy
 *   SUMS_ONLY        to leave all but sums to another inclusion
 *   DECISIONS        for one dtype of each size: only the bits count
 */
#define NAMED__(name, op, type) name##_##op##_##type
#define NAMED_(name, op, type) NAMED__(name, op, type)
#define NAMED(name, op) NAMED_(name, op, TYPE)

#ifndef LIFTED
#define LIFTED (SUM) /* an element in the type of sums */
#endif

#ifdef FLOAT
#define ZERO -0.0 /* adding 0.0 would change a negative zero */
#define IS_NAN(x) ((x) != (x))
#else
#define ZERO 0
#define IS_NAN(x) 0
#endif

#define REDUCE(name) NAMED(name, sum)
#define A SUM
#define LIFT(x, c) (LIFTED(x))
#define COMBINE(a, b) ((a) + (b))
#define IDENTITY ZERO
#ifdef FLOAT
#define ROUNDED
#else
#define ANY_ORDER
#endif
#ifdef FLOAT
/* floats[0]: the divisor of a mean, 1 for a sum. */
#define FINISH(out, n)                                        \
    for (int64_t j = 0; call->floats[0] != 1 && j < (n); j++) \
    (out)[j] /= (A)call->floats[0]
#endif
#include "reduce.h"
#include "reduce_run.h"

#ifndef NO_PRODUCTS
#define REDUCE(name) NAMED(name, prod)
#define A SUM
#define LIFT(x, c) (LIFTED(x))
#define COMBINE(a, b) ((a) * (b))
#define IDENTITY 1
#ifdef FLOAT
#define ROUNDED
#define REPAIR(call, p) NAMED(without_overflow, prod)(call, p)
/* If a product is nan but all its elements are finite, it is 0: one element is 0, and the product of the
 * others has overflowed. */
static void NAMED(without_overflow, prod)(const KernelCall *call, char *const *p)
{
    const int64_t *n = call->ints, inner = n[INNER], length = n[LENGTH];
    SUM *out = (SUM *)p[0];
    for (int64_t i = 0; i < n[OUTPUTS] * inner; i++) {
        if (!IS_NAN(out[i]))
            continue;
        const int64_t outer = i / inner / n[MIDDLE], middle = i / inner % n[MIDDLE];
        const X *x = (const X *)p[1] + outer * n[ROWS_OUTER] * n[STRIDE] + middle * length * inner +
                     i % inner;
        X sum = 0; /* sum of x - x, which is 0 for finite elements, else nan */
        for (int64_t row = 0; row < n[ROWS_OUTER]; row++)
            for (int64_t k = 0; k < length; k++)
                sum += x[row * n[STRIDE] + k * inner] * 0;
        if (!IS_NAN(sum))
            out[i] = 0;
    }
}
#else
#define ANY_ORDER
#endif
#include "reduce.h"
#include "reduce_run.h"
#endif

#define CUMULATE(name) NAMED(name, cumulative_sum)
#define COMBINE(a, b) ((a) + (b))
#include "cumulate.h"

#ifndef NO_PRODUCTS
#define CUMULATE(name) NAMED(name, cumulative_prod)
#define COMBINE(a, b) ((a) * (b))
#ifdef FLOAT
#define REPAIR(out, x, length, by) NAMED(without_overflow, cumulative_prod)(out, x, length, by)
/* A running product that is nan is 0 if all elements up to there are finite: see without_overflow above. Products
 * after a nan are nan. */
static void NAMED(without_overflow, cumulative_prod)(SUM *out, const X *x, int64_t length, int64_t by)
{
    if (!IS_NAN(out[(length - 1) * by]))
        return;
    X sum = 0; /* sum of values that are 0 for finite elements, and nan for other elements */
    for (int64_t i = 0; i < length && !IS_NAN(sum); i++) {
        sum += x[i * by] * 0;
        if (IS_NAN(out[i * by]) && !IS_NAN(sum))
            out[i * by] = 0;
    }
}
#endif
#include "cumulate.h"
#endif

#ifndef SUMS_ONLY
#define REDUCE(name) NAMED(name, max)
#define A X
#define LIFT(x, c) (x)
#define COMBINE(a, b) ((b) > (a) || IS_NAN(b) ? (b) : (a))
#define IDENTITY LOWEST
#ifdef FLOAT
#define UNLESS_NAN(a, b) ((b) > (a) ? (b) : (a))
#else
#define ANY_ORDER
#endif
#include "reduce.h"
#include "reduce_run.h"

#define REDUCE(name) NAMED(name, min)
#define A X
#define LIFT(x, c) (x)
#define COMBINE(a, b) ((b) < (a) || IS_NAN(b) ? (b) : (a))
#define IDENTITY HIGHEST
#ifdef FLOAT
#define UNLESS_NAN(a, b) ((b) < (a) ? (b) : (a))
#else
#define ANY_ORDER
#endif
#include "reduce.h"
#include "reduce_run.h"

#define POSITION(name) NAMED(name, argmax)
#define EXTREME NAMED(row, max)
#define BEYOND(x, y) ((x) > (y))
#include "position.h"

#define POSITION(name) NAMED(name, argmin)
#define EXTREME NAMED(row, min)
#define BEYOND(x, y) ((x) < (y))
#include "position.h"

#ifdef FLOAT
#define REDUCE(name) NAMED(name, squares)
#define A X
#define LIFT(x, c) (((x) - (c)) * ((x) - (c)))
#define COMBINE(a, b) ((a) + (b))
#define IDENTITY -0.0
#define ROUNDED
#include "reduce.h"
#include "reduce_end.h"
#include "variance.h"
#endif
#endif

#ifdef DECISIONS
#define REDUCE(name) NAMED(name, all)
#define A uint8_t
#define LIFT(x, c) ((uint8_t)((x) != 0))
#define COMBINE(a, b) ((uint8_t)((a) & (b)))
#define IDENTITY 1
#define ANY_ORDER
#define DECIDED(a) (!(a))
#include "reduce.h"
#include "reduce_run.h"

#define REDUCE(name) NAMED(name, any)
#define A uint8_t
#define LIFT(x, c) ((uint8_t)((x) != 0))
#define COMBINE(a, b) ((uint8_t)((a) | (b)))
#define IDENTITY 0
#define ANY_ORDER
#define DECIDED(a) (a)
#include "reduce.h"
#include "reduce_run.h"
#endif

#undef NAMED__
#undef NAMED_
#undef NAMED
#undef ZERO
#undef IS_NAN
#undef TYPE
#undef X
#undef SUM
#undef LIFTED
#undef LOWEST
#undef HIGHEST
#undef FLOAT
#undef DECISIONS
#undef SUMS_ONLY
#undef NO_PRODUCTS
