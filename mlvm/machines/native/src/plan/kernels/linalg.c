/* Matrix products, and recurrences, whose steps are products. */
#define _GNU_SOURCE
#include "../plan.h"

#include "batch.h"
#include "elements.h"
#include "half.h"
#include "recurrent.h"
#include "vectors.h"

#include <string.h>

/* --- transposing a square in registers: what is 1, 2, 4 lanes off the diagonal is swapped --- */

#if defined(__clang__)
#define PICK(x, y, Lanes, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, Lanes, ...) __builtin_shuffle(x, y, (Lanes){__VA_ARGS__})
#endif
#define LIST(...) __VA_ARGS__
#define EXCHANGE(r, side, apart, Lanes, upper, lower)      \
    UNROLL_FOR (int i = 0; i < (side); i++)                \
        if (!(i & (apart))) {                              \
            __typeof__(r[0]) x = r[i], y = r[i + (apart)]; \
            r[i] = PICK(x, y, Lanes, upper);               \
            r[i + (apart)] = PICK(x, y, Lanes, lower);     \
        }
typedef Lane_f32 Lanes_f32 __attribute__((vector_size(SQUARE_BYTES)));
typedef Lane_f64 Lanes_f64 __attribute__((vector_size(SQUARE_BYTES)));
#define TRANSPOSE_4(r, Lanes)                                    \
    EXCHANGE(r, 4, 1, Lanes, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7)) \
    EXCHANGE(r, 4, 2, Lanes, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#if defined(__FMA__)
/* As the processor has it: pairs of lanes are woven, and rows 1 and 2 of each four come out exchanged. */
#define TRANSPOSE_f32(r)                                                                           \
    EXCHANGE(r, 8, 1, Lanes_f32, LIST(0, 8, 1, 9, 4, 12, 5, 13), LIST(2, 10, 3, 11, 6, 14, 7, 15)) \
    EXCHANGE(r, 8, 2, Lanes_f32, LIST(0, 1, 8, 9, 4, 5, 12, 13), LIST(2, 3, 10, 11, 6, 7, 14, 15)) \
    EXCHANGE(r, 8, 4, Lanes_f32, LIST(0, 1, 2, 3, 8, 9, 10, 11), LIST(4, 5, 6, 7, 12, 13, 14, 15)) \
    UNROLL_FOR (int i = 1; i < 8; i += 4) {                                                        \
        __typeof__(r[0]) x = r[i];                                                                 \
        r[i] = r[i + 1];                                                                           \
        r[i + 1] = x;                                                                              \
    }
#define TRANSPOSE_f64(r) TRANSPOSE_4(r, Lanes_f64)
#else
#define TRANSPOSE_f32(r) TRANSPOSE_4(r, Lanes_f32)
#define TRANSPOSE_f64(r) EXCHANGE(r, 2, 1, Lanes_f64, LIST(0, 2), LIST(1, 3))
#endif

/* --- bf16: an f32 each, or two that are multiplied and added at once --- */

#define FMA_bf16(x, y, z) FMA_f32(x, y, z)
#define FMA_SIDE_bf16(x, y, z) FMA_SIDE_f32(x, y, z)
#define SPREAD_bf16(x) SPREAD_f32(x)
#define TRANSPOSE_bf16(r) TRANSPOSE_f32(r)
#if defined(__AVX512BF16__)
#define FMA_bf16x2(x, y, z) (Vector_bf16x2) _mm512_dpbf16_ps((__m512)(z), (__m512bh)(x), (__m512bh)(y))
#define FMA_SIDE_bf16x2(x, y, z) \
    (Side_bf16x2) _mm256_dpbf16_ps((__m256)(z), (__m256bh)_mm256_set1_ps(x), (__m256bh)(y))
#define SPREAD_bf16x2(x) SPREAD_f32(x)
#define TRANSPOSE_bf16x2(r) TRANSPOSE_f32(r)
#endif

/* For the dtype T: */
#define COLUMNS (2 * LANES)                         /* of a tile */
#define HEIGHT ((ROWS + LANES - 1) / LANES * LANES) /* ROWS as whole vectors */
#define SQUARE ((int)(SQUARE_BYTES / sizeof(T)))

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

#if defined(__AVX512BF16__)
#define DT bf16x2
#define T float
#define S uint16_t
#define HALVES 1
#define PACK 2
#include "products_of.h"
#define PAIRS(X) X(bf16x2)
#else
#define PAIRS(X)
#endif

/* --- recurrences, of products before --- */

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

/* Integers, modulo 2^64: in whatever order they are added, the bits are the same. A unit is a row. */
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
KERNEL_TABLE(linalg, RECURRENT(f32) RECURRENT(f64) ENTRIES(f32) ENTRIES(f64) ENTRIES(bf16) PAIRS(ENTRIES)
                         KERNEL(matmul_i64, matmul_i64, NULL))
/* clang-format on */
