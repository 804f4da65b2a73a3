/* Sorting. Elements are converted to unsigned keys of the same order, paired with positions. After
 * a stable sort by key, the positions are the result of `argsort`, and `sort` gathers the elements
 * at these positions. */
#include "../plan.h"

#include <stdint.h>
#include <string.h>

enum { sorting_integers(NAME) };
enum { SHORT_ROW = 192, DIGITS = 256 };

/* In a short row, the position of a record is the number of smaller keys plus the number of equal keys before it,
 * which vectors count. Long rows use radix sort by bytes of the key, starting with the last byte, and skips bytes
 * that are equal in all records (Knuth, The art of computer programming, volume 3, 5.2 and 5.2.5). There
 * is space for n more records after the n records. */
#define RECORDS(bits)                                                                            \
    typedef struct {                                                                             \
        uint##bits##_t key, position;                                                            \
    } Record##bits;                                                                              \
    static const Record##bits *ranked_##bits(const Record##bits *r, Record##bits *to, int64_t n) \
    {                                                                                            \
        int##bits##_t keys[SHORT_ROW];                                                           \
        uint8_t equal[SHORT_ROW] = {0};                                                          \
        const uint##bits##_t top = (uint##bits##_t)1 << (bits - 1);                              \
        const int64_t padded = (n + 15) / 16 * 16;                                               \
        for (int64_t i = 0; i < padded; i++)                                                     \
            keys[i] = (int##bits##_t)((i < n ? r[i].key : (uint##bits##_t) - 1) ^ top);          \
        for (int64_t i = 0; i < n; i++) {                                                        \
            const int##bits##_t key = keys[i];                                                   \
            uint##bits##_t smaller = 0;                                                          \
            for (int64_t j = 0; j < padded; j++)                                                 \
                smaller += keys[j] < key;                                                        \
            to[smaller + equal[smaller]++] = r[i];                                               \
        }                                                                                        \
        return to;                                                                               \
    }                                                                                            \
    static const Record##bits *sorted_##bits(Record##bits *r, int64_t n)                         \
    {                                                                                            \
        enum { BYTES = bits / 8 };                                                               \
        if (n <= SHORT_ROW)                                                                      \
            return ranked_##bits(r, r + n, n);                                                   \
        uint32_t counts[BYTES][DIGITS] = {{0}};                                                  \
        Record##bits *to = r + n;                                                                \
        for (int64_t i = 0; i < n; i++)                                                          \
            for (int byte = 0; byte < BYTES; byte++)                                             \
                counts[byte][r[i].key >> 8 * byte & 255]++;                                      \
        for (int byte = 0; byte < BYTES; byte++) {                                               \
            uint32_t *next = counts[byte], sum = 0;                                              \
            if (next[r[0].key >> 8 * byte & 255] == n)                                           \
                continue;                                                                        \
            for (int digit = 0; digit < DIGITS; digit++) {                                       \
                const uint32_t count = next[digit];                                              \
                next[digit] = sum;                                                               \
                sum += count;                                                                    \
            }                                                                                    \
            for (int64_t i = 0; i < n; i++)                                                      \
                to[next[r[i].key >> 8 * byte & 255]++] = r[i];                                   \
            Record##bits *from = r;                                                              \
            r = to, to = from;                                                                   \
        }                                                                                        \
        return r;                                                                                \
    }
RECORDS(32)
RECORDS(64)

/* Zeros of both signs are equal, and nans are the largest. */
#define FLOAT_KEY(t, T, bits, sign)                                                            \
    static inline uint##bits##_t key_##t(T x)                                                  \
    {                                                                                          \
        uint##bits##_t key;                                                                    \
        memcpy(&key, &x, sizeof key);                                                          \
        return x != x ? (uint##bits##_t) - 1 : x == 0 ? sign : key & sign ? ~key : key | sign; \
    }
FLOAT_KEY(f32, float, 32, 0x80000000u)
FLOAT_KEY(f64, double, 64, 0x8000000000000000u)

#define INTEGER_KEY(t, T, bits, least)                      \
    static inline uint##bits##_t key_##t(T x)               \
    {                                                       \
        return (uint##bits##_t)x - (uint##bits##_t)(least); \
    }
#define INTEGERS(X)                \
    X(u8, uint8_t, 32, 0)          \
    X(u16, uint16_t, 32, 0)        \
    X(u32, uint32_t, 32, 0)        \
    X(u64, uint64_t, 64, 0)        \
    X(i8, int8_t, 32, INT8_MIN)    \
    X(i16, int16_t, 32, INT16_MIN) \
    X(i32, int32_t, 32, INT32_MIN) \
    X(i64, int64_t, 64, INT64_MIN)
#define FLOATS(X) X(f32, float, 32, ) X(f64, double, 64, )
INTEGERS(INTEGER_KEY)

#define ORDERED(name, t, T, bits, Out, element)                                                        \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        const int64_t *n = call->ints, inner = n[INNER];                                               \
        for (int64_t u = begin; u < end; u++) {                                                        \
            const int64_t outer = u / inner * inner, column = u % inner;                               \
            const T *x = (const T *)p[1] + outer * n[LENGTH] + column;                                 \
            Out *out = (Out *)p[0] + outer * n[COUNT] + column;                                        \
            const Record##bits *r = order_##t(n, x, scratch);                                          \
            for (int64_t i = 0; i < n[COUNT]; i++)                                                     \
                out[i * inner] = element;                                                              \
        }                                                                                              \
        return 0;                                                                                      \
    }

/* A unit is a row with elements INNER apart. If only the FEW first records are needed, these are
 * kept sorted while the row is read. */
#define SORT(t, T, bits, unused)                                                        \
    static const Record##bits *order_##t(const int64_t *n, const T *x, char *scratch)   \
    {                                                                                   \
        Record##bits *r = (Record##bits *)scratch;                                      \
        const uint##bits##_t turn = n[DESCENDING] ? (uint##bits##_t) - 1 : 0;           \
        const int64_t length = n[LENGTH], inner = n[INNER], few = n[FEW];               \
        if (!few) {                                                                     \
            for (int64_t i = 0; i < length; i++)                                        \
                r[i] = (Record##bits){key_##t(x[i * inner]) ^ turn, (uint##bits##_t)i}; \
            return sorted_##bits(r, length);                                            \
        }                                                                               \
        for (int64_t i = 0, found = 0; i < length; i++) {                               \
            const uint##bits##_t key = key_##t(x[i * inner]) ^ turn;                    \
            if (found == few && key >= r[few - 1].key)                                  \
                continue;                                                               \
            int64_t j = found < few ? found++ : few - 1;                                \
            for (; j > 0 && r[j - 1].key > key; j--)                                    \
                r[j] = r[j - 1];                                                        \
            r[j] = (Record##bits){key, (uint##bits##_t)i};                              \
        }                                                                               \
        return r;                                                                       \
    }                                                                                   \
    ORDERED(sort_##t, t, T, bits, T, x[(int64_t)r[i].position * inner])                 \
    ORDERED(argsort_##t, t, T, bits, int64_t, (int64_t)r[i].position)
INTEGERS(SORT)
FLOATS(SORT)

/* A unit is an element of x; its result is the number of edges before it. The first guess assumes
 * equidistant edges, then bisection finds the position (Knuth, 6.2.1). */
#define SEARCH(t, T, bits, unused)                                                                     \
    static inline int is_before_##t(T edge, T x, int64_t right)                                        \
    {                                                                                                  \
        return right ? !(x < edge || (edge != edge && x == x)) : edge < x || (x != x && edge == edge); \
    }                                                                                                  \
    static int searchsorted_##t(const KernelCall *call, char *const *p, int64_t begin, int64_t end,    \
                                char *scratch)                                                         \
    {                                                                                                  \
        const int64_t *n = call->ints, length = n[LENGTH], count = n[COUNT], right = n[RIGHT];         \
        (void)scratch;                                                                                 \
        for (int64_t u = begin; u < end;) {                                                            \
            const int64_t row = u / count, behind = (row + 1) * count < end ? (row + 1) * count : end; \
            const T *edges = (const T *)p[1] + row * length;                                           \
            const double first = (double)edges[0];                                                     \
            const double density = (double)(length - 1) / ((double)edges[length - 1] - first);         \
            for (; u < behind; u++) {                                                                  \
                const T x = ((const T *)p[2])[u];                                                      \
                const double guess = ((double)x - first) * density;                                    \
                int64_t low = guess > 0 ? guess < (double)length ? (int64_t)guess : length - 1 : 0;    \
                if (!is_before_##t(edges[low], x, right) ||                                            \
                    (low + 1 < length && is_before_##t(edges[low + 1], x, right))) {                   \
                    low = 0;                                                                           \
                    for (int64_t rest = length; rest > 1;) {                                           \
                        const int64_t half = rest / 2;                                                 \
                        low += is_before_##t(edges[low + half], x, right) ? half : 0;                  \
                        rest -= half;                                                                  \
                    }                                                                                  \
                }                                                                                      \
                ((int64_t *)p[0])[u] = low + is_before_##t(edges[low], x, right);                      \
            }                                                                                          \
        }                                                                                              \
        return 0;                                                                                      \
    }
INTEGERS(SEARCH)
FLOATS(SEARCH)

/* clang-format off */
#define ENTRIES(t, T, bits, unused)                                                      \
    KERNEL(sort_##t, sort_##t, NULL) KERNEL(argsort_##t, argsort_##t, NULL) \
    KERNEL(searchsorted_##t, searchsorted_##t, NULL)
/* clang-format on */
KERNEL_TABLE(sorting, INTEGERS(ENTRIES) FLOATS(ENTRIES))
