/* Random numbers by Philox4x64-10 (Salmon et al., SC 2011), with the same bits as numpy's for a
 * key. A block of four words is a function of the key and a counter. The first word of the
 * counter numbers the blocks from 1, the last is the purpose: 0 draws, 1 splits a key, 2 folds a
 * number into it. */

typedef struct {
    u64 w[4];
} Block;

DEVICE Block philox(u64 key, u64 other, u64 low, u64 high, u64 purpose)
{
    u64 a = low, b = high, c = 0, d = purpose;
    Block block;
    for (int i = 0; i < 10; i++) {
        const u64 first = HIGH_PRODUCT(0xD2E7470EE14C6C93ul, a), second = HIGH_PRODUCT(0xCA5A826395121157ul, c);
        const u64 low_first = 0xD2E7470EE14C6C93ul * a, low_second = 0xCA5A826395121157ul * c;
        a = second ^ b ^ key;
        b = low_second;
        c = first ^ d ^ other;
        d = low_first;
        key += 0x9E3779B97F4A7C15ul;
        other += 0xBB67AE8584CAA73Bul;
    }
    block.w[0] = a;
    block.w[1] = b;
    block.w[2] = c;
    block.w[3] = d;
    return block;
}

#define BLOCK(number) philox(key[0], key[1], (u64)(number) + 1, 0, 0)
#define HALF_WORD(block, i) ((u32)((block).w[(i) / 2] >> (i) % 2 * 32))
#define UNIT_F32(word) ((f32)((word) >> 8) * 5.9604644775390625e-8f)
#define UNIT_F64(word) ((f64)((word) >> 11) * 1.1102230246251565404e-16)

/* A block gives eight values, or four if each needs a whole word. */
#define EIGHT                                                                                      \
    const i64 first = ITEM(0) * 8;                                                                 \
    if (first >= total) return;                                                                    \
    const Block block = BLOCK(ITEM(0));                                                            \
    for (int i = 0; i < 8 && first + i < total; i++)
#define FOUR                                                                                       \
    const i64 first = ITEM(0) * 4;                                                                 \
    if (first >= total) return;                                                                    \
    const Block block = BLOCK(ITEM(0));                                                            \
    for (int i = 0; i < 4 && first + i < total; i++)

KERNEL void words(TENSOR(u64, out), TENSOR(u64, key), const i64 total, const u64 purpose)
{
    POINTER(u64, out);
    POINTER(u64, key);
    const i64 first = ITEM(0) * 4;
    if (first >= total) return;
    const Block block = philox(key[0], key[1], (u64)ITEM(0) + 1, 0, purpose);
    for (int i = 0; i < 4 && first + i < total; i++) out[first + i] = block.w[i];
}

#ifdef DATA
KERNEL void fold_in(TENSOR(u64, out), TENSOR(u64, key), TENSOR(DATA, data))
{
    POINTER(u64, out);
    POINTER(u64, key);
    POINTER(DATA, data);
    if (ITEM(0)) return;
    const u64 low = (u64)LOAD(DATA, data, 0) + 1;
    const Block block = philox(key[0], key[1], low, low == 0, 2);
    out[0] = block.w[0];
    out[1] = block.w[1];
}
#endif

#ifdef T
KERNEL void uniform(TENSOR(T, out), TENSOR(u64, key), const i64 total)
{
    POINTER(T, out);
    POINTER(u64, key);
#ifdef WIDE
    FOUR STORE(T, out, first + i, UNIT_F64(block.w[i]));
#else
    EIGHT STORE(T, out, first + i, UNIT_F32(HALF_WORD(block, i)));
#endif
}

KERNEL void dropout(TENSOR(T, out), TENSOR(T, x), TENSOR(u64, key), const i64 total, const COMPUTED(T) scale,
                    const f32 rate)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(u64, key);
    EIGHT {
        const int is_kept = !(UNIT_F32(HALF_WORD(block, i)) < rate);
        STORE(T, out, first + i, is_kept ? LOAD(T, x, first + i) * scale : 0);
    }
}

#ifdef WIDE
KERNEL void bernoulli(TENSOR(bool, out), TENSOR(u64, key), TENSOR(T, p), REFUSALS, const i64 total, const i64 length,
                      const i64 behind)
{
    POINTER(bool, out);
    POINTER(u64, key);
    POINTER(T, p);
    FOUR {
        const i64 place = (first + i) / behind % length;
        const f64 chance = LOAD(T, p, place);
        if (!(chance >= 0 && chance <= 1)) REFUSE(place, BITS_OF_F64(chance));
        out[first + i] = UNIT_F64(block.w[i]) < chance;
    }
}
#endif
#endif

#ifdef BITS /* integers, by Lemire's method (ACM TOMACS 29, 2019) from words of BITS bits */
#define PART(block, i) ((block).w[(i) * BITS / 64] >> (i) * BITS % 64 & (BITS == 64 ? ~(u64)0 : ((u64)1 << BITS % 64) - 1))
#define PARTS (256 / BITS)

/* Compute an integer from each word; taken[word] is whether the method accepts it. If `out` is a T, all are
 * accepted. */
KERNEL void integers(TENSOR(OUT, out), TENSOR(i64, taken), TENSOR(u64, key), const i64 total, const u64 low,
                     const u64 span, const u64 refused)
{
    POINTER(OUT, out);
    POINTER(i64, taken);
    POINTER(u64, key);
    const i64 first = ITEM(0) * PARTS;
    if (first >= total) return;
    const Block block = BLOCK(ITEM(0));
    for (int i = 0; i < PARTS && first + i < total; i++) {
        const u64 word = PART(block, i);
#if BITS == 64
        const u64 value = span ? HIGH_PRODUCT(word, span) : word, rest = word * span;
#else
        const u64 value = word * span >> BITS, rest = word * span & (((u64)1 << BITS) - 1);
#endif
        out[first + i] = (STORED(OUT))(value + low);
        if (refused) taken[first + i] = rest >= refused;
    }
}

/* Copy the accepted integers contiguously; `ranks` are the running sums of `taken`. */
KERNEL void gather_taken(TENSOR(OUT, out), TENSOR(OUT, drawn), TENSOR(i64, ranks), const i64 total, const i64 count)
{
    POINTER(OUT, out);
    POINTER(OUT, drawn);
    POINTER(i64, ranks);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 rank = ranks[at];
    if (rank > (at ? ranks[at - 1] : 0) && rank <= count) out[rank - 1] = drawn[at];
}
#endif

#ifdef NORMAL /* standard normal values by numpy's ziggurat (Marsaglia and Tsang, JSS 5, 2000) */

NORMAL /* layer widths / 2^23, number of 2^23 steps inside the next layer, density at each edge */

/* log(1 + x) for -1 < x <= 0 with the bits of fdlibm and glibc, which numpy uses for the tail. */
DEVICE f32 log1p_f32(f32 x)
{
    const f32 high = 6.9313812256e-01f, low = 9.0580006145e-06f;
    const i32 bits = (i32)BITS_OF_F32(x);
    f32 f = x, c = 0, k = 0;
    i32 mantissa = 1;
    if ((bits & 0x7fffffff) < 0x31000000) return (bits & 0x7fffffff) < 0x24800000 ? x : x - x * x * 0.5f;
    if (bits > (i32)0xbe95f61f) { /* x < -0.2929 */
        f32 u = 1.0f + x;
        mantissa = (i32)BITS_OF_F32(u);
        i32 exponent = (mantissa >> 23) - 127;
        c = exponent > 0 ? 1.0f - (u - x) : x - (u - 1.0f);
        c /= u;
        mantissa &= 0x007fffff;
        if (mantissa < 0x3504f7) {
            u = F32_OF_BITS(mantissa | 0x3f800000);
        } else {
            exponent += 1;
            u = F32_OF_BITS(mantissa | 0x3f000000);
            mantissa = (0x00800000 - mantissa) >> 2;
        }
        f = u - 1.0f;
        k = exponent;
    }
    const f32 square = 0.5f * f * f;
    if (mantissa == 0) {
        if (f == 0) return k == 0 ? 0 : k * high + (c + k * low);
        const f32 r = square * (1.0f - 0.66666666666666666f * f);
        return k == 0 ? f - r : k * high - ((r - (k * low + c)) - f);
    }
    const f32 s = f / (2.0f + f), z = s * s;
    const f32 r = z * (6.6666668653e-01f + z * (4.0000000596e-01f + z * (2.8571429849e-01f + z * (2.2222198546e-01f
        + z * (1.8183572590e-01f + z * (1.5313838422e-01f + z * 1.4798198640e-01f))))));
    if (k == 0) return f - (square - s * (square + r));
    return k * high - ((square - (s * (square + r) + (k * low + c))) - f);
}

/* Compute the value that starts at each word, and the word at which the next value starts. */
KERNEL void normals(TENSOR(f32, values), TENSOR(i32, next), TENSOR(u32, stream), const i64 total)
{
    POINTER(f32, values);
    POINTER(i32, next);
    POINTER(u32, stream);
    const i64 begin = ITEM(0);
    if (begin >= total) return;
    i64 at = begin;
    f32 value = 0;
    while (at < total) {
        const u32 word = stream[at];
        const int layer = (int)(word & 255);
        const f32 step = (f32)(word >> 9);
        value = step * widths[layer];
        if (word & 256) value = -value;
        at += 1;
        if (step < inside[layer]) break;
        if (layer == 0) {
            f32 beyond = 0, below;
            do {
                beyond = -0.27366123732975828f * log1p_f32(-UNIT_F32(stream[at]));
                below = -log1p_f32(-UNIT_F32(stream[at + 1]));
                at += 2;
            } while (at < total && !(below + below > beyond * beyond));
            value = word & (1u << 17) ? -(3.6541528853610088f + beyond) : 3.6541528853610088f + beyond;
            break;
        }
        const f32 height = (density[layer - 1] - density[layer]) * UNIT_F32(stream[at]) + density[layer];
        at += 1;
        if (height < exp(-0.5 * (f64)value * (f64)value)) break;
    }
    values[begin] = value;
    next[begin] = (i32)(at < total ? at : total - 1);
}

/* Double the number of known words at which values start, and the length of jumps. */
KERNEL void jump(TENSOR(i32, starts), TENSOR(i32, to), TENSOR(i32, from), const i64 total, const i64 known)
{
    POINTER(i32, starts);
    POINTER(i32, to);
    POINTER(i32, from);
    const i64 at = ITEM(0);
    if (at < known) starts[known + at] = from[starts[at]];
    if (at < total) to[at] = from[from[at]];
}

KERNEL void gather_values(TENSOR(OUT, out), TENSOR(f32, values), TENSOR(i32, starts), const i64 total)
{
    POINTER(OUT, out);
    POINTER(f32, values);
    POINTER(i32, starts);
    const i64 at = ITEM(0);
    if (at < total) STORE(OUT, out, at, values[starts[at]]);
}
#endif
