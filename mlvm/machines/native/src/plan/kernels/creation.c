/* Tensors made from a description. */
#include "../plan.h"
#include "elements.h"

enum { UNIT = 4096 }; /* elements */

/* --- ranges --- */

/* start + i * step. n: how many; a: start, step. Computed in f64 and rounded once. */
#define RANGE(T, name)                                                                   \
    static int name(const Plan *plan, char *const *p, int64_t begin, int64_t end,        \
                    char *scratch)                                                       \
    {                                                                                    \
        (void)scratch;                                                                   \
        const double start = plan->a[0], step = plan->a[1];                              \
        T *out = (T *)p[0];                                                              \
        for (int64_t i = begin * UNIT, last = least(end * UNIT, plan->n[0]); i < last; i++) \
            out[i] = (T)((double)i * step + start);                                      \
        return 0;                                                                        \
    }
RANGE(float, range_f32)
RANGE(double, range_f64)

/* Integers wrap around. n: how many, start, step. */
#define INTEGER_RANGE(size)                                                              \
    static int range_##size(const Plan *plan, char *const *p, int64_t begin, int64_t end, \
                            char *scratch)                                               \
    {                                                                                    \
        (void)scratch;                                                                   \
        const uint64_t start = (uint64_t)plan->n[1], step = (uint64_t)plan->n[2];        \
        Element##size *out = (Element##size *)p[0];                                      \
        for (int64_t i = begin * UNIT, last = least(end * UNIT, plan->n[0]); i < last; i++) \
            out[i] = (Element##size)(start + (uint64_t)i * step);                        \
        return 0;                                                                        \
    }
INTEGER_RANGE(1)
INTEGER_RANGE(2)
INTEGER_RANGE(4)
INTEGER_RANGE(8)

/* n: how many, and whether the last is exactly the end; a: start, step, end. */
#define LINSPACE(T, name, range)                                                         \
    static int name(const Plan *plan, char *const *p, int64_t begin, int64_t end,        \
                    char *scratch)                                                       \
    {                                                                                    \
        range(plan, p, begin, end, scratch);                                             \
        if (plan->n[1] && end * UNIT >= plan->n[0])                                      \
            ((T *)p[0])[plan->n[0] - 1] = (T)plan->a[2];                                 \
        return 0;                                                                        \
    }
LINSPACE(float, linspace_f32, range_f32)
LINSPACE(double, linspace_f64, range_f64)

/* --- one element a row --- */

/* Ones on a diagonal, zeros elsewhere. n: the bytes of a row and of an element, rows, rows of a
 * unit, the diagonal, and a pattern of ones. */
static int eye(const Plan *plan, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = plan->n;
    int64_t first = begin * n[3], last = least(end * n[3], n[2]);
    if (first < last)
        memset(p[0] + first * n[0], 0, (size_t)((last - first) * n[0]));
    for (int64_t row = first; row < last; row++) {
        int64_t at = (row + n[4]) * n[1];
        if (at >= 0 && at < n[0])
            memcpy(p[0] + row * n[0] + at, &n[5], (size_t)n[1]);
    }
    return 0;
}

const KernelEntry TARGETED(creation_kernels)[] = {
    {"range_f32", range_f32, NULL},       {"range_f64", range_f64, NULL},
    {"range_1", range_1, NULL},           {"range_2", range_2, NULL},
    {"range_4", range_4, NULL},           {"range_8", range_8, NULL},
    {"linspace_f32", linspace_f32, NULL}, {"linspace_f64", linspace_f64, NULL},
    {"eye", eye, NULL},                   {NULL, NULL, NULL}};
