/* Factors, linear systems, inverses and determinants of small matrices, SIZE by SIZE, without the
 * overhead of a LAPACK call. Everything is computed in f64 and rounded at the end. A unit is a matrix. */
#include "../plan.h"

#include <math.h>
#include <string.h>

enum { solving_integers(NAME) STACK };

typedef double Square[MOST_SMALL][MOST_SMALL];

/* --- elements --- */

static double element(const char *x, int64_t i, int64_t is_f64)
{
    return is_f64 ? ((const double *)x)[i] : (double)((const float *)x)[i];
}

static void store(char *out, int64_t i, int64_t is_f64, double value)
{
    if (is_f64)
        ((double *)out)[i] = value;
    else
        ((float *)out)[i] = (float)value;
}

static void load(Square a, const int64_t *n, const char *x, int64_t unit)
{
    const int64_t size = n[SIZE];
    for (int64_t i = 0; i < size; i++)
        for (int64_t j = 0; j < size; j++)
            a[i][j] = element(x, (unit * size + i) * size + j, n[IS_F64]);
}

/* --- factors --- */

/* Factor a into a unit lower and an upper matrix by Gaussian elimination with partial pivoting (Golub and Van Loan,
 * Matrix Computations, 4th ed., 3.4). Row i of the product is row order[i] of a. Returns the sign of the
 * permutation, 0 if a pivot is 0. */
static double factor(Square a, int64_t size, int64_t *order)
{
    double sign = 1;
    for (int64_t i = 0; i < size; i++)
        order[i] = i;
    for (int64_t j = 0; j < size; j++) {
        int64_t pivot = j;
        for (int64_t i = j + 1; i < size; i++)
            if (fabs(a[i][j]) > fabs(a[pivot][j]))
                pivot = i;
        if (a[pivot][j] == 0)
            return 0;
        if (pivot != j) {
            double row[MOST_SMALL];
            const int64_t number = order[j];
            memcpy(row, a[j], sizeof row);
            memcpy(a[j], a[pivot], sizeof row);
            memcpy(a[pivot], row, sizeof row);
            order[j] = order[pivot], order[pivot] = number;
            sign = -sign;
        }
        for (int64_t i = j + 1; i < size; i++) {
            const double multiple = a[i][j] /= a[j][j];
            for (int64_t k = j + 1; k < size; k++)
                a[i][k] -= multiple * a[j][k];
        }
    }
    return sign;
}

/* Solve for SIZE columns at most, in place, by forward and back substitution. */
static void substitute(Square a, int64_t size, Square b, int64_t columns)
{
    for (int64_t i = 1; i < size; i++)
        for (int64_t k = 0; k < i; k++)
            for (int64_t j = 0; j < columns; j++)
                b[i][j] -= a[i][k] * b[k][j];
    for (int64_t i = size; i-- > 0;) {
        for (int64_t k = i + 1; k < size; k++)
            for (int64_t j = 0; j < columns; j++)
                b[i][j] -= a[i][k] * b[k][j];
        for (int64_t j = 0; j < columns; j++)
            b[i][j] /= a[i][i];
    }
}

/* --- kernels --- */

/* Find the matrices of x and y for unit u: for each batch axis, its length and the strides of x and y in
 * matrices, 0 if broadcast. */
static void find_operands(const int64_t *n, int64_t u, int64_t *x, int64_t *y)
{
    *x = *y = 0;
    for (int64_t axis = n[AXES]; axis-- > 0; u /= n[STACK + 3 * axis]) {
        const int64_t *steps = n + STACK + 3 * axis, place = u % steps[0];
        *x += place * steps[1];
        *y += place * steps[2];
    }
}

/* y has COLUMNS columns. Without y, it is the identity. */
static int solve(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, size = n[SIZE], columns = n[COLUMNS];
    const int has_y = call->nparams == 3;
    int64_t factored = -1;
    Square a;
    int64_t order[MOST_SMALL];
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        int64_t x, y;
        find_operands(n, u, &x, &y);
        if (x != factored) {
            load(a, n, p[1], x);
            if (factor(a, size, order) == 0)
                return 1;
            factored = x;
        }
        for (int64_t first = 0; first < columns; first += MOST_SMALL) {
            const int64_t count = columns - first < MOST_SMALL ? columns - first : MOST_SMALL;
            Square b;
            for (int64_t i = 0; i < size; i++)
                for (int64_t j = 0; j < count; j++)
                    b[i][j] = has_y ? element(p[2], (y * size + order[i]) * columns + first + j, n[IS_F64])
                                    : order[i] == j;
            substitute(a, size, b, count);
            for (int64_t i = 0; i < size; i++)
                for (int64_t j = 0; j < count; j++)
                    store(p[0], (u * size + i) * columns + first + j, n[IS_F64], b[i][j]);
        }
    }
    return 0;
}

/* The product of the pivots, as a mantissa and an exponent to avoid overflow. */
static int det(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        Square a;
        int64_t order[MOST_SMALL];
        load(a, n, p[1], u);
        double product = factor(a, n[SIZE], order);
        int exponent = 0, part;
        for (int64_t i = 0; product != 0 && i < n[SIZE]; i++) {
            product = frexp(product * a[i][i], &part);
            exponent += part;
        }
        store(p[0], u, n[IS_F64], ldexp(product, exponent));
    }
    return 0;
}

/* The Cholesky factor of the symmetric part, column by column (Golub and Van Loan, 4.2). */
static int cholesky(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, size = n[SIZE];
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        Square a, lower = {{0}};
        load(a, n, p[1], u);
        for (int64_t j = 0; j < size; j++)
            for (int64_t i = j; i < size; i++) {
                double rest = a[i][j] * 0.5 + a[j][i] * 0.5;
                for (int64_t k = 0; k < j; k++)
                    rest -= lower[i][k] * lower[j][k];
                if (i == j && rest <= 0) /* a nan is accepted, as by LAPACK */
                    return 1;
                lower[i][j] = i == j ? sqrt(rest) : rest / lower[j][j];
            }
        for (int64_t i = 0; i < size; i++)
            for (int64_t j = 0; j < size; j++)
                store(p[0], (u * size + i) * size + j, n[IS_F64], n[UPPER] ? lower[j][i] : lower[i][j]);
    }
    return 0;
}

KERNEL_TABLE(solving, KERNEL(small_solve, solve, NULL) KERNEL(small_det, det, NULL)
                          KERNEL(small_cholesky, cholesky, NULL))
