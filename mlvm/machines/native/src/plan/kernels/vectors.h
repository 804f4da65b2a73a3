/* Vectors of each instruction set. A file that includes this then includes vector_of.h for a dtype. */
#ifndef MLVM_VECTORS_H
#define MLVM_VECTORS_H

#include "fused.h"

#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(USE_NEON)
#include <arm_neon.h>
#endif

/* --- registers: ROWS x 2 for a tile of C, 2 for a row of B and one for an element of A --- */

#define UPTO_6(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define UPTO_14(X) UPTO_6(X) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#if defined(__AVX512F__)
#define EACH_HEIGHT(X) UPTO_14(X)
enum { VECTOR_BYTES = 64, ROWS = 14, SQUARE_BYTES = 32 };
#define FMA_f32(x, y, z) (Vector_f32) _mm512_fmadd_ps((__m512)(x), (__m512)(y), (__m512)(z))
#define FMA_f64(x, y, z) (Vector_f64) _mm512_fmadd_pd((__m512d)(x), (__m512d)(y), (__m512d)(z))
#define SPREAD_f32(x) (Vector_f32) _mm512_set1_ps(x)
#define SPREAD_f64(x) (Vector_f64) _mm512_set1_pd(x)
#define FMA_SIDE_f32(x, y, z) (Side_f32) _mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)(y), (__m256)(z))
#define FMA_SIDE_f64(x, y, z) (Side_f64) _mm256_fmadd_pd(_mm256_set1_pd(x), (__m256d)(y), (__m256d)(z))
#elif defined(__FMA__)
#define EACH_HEIGHT(X) UPTO_6(X)
enum { VECTOR_BYTES = 32, ROWS = 6, SQUARE_BYTES = 32 };
#define FMA_f32(x, y, z) (Vector_f32) _mm256_fmadd_ps((__m256)(x), (__m256)(y), (__m256)(z))
#define FMA_f64(x, y, z) (Vector_f64) _mm256_fmadd_pd((__m256d)(x), (__m256d)(y), (__m256d)(z))
#define SPREAD_f32(x) (Vector_f32) _mm256_set1_ps(x)
#define SPREAD_f64(x) (Vector_f64) _mm256_set1_pd(x)
#define FMA_SIDE_f32(x, y, z) FMA_f32(SPREAD_f32(x), y, z)
#define FMA_SIDE_f64(x, y, z) FMA_f64(SPREAD_f64(x), y, z)
#elif defined(USE_NEON) /* the tile uses 28 of 32 registers */
#define EACH_HEIGHT(X) UPTO_14(X)
enum { VECTOR_BYTES = 16, ROWS = 14, SQUARE_BYTES = 16 };
#define FMA_f32(x, y, z) (Vector_f32) vfmaq_f32((float32x4_t)(z), (float32x4_t)(x), (float32x4_t)(y))
#define FMA_f64(x, y, z) (Vector_f64) vfmaq_f64((float64x2_t)(z), (float64x2_t)(x), (float64x2_t)(y))
#define SPREAD_f32(x) (Vector_f32) vdupq_n_f32(x)
#define SPREAD_f64(x) (Vector_f64) vdupq_n_f64(x)
#define FMA_SIDE_f32(x, y, z) FMA_f32(SPREAD_f32(x), y, z)
#define FMA_SIDE_f64(x, y, z) FMA_f64(SPREAD_f64(x), y, z)
#else
#define EACH_HEIGHT(X) UPTO_6(X)
enum { VECTOR_BYTES = 16, ROWS = 6, SQUARE_BYTES = 16 };
#define FMA_f32(x, y, z) (Vector_f32) each_fused_f32((Plain_f32)(x), (Plain_f32)(y), (Plain_f32)(z))
#define FMA_f64(x, y, z) (Vector_f64) each_fused_f64((Plain_f64)(x), (Plain_f64)(y), (Plain_f64)(z))
#define SPREAD_f32(x) ((x) - (Vector_f32){0})
#define SPREAD_f64(x) ((x) - (Vector_f64){0})
#define FMA_SIDE_f32(x, y, z) FMA_f32(SPREAD_f32(x), y, z)
#define FMA_SIDE_f64(x, y, z) FMA_f64(SPREAD_f64(x), y, z)
typedef float Plain_f32 __attribute__((vector_size(VECTOR_BYTES)));
typedef double Plain_f64 __attribute__((vector_size(VECTOR_BYTES)));

static inline Plain_f32 each_fused_f32(Plain_f32 x, Plain_f32 y, Plain_f32 z)
{
    for (size_t i = 0; i < sizeof z / sizeof z[0]; i++)
        z[i] = FUSED_F32(x[i], y[i], z[i]);
    return z;
}

static inline Plain_f64 each_fused_f64(Plain_f64 x, Plain_f64 y, Plain_f64 z)
{
    for (size_t i = 0; i < sizeof z / sizeof z[0]; i++)
        z[i] = FUSED_F64(x[i], y[i], z[i]);
    return z;
}
#endif
#define UNROLL_FOR(...) _Pragma("GCC unroll 16") for (__VA_ARGS__)

typedef int32_t Lane_f32;
typedef int64_t Lane_f64;
typedef int32_t Lane_bf16;
typedef int32_t Lane_bf16x2;

/* For the dtype T: */
#define V OF(Vector)
#define LANES ((int)(VECTOR_BYTES / sizeof(T)))

#endif
