/* Matrix products. */
#include "../plan.h"

#include "elements.h"

#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(USE_NEON)
#include <arm_neon.h>
#endif

/* --- the registers: ROWS x 2 hold a tile of C, 2 a row of B and one an element of A --- */

#define UPTO_6(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define UPTO_14(X) UPTO_6(X) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#if defined(__AVX512F__)
#define EACH_HEIGHT(X) UPTO_14(X)
enum { VECTOR_BYTES = 64, ROWS = 14, SQUARE_BYTES = 32 };
#define FMA_f32(x, y, z) (Vector_f32) _mm512_fmadd_ps((__m512)(x), (__m512)(y), (__m512)(z))
#define FMA_f64(x, y, z) (Vector_f64) _mm512_fmadd_pd((__m512d)(x), (__m512d)(y), (__m512d)(z))
#define SPREAD_f32(x) (Vector_f32) _mm512_set1_ps(x)
#define SPREAD_f64(x) (Vector_f64) _mm512_set1_pd(x)
#elif defined(__FMA__)
#define EACH_HEIGHT(X) UPTO_6(X)
enum { VECTOR_BYTES = 32, ROWS = 6, SQUARE_BYTES = 32 };
#define FMA_f32(x, y, z) (Vector_f32) _mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(z))
#define FMA_f64(x, y, z) (Vector_f64) _mm256_fmadd_pd((__m256d)(x), (__m256d)(y), (__m256d)(z))
#define SPREAD_f32(x) (Vector_f32) _mm256_set1_ps(x)
#define SPREAD_f64(x) (Vector_f64) _mm256_set1_pd(x)
#elif defined(USE_NEON) /* 28 of 32 registers are the tile's */
#define EACH_HEIGHT(X) UPTO_14(X)
enum { VECTOR_BYTES = 16, ROWS = 14, SQUARE_BYTES = 16 };
#define FMA_f32(x, y, z)                                                                 \
    (Vector_f32) vfmaq_f32((float32x4_t)(z), (float32x4_t)(x), (float32x4_t)(y))
#define FMA_f64(x, y, z)                                                                 \
    (Vector_f64) vfmaq_f64((float64x2_t)(z), (float64x2_t)(x), (float64x2_t)(y))
#define SPREAD_f32(x) (Vector_f32) vdupq_n_f32(x)
#define SPREAD_f64(x) (Vector_f64) vdupq_n_f64(x)
#else
#define EACH_HEIGHT(X) UPTO_6(X)
enum { VECTOR_BYTES = 16, ROWS = 6, SQUARE_BYTES = 16 };
#define FMA_f32(x, y, z) ((x) * (y) + (z))
#define FMA_f64(x, y, z) ((x) * (y) + (z))
#define SPREAD_f32(x) ((x) - (Vector_f32){0})
#define SPREAD_f64(x) ((x) - (Vector_f64){0})
#endif
#define UNROLL _Pragma("GCC unroll 16")

/* --- transposing a square in registers: what is 1, 2, 4 lanes off the diagonal is swapped --- */

#if defined(__clang__)
#define PICK(x, y, Lanes, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, Lanes, ...) __builtin_shuffle(x, y, (Lanes){__VA_ARGS__})
#endif
#define LIST(...) __VA_ARGS__
#define EXCHANGE(r, side, apart, Lanes, upper, lower)                                    \
    UNROLL for (int i = 0; i < (side); i++) if (!(i & (apart)))                          \
    {                                                                                    \
        __typeof__(r[0]) x = r[i], y = r[i + (apart)];                                   \
        r[i] = PICK(x, y, Lanes, upper);                                                 \
        r[i + (apart)] = PICK(x, y, Lanes, lower);                                       \
    }
typedef int32_t Lane_f32;
typedef int64_t Lane_f64;
typedef Lane_f32 Lanes_f32 __attribute__((vector_size(SQUARE_BYTES)));
typedef Lane_f64 Lanes_f64 __attribute__((vector_size(SQUARE_BYTES)));
#define TRANSPOSE_4(r, Lanes)                                                            \
    EXCHANGE(r, 4, 1, Lanes, LIST(0, 4, 2, 6), LIST(1, 5, 3, 7))                         \
    EXCHANGE(r, 4, 2, Lanes, LIST(0, 1, 4, 5), LIST(2, 3, 6, 7))
#if defined(__FMA__)
#define TRANSPOSE_f32(r)                                                                 \
    EXCHANGE(r, 8, 1, Lanes_f32, LIST(0, 8, 2, 10, 4, 12, 6, 14),                        \
             LIST(1, 9, 3, 11, 5, 13, 7, 15))                                            \
    EXCHANGE(r, 8, 2, Lanes_f32, LIST(0, 1, 8, 9, 4, 5, 12, 13),                         \
             LIST(2, 3, 10, 11, 6, 7, 14, 15))                                           \
    EXCHANGE(r, 8, 4, Lanes_f32, LIST(0, 1, 2, 3, 8, 9, 10, 11),                         \
             LIST(4, 5, 6, 7, 12, 13, 14, 15))
#define TRANSPOSE_f64(r) TRANSPOSE_4(r, Lanes_f64)
#else
#define TRANSPOSE_f32(r) TRANSPOSE_4(r, Lanes_f32)
#define TRANSPOSE_f64(r) EXCHANGE(r, 2, 1, Lanes_f64, LIST(0, 2), LIST(1, 3))
#endif

/* --- what a call says --- */

/* Of each axis of the batch its length, and the strides of x and y, follow. */
enum { linalg_integers(NAME) AXIS };

/* Where the operands of one product of the batch begin. */
static inline void offsets(const int64_t *n, int64_t product, int64_t *x, int64_t *y)
{
    *x = *y = 0;
    for (const int64_t *axis = n + AXIS + 3 * (n[AXES] - 1); axis >= n + AXIS; axis -= 3) {
        int64_t i = product % axis[0];
        product /= axis[0];
        *x += i * axis[1];
        *y += i * axis[2];
    }
}

/* What is done with rows of a product while they are in the cache. */
typedef struct {
    const KernelCall *child;
    char **p;          /* its parameters */
    char **product;    /* the one among them that a strip takes the place of */
    char *scratch, *strip;
    int64_t row_bytes;
    int64_t first_row; /* of the present product, among the rows of all */
} Next;

/* Where a product begins of which the strip from `row` on is wanted. */
static inline void *begin_rows(Next *next, void *out, int64_t row)
{
    if (!next->strip)
        return out;
    *next->product = next->strip - (next->first_row + row) * next->row_bytes;
    return next->strip - row * next->row_bytes;
}

static inline int end_rows(const Next *next, int64_t row, int64_t rows)
{
    int64_t first = next->first_row + row;
    return next->child->kernel->run(next->child, next->p, first, first + rows, next->scratch);
}

/* For the dtype T: */
#define V OF(Vector)
#define LANES ((int)(VECTOR_BYTES / sizeof(T)))
#define COLUMNS (2 * LANES)                             /* of a tile */
#define HEIGHT ((ROWS + LANES - 1) / LANES * LANES)     /* ROWS as whole vectors */
#define SQUARE ((int)(SQUARE_BYTES / sizeof(T)))

#define T float
#define OF(name) MLVM_JOIN(name, f32)
#include "tile.h"
#include "gemm.h"
#undef T
#undef OF

#define T double
#define OF(name) MLVM_JOIN(name, f64)
#include "tile.h"
#include "gemm.h"
#undef T
#undef OF

#define ENTRY(name) KERNEL(name, name, NULL)
#define ENTRIES(dtype) ENTRY(matmul_##dtype) ENTRY(gemv_##dtype) ENTRY(matmul_chain_##dtype)
KERNEL_TABLE(linalg, ENTRIES(f32) ENTRIES(f64))
