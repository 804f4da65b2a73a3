/* Vector of dtype T, which may be loaded from addresses aligned to type S. Included once per dtype. */
#ifndef S
#define S T
#endif

typedef T OF(Vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef T OF(Loose) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(S)), may_alias));

static inline V OF(load)(const T *from)
{
    return *(const OF(Loose) *)from;
}

static inline void OF(store)(T *to, V value)
{
    *(OF(Loose) *)to = value;
}
