/* Formulas of lengths: numbers computed from earlier numbers.
 *
 * They follow Python's arithmetic of ints and floats, with 64-bit integers. */
#ifndef MLVM_FORMULAS_OF_LENGTHS_H
#define MLVM_FORMULAS_OF_LENGTHS_H

#include <stdint.h>

/* Operators, named as in Python's module `operator`. */
/* clang-format off */
#define OPERATORS(X)                                                                        \
    X(add) X(sub) X(mul) X(floordiv) X(mod) X(truediv) X(neg) X(pos) X(abs) X(truth) X(lt)  \
    X(le) X(eq) X(ne) X(gt) X(ge)
/* clang-format on */
#define OPERATOR_NAMED(name) AS_##name,
enum Operator { OPERATORS(OPERATOR_NAMED) INPUT, CONSTANT };

/* Operator of two numbers. Inputs and constants have no operator, and their numbers are set. */
typedef struct {
    int operator, a, b;
} Formula;

/* An integer or a real; UNDEFINED if Python would raise an error or need more bits. */
typedef struct {
    enum { INTEGRAL, REAL, UNDEFINED } kind;
    int64_t integer;
    double real;
} Number;

/* Compute all numbers that have operators. */
void evaluate(const Formula *formulas, Number *numbers, int64_t count);

/* Return the operator of that name, or -1. */
int operator_of(const char *name);

double real_of(const Number *number);

/* Return whether two numbers are the same, as `is_same` in mlvm/eager/tensor/number.py: 1 and 1.0 differ, and so do
 * 0.0 and -0.0. */
int is_same_number(const Number *x, const Number *y);

#endif
