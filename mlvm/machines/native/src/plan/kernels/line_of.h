/* The row function of a line: each op is applied to the result of the previous op and to one more
 * operand. This is included for each dtype: DT is the name, T the C type.
 *
 * by[0] is the number of parameters, by[1] the step of the first operand. From k = 2 on, by[k] is the op on operand
 * k, times two, and the operand's step. */

typedef MLVM_JOIN(Part, DT) MLVM_JOIN(LinePart, DT);
#define PART ((int64_t)(sizeof(MLVM_JOIN(LinePart, DT)) / sizeof(T)))

#define LINE_OPS(DO)              \
    DO(LINE_ADD, x + y)           \
    DO(LINE_SUBTRACT, x - y)      \
    DO(LINE_SUBTRACT_FROM, y - x) \
    DO(LINE_MULTIPLY, x *y)       \
    DO(LINE_DIVIDE, x / y)        \
    DO(LINE_DIVIDE_BY, y / x)

/* The elements from `at` on, which are a V: a vector, or one. */
#define LINE_CASE(op, result) \
    case op:                  \
        x = result;           \
        break;
#define LINE(name, V)                                                                  \
    static inline V MLVM_JOIN(name, DT)(char *const *p, int64_t at, const int64_t *by) \
    {                                                                                  \
        V x = *(const V *)((const T *)p[1] + at * by[1]);                              \
        for (int64_t k = 2; k < by[0]; k++) {                                          \
            V y = *(const V *)((const T *)p[k] + at * (by[k] & 1));                    \
            switch (by[k] >> 1) {                                                      \
                LINE_OPS(LINE_CASE)                                                    \
            }                                                                          \
        }                                                                              \
        return x;                                                                      \
    }
LINE(line_part, MLVM_JOIN(LinePart, DT))
LINE(line_element, T)

/* A block of eight vectors, which stay in registers. */
#define EACH_PART(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7)
#define LOAD_PART(i) Part x##i = *(const Part *)((const T *)p[1] + (at + i * PART) * by[1]);
#define STORE_PART(i) *(Part *)(to + i * PART) = x##i;
#define SAME(i, result) \
    {                   \
        Part x = x##i;  \
        x##i = result;  \
    }
#define OWN(i, result)                                     \
    {                                                      \
        Part x = x##i, y = *(const Part *)(ys + i * PART); \
        x##i = result;                                     \
    }
#define ON_PARTS(DO, result) \
    DO(0, result)            \
    DO(1, result) DO(2, result) DO(3, result) DO(4, result) DO(5, result) DO(6, result) DO(7, result)
#define LINE_LABELS(op, result) [2 * op] = &&op##_of_scalar, [2 * op + 1] = &&op##_of_row,
#define LINE_CASES(op, result)              \
    op##_of_scalar:                         \
    {                                       \
        const Part y = *(const Part *)p[k]; \
        ON_PARTS(SAME, result)              \
        NEXT;                               \
    }                                       \
    op##_of_row:                            \
    {                                       \
        const T *ys = (const T *)p[k] + at; \
        ON_PARTS(OWN, result)               \
        NEXT;                               \
    }
/* Jump to the code of the next op: a switch needs twice as many instructions. */
#define NEXT                 \
    do {                     \
        if (++k == count)    \
            goto end;        \
        goto *labels[by[k]]; \
    } while (0)
static void MLVM_JOIN(line_block, DT)(T *to, char *const *p, int64_t at, const int64_t *by)
{
    typedef MLVM_JOIN(LinePart, DT) Part;
    static const void *const labels[] = {LINE_OPS(LINE_LABELS)};
    const int64_t count = by[0];
    int64_t k = 1;
    EACH_PART(LOAD_PART)
    NEXT;
    LINE_OPS(LINE_CASES)
end:
    EACH_PART(STORE_PART)
}

/* Compute the tail first, as a full block that overlaps the previous block: the result may be an operand. */
static void PASTE(MLVM_JOIN(line, DT), _row)(char *const *p, int64_t n, const int64_t *by)
{
    typedef MLVM_JOIN(LinePart, DT) Part;
    T *out = (T *)p[0];
    int64_t at = 0;
    if (n >= 8 * PART) {
        const int64_t rest = n % (8 * PART);
        T last[8 * PART];
        if (rest)
            MLVM_JOIN(line_block, DT)(last, p, n - 8 * PART, by);
        for (; at < n - rest; at += 8 * PART)
            MLVM_JOIN(line_block, DT)(out + at, p, at, by);
        if (rest)
            memcpy(out + n - 8 * PART, last, sizeof last);
        return;
    }
    for (; at + PART <= n; at += PART)
        *(Part *)(out + at) = MLVM_JOIN(line_part, DT)(p, at, by);
    for (; at < n; at++)
        out[at] = MLVM_JOIN(line_element, DT)(p, at, by);
}

#undef PART
#undef LINE_OPS
#undef LINE_CASE
#undef LINE
#undef EACH_PART
#undef LOAD_PART
#undef STORE_PART
#undef SAME
#undef OWN
#undef ON_PARTS
#undef LINE_CASES
#undef LINE_LABELS
#undef NEXT
#undef DT
#undef T
