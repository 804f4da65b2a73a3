/* Many elements to one: sums, extremes, statistics.
 *
 * Adjacent axes that are all reduced, or all kept, are merged. At most five axes remain: kept
 * outer, reduced outer, kept middle, reduced inner and kept inner. An output is a row of `inner`
 * results, for which `rows` times `length` rows of x are combined.
 */
#include "../plan.h"

#include "elements.h"
#include "half.h"

#include <math.h>
#include <stdint.h>

/* A unit is a part of an output, for a block of columns. */
enum { reduction_integers(NAME) };

typedef struct {
    int64_t from, to; /* offsets of elements in x, and of results in the result or in `shared` */
    int64_t rows, length, width, first; /* `first` of LENGTH */
} Part;

static inline Part part_of(const int64_t *n, int64_t unit)
{
    if (n[CONTIGUOUS])
        return (Part){unit * n[LENGTH] * n[INNER], unit * n[INNER], 1, n[LENGTH], n[INNER], 0};
    const int64_t column = unit % n[BLOCKS] * n[WIDTH], index = unit / n[BLOCKS];
    const int64_t output = index / n[PARTS], part = index % n[PARTS];
    const int64_t row = part / n[PARTS_OF_LENGTH] * n[PART_ROWS];
    const int64_t first = part % n[PARTS_OF_LENGTH] * n[PART_LENGTH];
    const int64_t outer = output / n[MIDDLE], middle = output % n[MIDDLE];
    return (Part){
        .from = (outer * n[ROWS_OUTER] + row) * n[STRIDE] + (middle * n[LENGTH] + first) * n[INNER] +
                column,
        .to = index * n[INNER] + column,
        .rows = least(n[PART_ROWS], n[ROWS_OUTER] - row),
        .length = least(n[PART_LENGTH], n[LENGTH] - first),
        .width = least(n[WIDTH], n[INNER] - column),
        .first = first,
    };
}

/* Return the number of elements per result of a unit. */
static inline int64_t elements_of(const int64_t *n, int64_t unit)
{
    const Part part = part_of(n, unit);
    return part.rows * part.length;
}

#define TYPE f32
#define X float
#define SUM float
#define LOWEST -INFINITY
#define HIGHEST INFINITY
#define FLOAT
#define DECISIONS
#include "reductions.h"

#define TYPE f64
#define X double
#define SUM double
#define LOWEST -INFINITY
#define HIGHEST INFINITY
#define FLOAT
#define DECISIONS
#include "reductions.h"

#define TYPE f32_f64
#define X float
#define SUM double
#define FLOAT
#define SUMS_ONLY
#define NO_PRODUCTS
#include "reductions.h"

/* bf16, as f32. */
#define TYPE bf16_f32
#define X uint16_t
#define SUM float
#define LIFTED widen_bf16
#define FLOAT
#define SUMS_ONLY
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE i8
#define X int8_t
#define SUM uint64_t
#define LOWEST INT8_MIN
#define HIGHEST INT8_MAX
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE u8
#define X uint8_t
#define SUM uint64_t
#define LOWEST 0
#define HIGHEST UINT8_MAX
#define DECISIONS
#define NO_PRODUCTS
#include "reductions.h"

/* Sums of bytes, which correct matrix products of bytes for zero points. */
#define TYPE i8_i32
#define X int8_t
#define SUM uint32_t
#define SUMS_ONLY
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE u8_i32
#define X uint8_t
#define SUM uint32_t
#define SUMS_ONLY
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE i16
#define X int16_t
#define SUM uint64_t
#define LOWEST INT16_MIN
#define HIGHEST INT16_MAX
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE u16
#define X uint16_t
#define SUM uint64_t
#define LOWEST 0
#define HIGHEST UINT16_MAX
#define DECISIONS
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE i32
#define X int32_t
#define SUM uint64_t
#define LOWEST INT32_MIN
#define HIGHEST INT32_MAX
#include "reductions.h"

#define TYPE u32
#define X uint32_t
#define SUM uint64_t
#define LOWEST 0
#define HIGHEST UINT32_MAX
#define DECISIONS
#define NO_PRODUCTS
#include "reductions.h"

#define TYPE i64
#define X int64_t
#define SUM uint64_t
#define LOWEST INT64_MIN
#define HIGHEST INT64_MAX
#include "reductions.h"

#define TYPE u64
#define X uint64_t
#define SUM uint64_t
#define LOWEST 0
#define HIGHEST UINT64_MAX
#define DECISIONS
#define NO_PRODUCTS
#include "reductions.h"

/* A unit consists of all units of the child for some elements of x. */
static int each(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    const KernelCall *child = call->children[0];
    for (int64_t u = begin; u < end; u++) {
        char *q[] = {p[0] + u * n[OUT_BYTES], p[1] + u * n[X_BYTES], scratch + n[SHARED_AT]};
        child->kernel->run(child, q, 0, child->units, scratch);
        child->kernel->finish(child, q, 0, child->units, scratch);
    }
    return 0;
}

#define ENTRY(op, type) KERNEL(op##_##type, run_##op##_##type, finish_##op##_##type)
/* clang-format off */
#define SUMS(type)                                                                       \
    ENTRY(sum, type) KERNEL(cumulative_sum_##type, run_cumulative_sum_##type, NULL)
#define EXTREMES(type) ENTRY(max, type) ENTRY(min, type) ENTRY(argmax, type) ENTRY(argmin, type)
#define DECISIONS(type) ENTRY(all, type) ENTRY(any, type)
#define INTEGERS(signed, unsigned)                                                       \
    SUMS(signed) EXTREMES(signed) SUMS(unsigned) EXTREMES(unsigned) DECISIONS(unsigned)
#define PRODUCTS(type)                                                                   \
    ENTRY(prod, type) KERNEL(cumulative_prod_##type, run_cumulative_prod_##type, NULL)
#define FLOATS(type) SUMS(type) EXTREMES(type) DECISIONS(type) PRODUCTS(type) ENTRY(var, type)
KERNEL_TABLE(reduction, FLOATS(f32) FLOATS(f64) SUMS(f32_f64) SUMS(bf16_f32) SUMS(i8_i32)
                            SUMS(u8_i32) PRODUCTS(i32)
                            PRODUCTS(i64) INTEGERS(i8, u8) INTEGERS(i16, u16)
                                INTEGERS(i32, u32) INTEGERS(i64, u64) KERNEL(each, each, NULL))
/* clang-format on */
