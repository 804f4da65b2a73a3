/* The fused multiply-add: x * y + z, rounded once, with every instruction set. */
#ifndef MLVM_FUSED_H
#define MLVM_FUSED_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define FUSED_F64 __builtin_fma
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMAF)
#define FUSED_F32 __builtin_fmaf
#else
#define FUSED_F32 fused_f32

/* Emulation without an FMA instruction, in f64, where the product is exact; the C library is several
 * times slower. The sum is rounded to odd unless it is exact, so rounding it to f32 equals a single
 * rounding (Boldo and Melquiond, IEEE Transactions on Computers, 2008). */
static inline float fused_f32(float x, float y, float z)
{
    double product = (double)x * y, sum = product + z, of_z = sum - product;
    double lost = (product - (sum - of_z)) + (z - of_z);
    uint64_t bits, inexact = (uint64_t)((lost > 0) | (lost < 0)), too_large = (lost > 0) != (sum > 0);
    memcpy(&bits, &sum, sizeof bits);
    bits = (bits - (inexact & too_large)) | inexact;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
}
#endif

#endif
