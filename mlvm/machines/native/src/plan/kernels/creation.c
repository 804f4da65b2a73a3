/* Ranges, and constant matrices. */
#include "../plan.h"
#include "elements.h"

enum { creation_integers(NAME) };

/* --- ranges --- */

/* start + i * step. a: start, step. Computed in f64 and rounded once. */
#define RANGE(T, name)                                                                                    \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)    \
    {                                                                                                     \
        (void)scratch;                                                                                    \
        const double start = call->floats[0], step = call->floats[1];                                     \
        T *out = (T *)p[0];                                                                               \
        for (int64_t i = begin * RANGE_UNIT, last = least(end * RANGE_UNIT, call->ints[COUNT]); i < last; \
             i++)                                                                                         \
            out[i] = (T)((double)i * step + start);                                                       \
        return 0;                                                                                         \
    }
RANGE(float, range_f32)
RANGE(double, range_f64)

/* Integers wrap around. */
#define INTEGER_RANGE(size)                                                                               \
    static int range_##size(const KernelCall *call, char *const *p, int64_t begin, int64_t end,           \
                            char *scratch)                                                                \
    {                                                                                                     \
        (void)scratch;                                                                                    \
        const uint64_t start = (uint64_t)call->ints[START], step = (uint64_t)call->ints[STEP];            \
        Element##size *out = (Element##size *)p[0];                                                       \
        for (int64_t i = begin * RANGE_UNIT, last = least(end * RANGE_UNIT, call->ints[COUNT]); i < last; \
             i++)                                                                                         \
            out[i] = (Element##size)(start + (uint64_t)i * step);                                         \
        return 0;                                                                                         \
    }
INTEGER_RANGE(1)
INTEGER_RANGE(2)
INTEGER_RANGE(4)
INTEGER_RANGE(8)

/* a: start, step, end. */
#define LINSPACE(T, name, range)                                                                       \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        range(call, p, begin, end, scratch);                                                           \
        if (call->ints[EXACT_END] && end * RANGE_UNIT >= call->ints[COUNT])                            \
            ((T *)p[0])[call->ints[COUNT] - 1] = (T)call->floats[2];                                   \
        return 0;                                                                                      \
    }
LINSPACE(float, linspace_f32, range_f32)
LINSPACE(double, linspace_f64, range_f64)

/* --- one element per row --- */

/* Ones on a diagonal, zeros elsewhere. */
static int eye(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    int64_t first = begin * n[HIGH], last = least(end * n[HIGH], n[ROWS]);
    if (first < last)
        memset(p[0] + first * n[ROW_BYTES], 0, (size_t)((last - first) * n[ROW_BYTES]));
    for (int64_t row = first; row < last; row++) {
        int64_t at = (row + n[DIAGONAL]) * n[SIZE];
        if (at >= 0 && at < n[ROW_BYTES])
            memcpy(p[0] + row * n[ROW_BYTES] + at, &n[ONE], (size_t)n[SIZE]);
    }
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
KERNEL_TABLE(creation, ENTRY(range_f32) ENTRY(range_f64) ENTRY(range_1) ENTRY(range_2) ENTRY(range_4)
                           ENTRY(range_8) ENTRY(linspace_f32) ENTRY(linspace_f64) ENTRY(eye))
/* clang-format on */
