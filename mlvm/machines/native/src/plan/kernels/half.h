/* bf16 is the upper half of an f32. */
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

/* To nearest even: half a unit of the last place, or one less where that is even, carries. A nan is made
 * quiet. By masks: gcc would make the two choices of a condition in 16 bits each. */
static inline uint16_t narrow_bf16(float x)
{
    uint32_t bits = bits_of_float(x), nan = 0 - (uint32_t)(x != x);
    uint32_t carry = (0x7FFF + (bits >> 16 & 1)) & ~nan;
    return (uint16_t)(((bits + carry) | (nan & 0x400000)) >> 16);
}

#endif
