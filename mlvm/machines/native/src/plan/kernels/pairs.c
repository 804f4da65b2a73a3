/* Matrix products of bf16 in pairs, for the instructions of AVX512_BF16. */
#define _GNU_SOURCE
#include "../plan.h"

#if defined(__AVX512BF16__)
#include "squares.h"

#define FMA_bf16x2(x, y, z) (Vector_bf16x2) _mm512_dpbf16_ps((__m512)(z), (__m512bh)(x), (__m512bh)(y))
#define FMA_SIDE_bf16x2(x, y, z) \
    (Side_bf16x2) _mm256_dpbf16_ps((__m256)(z), (__m256bh)_mm256_set1_ps(x), (__m256bh)(y))
#define SPREAD_bf16x2(x) (Vector_bf16x2) _mm512_set1_ps(x)
#define TRANSPOSE_bf16x2(r) TRANSPOSE_f32(r)

#define DT bf16x2
#define T float
#define S uint16_t
#define HALVES 1
#define PACK 2
#include "products_of.h"

#define PAIR_ENTRIES                           \
    KERNEL(matmul_bf16x2, matmul_bf16x2, NULL) \
    KERNEL(gemv_bf16x2, gemv_bf16x2, NULL)     \
    KERNEL(matmul_chain_bf16x2, matmul_chain_bf16x2, NULL)
#else
#define PAIR_ENTRIES
#endif

KERNEL_TABLE(pairs, PAIR_ENTRIES)
