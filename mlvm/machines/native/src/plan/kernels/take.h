/* Loads of product operands of type S as units of type T: an element, a bf16 converted to f32, or the
 * two bf16 of k and k + 1 (PACK is 2), for processors that multiply and add pairs. Included once per
 * dtype, between tile.h and gemm.h. */

typedef T OF(Side) __attribute__((vector_size(SQUARE_BYTES)));
typedef T OF(LooseSide) __attribute__((vector_size(SQUARE_BYTES), aligned(sizeof(S)), may_alias));

#if HALVES
#define WIDE_TYPES(Name, bytes)                                                                       \
    typedef uint16_t OF(Name##Halves) __attribute__((vector_size(bytes / 2), aligned(2), may_alias)); \
    typedef uint32_t OF(Name##Bits) __attribute__((vector_size(bytes)));
WIDE_TYPES(, VECTOR_BYTES)
WIDE_TYPES(Side, SQUARE_BYTES)
#undef WIDE_TYPES
typedef uint32_t OF(Pairs) __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
#define BITS(Name, from) __builtin_convertvector(*(const OF(Name##Halves) *)(from), OF(Name##Bits))
#endif

/* One unit; `step` is the distance from k to k + 1. */
static inline T OF(unit)(const S *from, int64_t step)
{
    (void)step;
#if HALVES && PACK == 2
    return float_of_bits((uint32_t)from[step] << 16 | from[0]);
#elif HALVES
    return widen_bf16(*from);
#else
    return *from;
#endif
}

/* A vector of adjacent units, each for the same k. */
static inline V OF(take)(const S *from, int64_t step)
{
    (void)step;
#if HALVES && PACK == 2
    return (V)(BITS(, from + step) << 16 | BITS(, from));
#elif HALVES
    return (V)(BITS(, from) << 16);
#else
    return OF(load)(from);
#endif
}

#if HALVES
/* Split twice as many units into even and odd columns: a shift and a mask are faster than a permutation
 * and a shift for each vector. */
static inline void OF(take_apart)(const S *from, int64_t step, V *even, V *odd)
{
    const OF(Bits) low = *(const OF(Pairs) *)from;
#if PACK == 2
    const OF(Bits) high = *(const OF(Pairs) *)(from + step);
    *even = (V)(high << 16 | (low & 0xffff));
    *odd = (V)((high & 0xffff0000) | low >> 16);
#else
    (void)step;
    *even = (V)(low << 16);
    *odd = (V)(low & 0xffff0000);
#endif
}
#endif

/* Adjacent units of consecutive k. */
static inline V OF(take_run)(const S *from)
{
#if HALVES && PACK == 1
    return (V)(BITS(, from) << 16);
#else
    return *(const OF(Loose) *)from;
#endif
}

/* Returned by value: gcc copies memory word by word. */
static inline OF(Side) OF(take_side)(const S *from)
{
#if HALVES && PACK == 1
    return (OF(Side))(BITS(Side, from) << 16);
#else
    return *(const OF(LooseSide) *)from;
#endif
}

static inline void OF(put)(S *to, const T *from, int64_t count)
{
#if HALVES
    for (int64_t i = 0; i < count; i++)
        to[i] = narrow_bf16(from[i]);
#else
    memcpy(to, from, (size_t)count * sizeof(T));
#endif
}
#undef BITS
