/* Functions that copy elements and byte ranges of any dtype. */
#ifndef MLVM_ELEMENTS_H
#define MLVM_ELEMENTS_H

#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define ANYWHERE __attribute__((aligned(1), may_alias))
#else
#define ANYWHERE
#endif

/* Types for moving elements of 1, 2, 4 or 8 bytes. */
typedef uint8_t Element1 ANYWHERE;
typedef uint16_t Element2 ANYWHERE;
typedef uint32_t Element4 ANYWHERE;
typedef uint64_t Element8 ANYWHERE;

#define FILL(size)                                                                         \
    static inline void fill_##size(Element##size *out, Element##size value, int64_t count) \
    {                                                                                      \
        for (int64_t i = 0; i < count; i++)                                                \
            out[i] = value;                                                                \
    }
FILL(1)
FILL(2)
FILL(4)
FILL(8)

/* memcpy for short ranges, without the cost of a call. */
static inline void copy_run(char *out, const char *in, int64_t nbytes)
{
    if (nbytes > 256 || nbytes < 4) {
        if (nbytes >= 4)
            memcpy(out, in, (size_t)nbytes);
        else
            for (int64_t i = 0; i < nbytes; i++)
                out[i] = in[i];
    } else if (nbytes >= 16) {
        for (int64_t i = 0; i < nbytes - 16; i += 16)
            memcpy(out + i, in + i, 16);
        memcpy(out + nbytes - 16, in + nbytes - 16, 16);
    } else if (nbytes >= 8) {
        memcpy(out, in, 8);
        memcpy(out + nbytes - 8, in + nbytes - 8, 8);
    } else {
        memcpy(out, in, 4);
        memcpy(out + nbytes - 4, in + nbytes - 4, 4);
    }
}

static inline int64_t count_true(const char *mask, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += mask[i] != 0;
    return sum;
}

/* Copy the first `chosen` rows of `width` bytes where the mask is True. Single elements are always
 * copied, since branches would be unpredictable. */
#define CHOSEN(size)                                                              \
    if (width == size) {                                                          \
        for (int64_t i = 0; i < count && found < chosen; found += mask[i++] != 0) \
            ((Element##size *)out)[found] = ((const Element##size *)in)[i];       \
        return;                                                                   \
    }
static inline void copy_chosen(char *out, const char *in, const char *mask, int64_t count, int64_t chosen,
                               int64_t width)
{
    int64_t found = 0;
    CHOSEN(1)
    CHOSEN(2)
    CHOSEN(4)
    CHOSEN(8)
    for (int64_t i = 0; i < count && found < chosen; i++)
        if (mask[i])
            copy_run(out + found++ * width, in + i * width, width);
}

/* Element i of an integer tensor: `kind` is the size in bytes, negative for signed dtypes. It is read
 * only once, so a concurrent write cannot invalidate a check of the result. */
static inline int64_t integer_at(const char *integers, int64_t kind, int64_t i)
{
    switch (kind) {
    case 1: return ((const volatile uint8_t *)integers)[i];
    case 2: return ((const volatile uint16_t *)integers)[i];
    case 4: return ((const volatile uint32_t *)integers)[i];
    case 8: return (int64_t)((const volatile uint64_t *)integers)[i];
    case -1: return ((const volatile int8_t *)integers)[i];
    case -2: return ((const volatile int16_t *)integers)[i];
    case -4: return ((const volatile int32_t *)integers)[i];
    default: return ((const volatile int64_t *)integers)[i];
    }
}

static inline int64_t least(int64_t x, int64_t y)
{
    return x < y ? x : y;
}

#endif
