/* f16 is IEEE 754's binary16; bf16 is the upper half of an f32. */
#ifndef MLVM_HALF_H
#define MLVM_HALF_H

#include <stdint.h>
#include <string.h>

static inline float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float widen_bf16(uint16_t x)
{
    return float_of_bits((uint32_t)x << 16);
}

/* Round to nearest even: add half a unit in the last place, or one less if that unit is even. A nan
 * becomes quiet. It uses masks, because gcc would split a condition into two of 16 bits. */
static inline uint16_t narrow_bf16(float x)
{
    uint32_t bits = bits_of_float(x), nan = 0 - (uint32_t)(x != x);
    uint32_t carry = (0x7FFF + (bits >> 16 & 1)) & ~nan;
    return (uint16_t)(((bits + carry) | (nan & 0x400000)) >> 16);
}

/* The exact product adjusts the bias of the exponent, also for subnormal numbers. */
static inline float widen_f16(uint16_t x)
{
    uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = (uint32_t)(x & 0x7FFF) << 13;
    uint32_t bits = bits_of_float(float_of_bits(rest) * 0x1p112f);
    return float_of_bits(sign | (rest >= 0x0F800000 ? rest | 0x7F800000 : bits));
}

/* Round to nearest even. For a subnormal result, the addition itself rounds at the last bit. */
static inline uint16_t narrow_f16(float x)
{
    uint32_t all = bits_of_float(x), sign = all >> 16 & 0x8000, bits = all & 0x7FFFFFFF;
    uint32_t small = bits_of_float(float_of_bits(bits) + 0.5f) - 0x3F000000;
    uint32_t normal = (bits - 0x38000000 + 0xFFF + (bits >> 13 & 1)) >> 13;
    uint32_t nan = 0x7E00 | (bits >> 13 & 0x1FF);
    uint32_t rest = bits < 0x38800000 ? small : normal;
    rest = bits >= 0x47800000 ? 0x7C00 : rest;
    rest = bits > 0x7F800000 ? nan : rest;
    return (uint16_t)(sign | rest);
}

#endif
