/* Row function of the eight sums of a digest, as mlvm/machines/digest.py defines them.
 *
 * Parameters: the sums, the bytes, and the keys of a block of 64-bit words. `kind` is the kind of
 * floats, 0 for other elements. */

enum { DIGEST_SUMS = 8, DIGEST_BLOCK = 512 };

/* Replace each nan by one without sign and payload, so that all nans are equal. */
#define QUIET(type, infinity, nan)                                                       \
    do {                                                                                 \
        type *x = (type *)words;                                                         \
        const type largest = (type)(infinity), magnitude = (type)((type) ~(type)0 >> 1); \
        for (size_t i = 0; i < DIGEST_BLOCK * 8 / sizeof(type); i++)                     \
            x[i] = (type)(x[i] & magnitude) > largest ? (type)(nan) : x[i];              \
    } while (0)

static void digest_row(char *const *p, int64_t n, const int64_t *kind)
{
    const char *data = p[1];
    const uint64_t *keys = (const uint64_t *)p[2];
    uint64_t words[DIGEST_BLOCK] = {0}, sums[DIGEST_SUMS] = {0};
    while (n) {
        const size_t present = n < (int64_t)sizeof words ? (size_t)n : sizeof words;
        const size_t count = (present + 63) / 64 * DIGEST_SUMS;
        memcpy(words, data, present);
        memset((char *)words + present, 0, count * 8 - present);
        switch (*kind) {
        case 1: QUIET(uint16_t, 0x7C00, 0x7E00); break;
        case 2: QUIET(uint16_t, 0x7F80, 0x7FC0); break;
        case 3: QUIET(uint32_t, 0x7F800000, 0x7FC00000); break;
        case 4: QUIET(uint64_t, 0x7FF0000000000000, 0x7FF8000000000000); break;
        }
        for (size_t i = 0; i < count; i += DIGEST_SUMS) {
            __builtin_prefetch(data + 2 * sizeof words + i * 8); /* two blocks ahead, beyond the page */
            for (size_t j = 0; j < DIGEST_SUMS; j++) {
                const uint64_t mixed = words[i + j] ^ keys[i + j];
                sums[j] += words[i + (j ^ 1)] + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
            }
        }
        for (size_t j = 0; j < DIGEST_SUMS; j++)
            sums[j] = (sums[j] ^ sums[j] >> 47) * 0x9E3779B185EBCA87u;
        data += present;
        n -= (int64_t)present;
    }
    memcpy(p[0], sums, sizeof sums);
}
#undef QUIET
