/* Transposing of squares in registers, and sizes of tiles, for `products_of.h`.
 *
 * Callers: linalg.c and pairs.c. */
#ifndef MLVM_SQUARES_H
#define MLVM_SQUARES_H

#include "batch.h"
#include "elements.h"
#include "half.h"
#include "vectors.h"

#include <string.h>

/* Exchange elements that are 1, 2 and 4 lanes off the diagonal. */
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
/* With x86 instructions: lanes are interleaved in pairs, which exchanges rows 1 and 2 of each four. */
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

/* For the dtype T: */
#define COLUMNS (2 * LANES)                         /* of a tile */
#define HEIGHT ((ROWS + LANES - 1) / LANES * LANES) /* ROWS as whole vectors */
#define SQUARE ((int)(SQUARE_BYTES / sizeof(T)))

#endif
