/* Random numbers of Philox4x64-10 (Salmon et al., SC 2011), with the same bits as numpy.
 *
 * The generator is a function of a key and a counter. Block i of a stream, counted from 1, is computed
 * from the stream's first counter + i: four words, which are four f64 or eight f32. So a unit may start at
 * any block. */
#include "../plan.h"
#include "elements.h"

#include <math.h>

enum { ROUNDS = 10, TOGETHER = 2, LAYERS = 256 };
enum { random_integers(NAME) REST };

#if defined(__SIZEOF_INT128__)
static inline uint64_t high_product(uint64_t x, uint64_t y)
{
    return (uint64_t)((unsigned __int128)x * y >> 64);
}
#else
static inline uint64_t high_product(uint64_t x, uint64_t y)
{
    uint64_t x0 = (uint32_t)x, x1 = x >> 32, y0 = (uint32_t)y, y1 = y >> 32;
    uint64_t middle = x1 * y0 + (x0 * y0 >> 32), other = x0 * y1 + (uint32_t)middle;
    return x1 * y1 + (middle >> 32) + (other >> 32);
}
#endif

/* Fill `words` from word `at` of the stream, which starts a block. The stream starts at the counter
 * (data, 0, 0, purpose). Two blocks are computed together to hide the latency of multiplications. */
static void draw(uint64_t words[DRAW_UNIT], int64_t at, int64_t count, const char *stream_key,
                 uint64_t purpose, uint64_t data)
{
    uint64_t key[2];
    memcpy(key, stream_key, sizeof key);
    for (int64_t i = 0; i < count; i += 4 * TOGETHER) {
        uint64_t c[TOGETHER][4], key0 = key[0], key1 = key[1];
        for (int b = 0; b < TOGETHER; b++) {
            c[b][0] = data + (uint64_t)((at + i) / 4 + b + 1);
            c[b][1] = c[b][0] < data;
            c[b][2] = 0;
            c[b][3] = purpose;
        }
        for (int round = 0; round < ROUNDS; round++) {
            for (int b = 0; b < TOGETHER; b++) {
                const uint64_t by0 = 0xD2E7470EE14C6C93u, by2 = 0xCA5A826395121157u;
                uint64_t high0 = high_product(by0, c[b][0]), low0 = by0 * c[b][0];
                uint64_t high2 = high_product(by2, c[b][2]), low2 = by2 * c[b][2];
                c[b][0] = high2 ^ c[b][1] ^ key0;
                c[b][1] = low2;
                c[b][2] = high0 ^ c[b][3] ^ key1;
                c[b][3] = low0;
            }
            key0 += 0x9E3779B97F4A7C15u;
            key1 += 0xBB67AE8584CAA73Bu;
        }
        memcpy(words + i, c, sizeof c);
    }
}

/* Half words, the lower one first: the planners support only little-endian processors. */
static inline const Element4 *halves(const uint64_t *words)
{
    return (const Element4 *)words;
}

static inline float unit_f32(uint32_t half)
{
    return (float)(int32_t)(half >> 8) * 0x1p-24f;
}

static inline double unit_f64(uint64_t word)
{
    return (double)(int64_t)(word >> 11) * 0x1p-53;
}

/* A kernel that calls `use(words, at, count)` for each unit, with its words, and the first and the
 * number of its elements; a word gives `per_word` elements. */
#define DRAWS(name, key, per_word, use)                                                                \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)scratch;                                                                                 \
        for (int64_t unit = begin; unit < end; unit++) {                                               \
            uint64_t words[DRAW_UNIT];                                                                 \
            int64_t at = unit * DRAW_UNIT * per_word;                                                  \
            int64_t count = least(DRAW_UNIT * per_word, call->ints[COUNT] - at);                       \
            draw(words, unit *DRAW_UNIT, (count + per_word - 1) / per_word, p[key], 0, 0);             \
            use(call, p, words, at, count);                                                            \
        }                                                                                              \
        return 0;                                                                                      \
    }

/* --- uniform --- */

static void use_uniform_f32(const KernelCall *call, char *const *p, const uint64_t *words, int64_t at,
                            int64_t count)
{
    (void)call;
    float *out = (float *)p[0] + at;
    for (int64_t i = 0; i < count; i++)
        out[i] = unit_f32(halves(words)[i]);
}
DRAWS(uniform_f32, 1, 2, use_uniform_f32)

static void use_uniform_f64(const KernelCall *call, char *const *p, const uint64_t *words, int64_t at,
                            int64_t count)
{
    (void)call;
    double *out = (double *)p[0] + at;
    for (int64_t i = 0; i < count; i++)
        out[i] = unit_f64(words[i]);
}
DRAWS(uniform_f64, 1, 1, use_uniform_f64)

/* --- dropout; floats: the rate, and the factor of the kept elements --- */

#define DROPOUT(T, name)                                                                              \
    static void use_##name(const KernelCall *call, char *const *p, const uint64_t *words, int64_t at, \
                           int64_t count)                                                             \
    {                                                                                                 \
        const T *x = (const T *)p[1] + at, scale = (T)call->floats[1];                                \
        const float rate = (float)call->floats[0];                                                    \
        T *out = (T *)p[0] + at;                                                                      \
        for (int64_t i = 0; i < count; i++) {                                                         \
            T scaled = x[i] * scale;                                                                  \
            out[i] = unit_f32(halves(words)[i]) < rate ? 0 : scaled;                                  \
        }                                                                                             \
    }                                                                                                 \
    DRAWS(name, 2, 2, use_##name)
DROPOUT(float, dropout_f32)
DROPOUT(double, dropout_f64)

/* --- bernoulli --- */

#define BERNOULLI(T, name)                                                                             \
    static void use_##name(const KernelCall *call, char *const *p, const uint64_t *words, int64_t at,  \
                           int64_t count)                                                              \
    {                                                                                                  \
        const T *chances = (const T *)p[2];                                                            \
        uint8_t *out = (uint8_t *)p[0] + at;                                                           \
        if (call->ints[CHANCES] == 1) {                                                                \
            const double chance = (double)chances[0];                                                  \
            for (int64_t i = 0; i < count; i++)                                                        \
                out[i] = unit_f64(words[i]) < chance;                                                  \
            return;                                                                                    \
        }                                                                                              \
        for (int64_t i = 0, j = at % call->ints[CHANCES]; i < count; i++) {                            \
            out[i] = unit_f64(words[i]) < (double)chances[j];                                          \
            j = j + 1 < call->ints[CHANCES] ? j + 1 : 0;                                               \
        }                                                                                              \
    }                                                                                                  \
    DRAWS(draw_##name, 1, 1, use_##name)                                                               \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        const T *chances = (const T *)p[2];                                                            \
        int refused = 0;                                                                               \
        for (int64_t i = 0; i < call->ints[CHANCES]; i++)                                              \
            refused |= !(chances[i] >= 0 && chances[i] <= 1);                                          \
        return refused || draw_##name(call, p, begin, end, scratch);                                   \
    }
BERNOULLI(float, bernoulli_f32)
BERNOULLI(double, bernoulli_f64)

/* --- keys --- */

static int raw(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->ints;
    uint64_t data = n[KIND] ? (uint64_t)integer_at(p[2], n[KIND], 0) : 0;
    for (int64_t unit = begin; unit < end; unit++) {
        uint64_t words[DRAW_UNIT];
        int64_t at = unit * DRAW_UNIT, count = least(DRAW_UNIT, n[COUNT] - at);
        draw(words, at, count, p[1], (uint64_t)n[PURPOSE], data);
        memcpy(p[0] + at * 8, words, (size_t)count * 8);
    }
    return 0;
}

/* --- rejection methods: the number of words varies between values --- */

typedef struct {
    uint64_t words[DRAW_UNIT];
    const char *key;
    int64_t drawn, unread; /* words that were drawn; bytes of them that are unused */
    int64_t expected;      /* approximate number of words that will be needed */
} Stream;

static Stream stream_of(const char *key, int64_t expected)
{
    Stream stream;
    stream.key = key;
    stream.drawn = stream.unread = 0;
    stream.expected = expected;
    return stream;
}

/* Take the next `size` bytes; all values of a stream have the same size. */
static inline uint64_t take_word(Stream *stream, int64_t size)
{
    if (!stream->unread) {
        int64_t count = least((stream->expected + 11) / 8 * 8, DRAW_UNIT);
        count = count < 8 ? 8 : count;
        uint64_t *end = stream->words + DRAW_UNIT;
        draw(end - count, stream->drawn, count, stream->key, 0, 0);
        stream->drawn += count;
        stream->expected -= count;
        stream->unread = count * 8;
    }
    uint64_t word = 0;
    memcpy(&word, (const char *)(stream->words + DRAW_UNIT) - stream->unread, (size_t)size);
    stream->unread -= size;
    return word;
}

/* --- integers, by Lemire's method (ACM TOMACS 29, 2019) --- */

SPECIALIZED uint64_t bounded(Stream *stream, uint64_t most, const int64_t size)
{
    const uint64_t all = size == 8 ? ~(uint64_t)0 : ((uint64_t)1 << size % 8 * 8) - 1;
    if (!most)
        return 0;
    if (most == all)
        return take_word(stream, size);
    const uint64_t span = most + 1;
    uint64_t word = take_word(stream, size), low = word * span & all;
    if (low < span)
        for (const uint64_t refused = (all - most) % span; low < refused;) {
            word = take_word(stream, size);
            low = word * span & all;
        }
    return size == 8 ? high_product(word, span) : word * span >> size % 8 * 8;
}

#define RANDINT(T, name, WORDS)                                                                        \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)begin, (void)end, (void)scratch;                                                         \
        const int64_t count = call->ints[COUNT], size = call->ints[WORD];                              \
        const uint64_t low = (uint64_t)call->ints[LOW], most = (uint64_t)call->ints[MOST];             \
        Stream stream = stream_of(p[1], count * size / 8);                                             \
        T *out = (T *)p[0];                                                                            \
        for (int64_t i = 0; i < count; i++)                                                            \
            out[i] = (T)(low + (WORDS));                                                               \
        return 0;                                                                                      \
    }
RANDINT(uint8_t, randint_u8, bounded(&stream, most, 1))
RANDINT(uint16_t, randint_u16, bounded(&stream, most, 2))
RANDINT(uint32_t, randint_u32, bounded(&stream, most, 4))
RANDINT(uint64_t, randint_u64, size == 4 ? bounded(&stream, most, 4) : bounded(&stream, most, 8))

static int permutation(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)begin, (void)end, (void)scratch;
    const int64_t count = call->ints[COUNT];
    int64_t *out = (int64_t *)p[0];
    Stream stream = stream_of(p[1], count * 3 / 4);
    for (int64_t i = 0; i < count; i++)
        out[i] = i;
    uint64_t mask = 1;
    while ((int64_t)mask < count - 1)
        mask = mask << 1 | 1;
    for (int64_t i = count - 1; i > 0; i--) {
        if ((int64_t)(mask >> 1) >= i)
            mask >>= 1;
        int64_t j = (int64_t)(take_word(&stream, 4) & mask);
        while (j > i)
            j = (int64_t)(take_word(&stream, 4) & mask);
        const int64_t x = out[i];
        out[i] = out[j];
        out[j] = x;
    }
    return 0;
}

/* --- standard normal values, by the ziggurat of numpy (Marsaglia and Tsang, JSS 5, 2000) --- */

/* log(1 + x) for -1 < x <= 0 as in fdlibm and glibc, which numpy uses for the tail. The system's
 * function might round differently. BITS of the mantissa are significant; SHIFT drops the others. */
#define LOG1P(name, T, Bits, SHIFT, BITS, BIAS, ROOT, NEAR, HIGH, LOW, SERIES, ...) \
    static T name(T x)                                                              \
    {                                                                               \
        const T high = HIGH, low = LOW;                                             \
        T f = x, c = 0, k = 0;                                                      \
        Bits mantissa = 1;                                                          \
        if (x > (T)-0x1p-29)                                                        \
            return x > (T)-0x1p-54 ? x : x - x * x * (T)0.5;                        \
        if (x <= -(NEAR)) {                                                         \
            T u = 1 + x;                                                            \
            Bits bits;                                                              \
            c = (x - (u - 1)) / u;                                                  \
            memcpy(&bits, &u, sizeof u);                                            \
            int exponent = (int)(bits >> (SHIFT + BITS)) - (BIAS);                  \
            const Bits one = (Bits)1 << BITS, first = bits >> SHIFT & (one - 1);    \
            bits &= ((Bits)1 << (SHIFT + BITS)) - 1;                                \
            mantissa = first;                                                       \
            if (first >= ROOT) {                                                    \
                exponent++;                                                         \
                mantissa = (one - first) >> 2;                                      \
            }                                                                       \
            bits |= (Bits)((BIAS) - (first >= ROOT)) << (SHIFT + BITS);             \
            memcpy(&u, &bits, sizeof u);                                            \
            f = u - 1;                                                              \
            k = (T)exponent;                                                        \
        }                                                                           \
        const T square = (T)0.5 * f * f;                                            \
        if (!mantissa) {                                                            \
            if (f == 0)                                                             \
                return k == 0 ? 0 : k * high + (c + k * low);                       \
            const T r = square * (1 - (T)0.66666666666666666 * f);                  \
            return k == 0 ? f - r : k * high - ((r - (k * low + c)) - f);           \
        }                                                                           \
        static const T by[] = {__VA_ARGS__};                                        \
        const T s = f / (2 + f), z = s * s, r = SERIES;                             \
        if (k == 0)                                                                 \
            return f - (square - s * (square + r));                                 \
        return k * high - ((square - (s * (square + r) + (k * low + c))) - f);      \
    }
#define HORNER z *(by[0] + z * (by[1] + z * (by[2] + z * (by[3] + z * (by[4] + z * (by[5] + z * by[6]))))))
#define PAIRS(z2, z4) \
    z *by[0] + z2 *(by[1] + z * by[2]) + z4 *(by[3] + z * by[4]) + z4 *z2 *(by[5] + z * by[6])
LOG1P(log1p_f32, float, uint32_t, 0, 23, 127, 0x3504f7, 0.29289323f, 6.9313812256e-01f, 9.0580006145e-06f,
      HORNER, 6.6666668653e-01f, 4.0000000596e-01f, 2.8571429849e-01f, 2.2222198546e-01f, 1.8183572590e-01f,
      1.5313838422e-01f, 1.4798198640e-01f)
LOG1P(log1p_f64, double, uint64_t, 32, 20, 1023, 0x6a09e, 0x1.2bec4p-2, 6.93147180369123816490e-01,
      1.90821492927058770002e-10, PAIRS((z * z), (z * z * (z * z))), 6.666666666666735130e-01,
      3.999999999940941908e-01, 2.857142874366239149e-01, 2.222219843214978396e-01,
      1.818357216161805012e-01, 1.531383769920937332e-01, 1.479819860511658591e-01)

/* floats: the widths of the layers, and the density at their edges. The first byte of a word selects the
 * layer; a sign and STEPS bits follow. */
#define NORMAL(T, dtype, Word, STEPS, EDGE, BY_EDGE)                                              \
    static T normal_value_##dtype(const KernelCall *call, Stream *stream)                         \
    {                                                                                             \
        const double *widths = call->floats, *density = widths + LAYERS;                          \
        for (;;) {                                                                                \
            Word word = (Word)take_word(stream, sizeof word), layer = word & 255;                 \
            const int64_t step = (int64_t)(word >> 9 & (((Word)1 << STEPS) - 1));                 \
            T x = (T)step * (T)widths[layer];                                                     \
            x = word & 256 ? -x : x;                                                              \
            if (step < call->ints[REST + layer])                                                  \
                return x;                                                                         \
            if (layer == 0)                                                                       \
                for (;;) {                                                                        \
                    T beyond = -BY_EDGE * log1p_##dtype(-NEXT(dtype));                            \
                    T below = -log1p_##dtype(-NEXT(dtype));                                       \
                    if (below + below > beyond * beyond)                                          \
                        return step >> 8 & 1 ? -(EDGE + beyond) : EDGE + beyond;                  \
                }                                                                                 \
            T at = (T)density[layer], above = (T)density[layer - 1];                              \
            T height = (above - at) * NEXT(dtype) + at;                                           \
            if (height < exp(-0.5 * (double)x * (double)x))                                       \
                return x;                                                                         \
        }                                                                                         \
    }                                                                                             \
    static int normal_##dtype(const KernelCall *call, char *const *p, int64_t begin, int64_t end, \
                              char *scratch)                                                      \
    {                                                                                             \
        (void)begin, (void)end, (void)scratch;                                                    \
        const int64_t count = call->ints[COUNT];                                                  \
        T *out = (T *)p[0];                                                                       \
        const double *widths = call->floats;                                                      \
        static const T signs[] = {1, -1};                                                         \
        Stream stream = stream_of(p[1], count * (int64_t)sizeof *out / 8 + count / 64);           \
        for (int64_t i = 0; i < count; i++) {                                                     \
            /* Most values come from one word each: use those that were drawn. */                 \
            const char *words = (const char *)(stream.words + DRAW_UNIT) - stream.unread;         \
            const int64_t most = least(stream.unread / (int64_t)sizeof *out, count - i);          \
            int64_t used = 0;                                                                     \
            for (; used < most; used++) {                                                         \
                Word word;                                                                        \
                memcpy(&word, words + used * (int64_t)sizeof word, sizeof word);                  \
                const int64_t step = (int64_t)(word >> 9 & (((Word)1 << STEPS) - 1));             \
                if (step >= call->ints[REST + (word & 255)])                                      \
                    break;                                                                        \
                out[i + used] = (T)step * (T)widths[word & 255] * signs[word >> 8 & 1];           \
            }                                                                                     \
            stream.unread -= used * (int64_t)sizeof *out;                                         \
            i += used;                                                                            \
            if (i < count)                                                                        \
                out[i] = normal_value_##dtype(call, &stream);                                     \
        }                                                                                         \
        return 0;                                                                                 \
    }
#define NEXT(dtype) NEXT_##dtype(stream)
#define NEXT_f32(stream) unit_f32((uint32_t)take_word(stream, 4))
#define NEXT_f64(stream) unit_f64(take_word(stream, 8))
NORMAL(float, f32, uint32_t, 23, 3.6541528853610088f, 0.27366123732975828f)
NORMAL(double, f64, uint64_t, 52, 3.6541528853610088, 0.27366123732975828)

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
KERNEL_TABLE(random, ENTRY(uniform_f32) ENTRY(uniform_f64) ENTRY(dropout_f32) ENTRY(dropout_f64)
                         ENTRY(bernoulli_f32) ENTRY(bernoulli_f64) KERNEL(random_words, raw, NULL)
                             ENTRY(randint_u8) ENTRY(randint_u16) ENTRY(randint_u32) ENTRY(randint_u64)
                                 ENTRY(permutation) ENTRY(normal_f32) ENTRY(normal_f64))
/* clang-format on */
