/* Matrix products, and recurrences, which compute a matrix product per step. */
#define _GNU_SOURCE
#include "../plan.h"

#include "recurrent.h"
#include "squares.h"

/* bf16 is computed in f32. */

#define FMA_bf16(x, y, z) FMA_f32(x, y, z)
#define FMA_SIDE_bf16(x, y, z) FMA_SIDE_f32(x, y, z)
#define SPREAD_bf16(x) SPREAD_f32(x)
#define TRANSPOSE_bf16(r) TRANSPOSE_f32(r)

#define DT f32
#define T float
#define S float
#define HALVES 0
#define PACK 1
#include "products_of.h"

#define DT f64
#define T double
#define S double
#define HALVES 0
#define PACK 1
#include "products_of.h"

#define DT bf16
#define T float
#define S uint16_t
#define HALVES 1
#define PACK 1
#include "products_of.h"

/* --- recurrences, which use the products above --- */

#define OF(name) MLVM_JOIN(name, DT)
#define DT f32
#define T float
#define S float
#include "recurrent_of.h"
#undef DT
#undef T
#undef S

#define DT f64
#define T double
#define S double
#include "recurrent_of.h"

/* Integers, modulo 2^64, so the order of additions does not matter. A unit is a row. */
static int matmul_i64(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t product = unit / n[M], row = unit % n[M], x_at, y_at;
        offsets(n, product, &x_at, &y_at);
        const uint64_t *x = (const uint64_t *)p[1] + x_at + row * n[X_ROW];
        uint64_t *out = (uint64_t *)p[0] + product * n[OUT_PRODUCT] + row * n[OUT_ROW];
        memset(out, 0, (size_t)n[N] * sizeof *out);
        for (int64_t k = 0; k < n[K]; k++) {
            const uint64_t *y = (const uint64_t *)p[2] + y_at + k * n[Y_K], factor = x[k * n[X_K]];
            for (int64_t j = 0; j < n[N]; j++)
                out[j] += factor * y[j * n[Y_COLUMN]];
        }
    }
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
#define RECURRENT(dtype) ENTRY(recurrence_##dtype) ENTRY(recurrence_vjp_##dtype)
#define ENTRIES(dtype) ENTRY(matmul_##dtype) ENTRY(gemv_##dtype) ENTRY(matmul_chain_##dtype)
/* clang-format off */
KERNEL_TABLE(linalg, RECURRENT(f32) RECURRENT(f64) ENTRIES(f32) ENTRIES(f64) ENTRIES(bf16)
                         KERNEL(matmul_i64, matmul_i64, NULL))
/* clang-format on */
