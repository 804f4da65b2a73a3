/* Formulas of lengths: numbers that are computed of others, each of those before it.
 *
 * Python's arithmetic on ints and floats, on integers of 64 bits. */
#ifndef MLVM_FORMULAS_OF_LENGTHS_H
#define MLVM_FORMULAS_OF_LENGTHS_H

#include <stdint.h>

/* Python's operators, by their names in `operator`. */
/* clang-format off */
#define OPERATORS(X)                                                                        \
    X(add) X(sub) X(mul) X(floordiv) X(mod) X(truediv) X(neg) X(pos) X(abs) X(truth) X(lt)  \
    X(le) X(eq) X(ne) X(gt) X(ge)
/* clang-format on */
#define OPERATOR_NAMED(name) AS_##name,
enum Operator { OPERATORS(OPERATOR_NAMED) INPUT, CONSTANT };

/* Operator of two numbers; of inputs and constants, whose numbers are set, it has none. */
typedef struct {
    int operator, a, b;
} Formula;

/* An integer, or a real; UNDEFINED where Python raises an error, or has an integer of more bits. */
typedef struct {
    enum { INTEGRAL, REAL, UNDEFINED } kind;
    int64_t integer;
    double real;
} Number;

/* Compute all numbers of which there are operators. */
void evaluate(const Formula *formulas, Number *numbers, int64_t count);

/* Return the operator of that name, or -1. */
int operator_of(const char *name);

double real_of(const Number *number);

int is_same_number(const Number *x, const Number *y);

#endif
