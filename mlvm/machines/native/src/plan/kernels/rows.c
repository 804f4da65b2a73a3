/* Softmax, cross-entropy and layer normalization, row by row. */
#include "../plan.h"

#include "elements.h"
#include "functions.h"

#include <math.h>
#include <stdint.h>

enum { rows_integers(NAME) };

/* A block of columns: offsets of the elements, and result offsets if each column has a result. */
typedef struct {
    int64_t at, result, width;
} Block;

static inline Block block_of(const KernelCall *call, int64_t unit)
{
    const int64_t *n = call->ints, outer = unit / n[BLOCKS], column = unit % n[BLOCKS] * n[WIDTH];
    return (Block){outer * n[LENGTH] * n[INNER] + column, outer * n[INNER] + column,
                   least(n[WIDTH], n[INNER] - column)};
}

static inline float root_f32(float x)
{
    return sqrtf(x);
}

static inline double root_f64(double x)
{
    return sqrt(x);
}

#define F float
#define FN(name) MLVM_JOIN(name, f32)
#include "rows_of.h"

#define F double
#define FN(name) MLVM_JOIN(name, f64)
#include "rows_of.h"

#define ENTRY(op, type) KERNEL(op##_##type, op##_##type, NULL)
/* clang-format off */
#define ENTRIES(type)                                                                    \
    ENTRY(softmax, type) ENTRY(log_softmax, type) ENTRY(logsumexp, type)                 \
    ENTRY(softmax_of_columns, type) ENTRY(log_softmax_of_columns, type)                  \
    ENTRY(logsumexp_of_columns, type) ENTRY(softmax_cross_entropy, type)                 \
    ENTRY(softmax_cross_entropy_vjp, type) ENTRY(layer_norm_normalize, type)             \
    ENTRY(layer_norm, type) ENTRY(layer_norm_vjp, type)                                  \
    KERNEL(layer_norm_scale_vjp_##type, layer_norm_scale_vjp_##type,                     \
           finish_layer_norm_scale_vjp_##type)
/* clang-format on */
KERNEL_TABLE(rows, ENTRIES(f32) ENTRIES(f64))
