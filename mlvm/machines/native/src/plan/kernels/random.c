/* Draws from Philox4x64-10 (Salmon et al., SC 2011), the bits that numpy draws.
 *
 * The generator is a function of a key and a counter. Block i of a stream, i from 1 on, is what it
 * makes of the stream's first counter + i: four words, which are four f64 or eight f32. So a unit
 * may begin at any block. */
#include "../plan.h"
#include "elements.h"

enum { ROUNDS = 10, TOGETHER = 2 };
enum { random_integers(NAME) };

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

/* Fill `words` from the stream's word `at` on, which begins a block. The stream begins at the
 * counter (data, 0, 0, purpose). Two blocks at once, as each waits for its own products. */
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

/* Half a word at a time, the lower one first: the planners serve little-endian processors only. */
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

/* A kernel that calls `use(words, at, count)` for each unit: its words, and the first and the
 * number of its elements, of which each word has `per_word`. */
#define DRAWS(name, key, per_word, use)                                                  \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end,  \
                    char *scratch)                                                       \
    {                                                                                    \
        (void)scratch;                                                                   \
        for (int64_t unit = begin; unit < end; unit++) {                                 \
            uint64_t words[DRAW_UNIT];                                                   \
            int64_t at = unit * DRAW_UNIT * per_word;                                    \
            int64_t count = least(DRAW_UNIT * per_word, call->n[COUNT] - at);            \
            draw(words, unit * DRAW_UNIT, (count + per_word - 1) / per_word, p[key], 0, 0); \
            use(call, p, words, at, count);                                              \
        }                                                                                \
        return 0;                                                                        \
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

/* --- dropout; a: the rate, and what the others are multiplied by --- */

#define DROPOUT(T, name)                                                                 \
    static void use_##name(const KernelCall *call, char *const *p, const uint64_t *words, \
                           int64_t at, int64_t count)                                    \
    {                                                                                    \
        const T *x = (const T *)p[1] + at, scale = (T)call->a[1];                        \
        const float rate = (float)call->a[0];                                            \
        T *out = (T *)p[0] + at;                                                         \
        for (int64_t i = 0; i < count; i++) {                                            \
            T kept = x[i] * scale;                                                       \
            out[i] = unit_f32(halves(words)[i]) < rate ? 0 : kept;                       \
        }                                                                                \
    }                                                                                    \
    DRAWS(name, 2, 2, use_##name)
DROPOUT(float, dropout_f32)
DROPOUT(double, dropout_f64)

/* --- bernoulli --- */

#define BERNOULLI(T, name)                                                               \
    static void use_##name(const KernelCall *call, char *const *p, const uint64_t *words, \
                           int64_t at, int64_t count)                                    \
    {                                                                                    \
        const T *chances = (const T *)p[2];                                              \
        uint8_t *out = (uint8_t *)p[0] + at;                                             \
        if (call->n[CHANCES] == 1) {                                                     \
            const double chance = (double)chances[0];                                    \
            for (int64_t i = 0; i < count; i++)                                          \
                out[i] = unit_f64(words[i]) < chance;                                    \
            return;                                                                      \
        }                                                                                \
        for (int64_t i = 0, j = at % call->n[CHANCES]; i < count; i++) {                 \
            out[i] = unit_f64(words[i]) < (double)chances[j];                            \
            j = j + 1 < call->n[CHANCES] ? j + 1 : 0;                                    \
        }                                                                                \
    }                                                                                    \
    DRAWS(draw_##name, 1, 1, use_##name)                                                 \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end,  \
                    char *scratch)                                                       \
    {                                                                                    \
        const T *chances = (const T *)p[2];                                              \
        int refused = 0;                                                                 \
        for (int64_t i = 0; i < call->n[CHANCES]; i++)                                   \
            refused |= !(chances[i] >= 0 && chances[i] <= 1);                            \
        return refused || draw_##name(call, p, begin, end, scratch);                     \
    }
BERNOULLI(float, bernoulli_f32)
BERNOULLI(double, bernoulli_f64)

/* --- keys --- */

static int raw(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)scratch;
    const int64_t *n = call->n;
    uint64_t data = n[KIND] ? (uint64_t)integer_at(p[2], n[KIND], 0) : 0;
    for (int64_t unit = begin; unit < end; unit++) {
        uint64_t words[DRAW_UNIT];
        int64_t at = unit * DRAW_UNIT, count = least(DRAW_UNIT, n[COUNT] - at);
        draw(words, at, count, p[1], (uint64_t)n[PURPOSE], data);
        memcpy(p[0] + at * 8, words, (size_t)count * 8);
    }
    return 0;
}

#define ENTRY(name) KERNEL(name, name, NULL)
KERNEL_TABLE(random, ENTRY(uniform_f32) ENTRY(uniform_f64) ENTRY(dropout_f32) ENTRY(dropout_f64)
                         ENTRY(bernoulli_f32) ENTRY(bernoulli_f64) KERNEL(random_words, raw, NULL))
