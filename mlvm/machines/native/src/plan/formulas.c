/* Evaluation of formulas of sizes, without Python. */
#include "formulas.h"

#include <math.h>
#include <string.h>

static Number integral(int64_t value)
{
    return (Number){INTEGRAL, value, 0};
}

static const Number undefined = {UNDEFINED, 0, 0};
static const int64_t EXACT = INT64_C(1) << 53; /* a double represents every integer up to this */

static int is_exact(const Number *number)
{
    return number->kind == REAL || (number->integer <= EXACT && number->integer >= -EXACT);
}

#define COMPARED(name, comparison) \
    case AS_##name:                \
        return integral(a comparison b);
#define COMPARISONS \
    COMPARED(lt, <) COMPARED(le, <=) COMPARED(eq, ==) COMPARED(ne, !=) COMPARED(gt, >) COMPARED(ge, >=)

static Number of_integers(int operator, int64_t a, int64_t b)
{
    const int divides = b && !(b == -1 && a == INT64_MIN);
    int64_t value;
    switch (operator) {
    case AS_add: return __builtin_add_overflow(a, b, &value) ? undefined : integral(value);
    case AS_sub: return __builtin_sub_overflow(a, b, &value) ? undefined : integral(value);
    case AS_mul: return __builtin_mul_overflow(a, b, &value) ? undefined : integral(value);
    case AS_floordiv: return divides ? integral(a / b - (a % b && (a % b < 0) != (b < 0))) : undefined;
    case AS_mod: return divides ? integral(a % b + (a % b && (a % b < 0) != (b < 0) ? b : 0)) : undefined;
    case AS_truediv:
        if (!b || a > EXACT || a < -EXACT || b > EXACT || b < -EXACT)
            return undefined;
        return (Number){REAL, 0, (double)a / (double)b};
    case AS_neg: return a == INT64_MIN ? undefined : integral(-a);
    case AS_pos: return integral(a);
    case AS_abs: return a == INT64_MIN ? undefined : integral(a < 0 ? -a : a);
    case AS_truth: return integral(a != 0); COMPARISONS
    default: return undefined;
    }
}

static Number of_reals(int operator, double a, double b)
{
    switch (operator) {
    case AS_add: return (Number){REAL, 0, a + b};
    case AS_sub: return (Number){REAL, 0, a - b};
    case AS_mul: return (Number){REAL, 0, a * b};
    case AS_truediv: return b != 0 ? (Number){REAL, 0, a / b} : undefined;
    case AS_neg: return (Number){REAL, 0, -a};
    case AS_pos: return (Number){REAL, 0, a};
    case AS_abs: return (Number){REAL, 0, fabs(a)};
    case AS_truth: return integral(a != 0); COMPARISONS
    default: return undefined;
    }
}

double real_of(const Number *number)
{
    return number->kind == REAL ? number->real : (double)number->integer;
}

int is_same_number(const Number *x, const Number *y)
{
    if (x->kind != REAL || y->kind != REAL)
        return x->kind == y->kind && x->integer == y->integer;
    return isnan(x->real) ? isnan(y->real) : x->real == y->real && signbit(x->real) == signbit(y->real);
}

void evaluate(const Formula *formulas, Number *numbers, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        Formula formula = formulas[i];
        if (formula.operator== INPUT || formula.operator== CONSTANT)
            continue;
        const Number *a = &numbers[formula.a], *b = &numbers[formula.b];
        if (a->kind == UNDEFINED || b->kind == UNDEFINED)
            numbers[i] = undefined;
        else if (a->kind == INTEGRAL && b->kind == INTEGRAL)
            numbers[i] = of_integers(formula.operator, a->integer, b->integer);
        else if (formula.operator>= AS_lt && !(is_exact(a) && is_exact(b)))
            numbers[i] = undefined; /* unlike C, Python compares an integer and a float exactly */
        else
            numbers[i] = of_reals(formula.operator, real_of(a), real_of(b));
    }
}

int operator_of(const char *name)
{
    static const char *const names[] = {
#define QUOTED(name) #name,
        OPERATORS(QUOTED)};
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (!strcmp(name, names[i]))
            return i;
    return -1;
}
