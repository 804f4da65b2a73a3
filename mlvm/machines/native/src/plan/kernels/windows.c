/* Sliding windows over images: [N,H,W,C] and [N,OH,OW,KH,KW,C]. */
#include "../plan.h"
#include "elements.h"

enum { windows_integers(NAME) };

static inline int64_t largest(int64_t x, int64_t y)
{
    return x > y ? x : y;
}

/* For the window at x (the first column in the image, which may be in the padding), return the
 * first and the end column inside the image, relative to the window. */
static inline int64_t first_column(const int64_t *n, int64_t x)
{
    return x < 0 ? least((n[APART_X] - 1 - x) / n[APART_X], n[WIDE]) : 0;
}

static inline int64_t end_column(const int64_t *n, int64_t x)
{
    int64_t room = n[WIDTH] - x, end = room > 0 ? (room - 1) / n[APART_X] + 1 : 0;
    return largest(first_column(n, x), least(n[WIDE], end));
}

/* --- patches of padded images; floats: the padding value. A unit is a row of windows --- */

#define PATCHES(T, size, name)                                                                           \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)   \
    {                                                                                                    \
        (void)scratch;                                                                                   \
        const int64_t *n = call->ints, channels = n[CHANNELS], run = n[WIDE] * channels;                 \
        union {                                                                                          \
            T value;                                                                                     \
            Element##size element;                                                                       \
        } pad = {(T)call->floats[0]};                                                                    \
        for (int64_t unit = begin; unit < end; unit++) {                                                 \
            const Element##size *image = (const Element##size *)p[1] +                                   \
                                         unit / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;               \
            Element##size *out = (Element##size *)p[0] + unit * n[ACROSS] * n[TALL] * run;               \
            int64_t top = unit % n[DOWN] * n[STRIDE_Y] - n[TOP];                                         \
            for (int64_t i = 0; i < n[ACROSS]; i++) {                                                    \
                int64_t left = i * n[STRIDE_X] - n[LEFT];                                                \
                int64_t first = first_column(n, left), stop = end_column(n, left);                       \
                int64_t many = n[APART_X] == 1 ? stop - first : 1; /* at once */                         \
                for (int64_t a = 0, y = top; a < n[TALL]; a++, y += n[APART_Y], out += run) {            \
                    if (y < 0 || y >= n[HEIGHT] || first >= stop) {                                      \
                        fill_##size(out, pad.element, run);                                              \
                        continue;                                                                        \
                    }                                                                                    \
                    fill_##size(out, pad.element, first *channels);                                      \
                    for (int64_t b = first; b < stop; b += many) {                                       \
                        int64_t pixel = y * n[WIDTH] + left + b * n[APART_X];                            \
                        copy_run((char *)(out + b * channels), (const char *)(image + pixel * channels), \
                                 many *channels *size);                                                  \
                    }                                                                                    \
                    fill_##size(out + stop * channels, pad.element, run - stop * channels);              \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
        return 0;                                                                                        \
    }
PATCHES(float, 4, patches_f32)
PATCHES(double, 8, patches_f64)

/* --- unpatches; a unit is a row of an image --- */

/* The windows of a row from right to left, so that each element adds its terms in the order of window
 * columns. */
#define UNPATCHES(T, name)                                                                               \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)   \
    {                                                                                                    \
        (void)scratch;                                                                                   \
        const int64_t *n = call->ints, channels = n[CHANNELS], run = n[WIDE] * channels;                 \
        for (int64_t unit = begin; unit < end; unit++) {                                                 \
            T *out = (T *)p[0] + unit * n[WIDTH] * channels;                                             \
            const T *windows = (const T *)p[1] + unit / n[HEIGHT] * n[DOWN] * n[ACROSS] * n[TALL] * run; \
            int64_t y = unit % n[HEIGHT] + n[TOP];                                                       \
            memset(out, 0, (size_t)(n[WIDTH] * channels) * sizeof(T));                                   \
            for (int64_t i = 0; i < n[TALL] && i * n[APART_Y] <= y; i++) {                               \
                int64_t row = (y - i * n[APART_Y]) / n[STRIDE_Y];                                        \
                if (row * n[STRIDE_Y] != y - i * n[APART_Y] || row >= n[DOWN])                           \
                    continue;                                                                            \
                for (int64_t j = n[ACROSS] - 1; j >= 0; j--) {                                           \
                    int64_t left = j * n[STRIDE_X] - n[LEFT];                                            \
                    int64_t first = first_column(n, left), stop = end_column(n, left);                   \
                    int64_t many = n[APART_X] == 1 ? stop - first : 1; /* at once */                     \
                    const T *in = windows + ((row * n[ACROSS] + j) * n[TALL] + i) * run;                 \
                    for (int64_t b = first; b < stop; b += many) {                                       \
                        T *to = out + (left + b * n[APART_X]) * channels;                                \
                        INDEPENDENT_FOR (int64_t c = 0; c < many * channels; c++)                        \
                            to[c] += in[b * channels + c];                                               \
                    }                                                                                    \
                }                                                                                        \
            }                                                                                            \
        }                                                                                                \
        return 0;                                                                                        \
    }
UNPATCHES(float, unpatches_f32)
UNPATCHES(double, unpatches_f64)

/* --- pooling; a unit is a row of windows --- */

/* nan if either is nan. The first comparison is one instruction, the second is rarely true. */
#define GREATER(x, y) ((x) > (y) ? (x) : (y))
#define LARGER(x, y) ((x) != (x) ? (x) : GREATER(x, y))
#define SUM(x, y) ((x) + (y))

/* `combine` the elements of a window one after the other, from `start`, then apply `end_with`. Each
 * position in the window is processed for a whole row of windows. */
#define POOL(T, name, start, combine, end_with)                                                          \
    /* Elements of `count` windows that are `step` pixels apart. */                                      \
    static inline void run_##name(T *out, const T *in, int64_t count, int64_t step, int64_t channels)    \
    {                                                                                                    \
        if (step == 1) {                                                                                 \
            INDEPENDENT_FOR (int64_t i = 0; i < count * channels; i++)                                   \
                out[i] = combine(out[i], in[i]);                                                         \
        } else if (step == 2 && channels == 1) {                                                         \
            INDEPENDENT_FOR (int64_t i = 0; i < count; i++)                                              \
                out[i] = combine(out[i], in[2 * i]);                                                     \
        } else {                                                                                         \
            for (int64_t i = 0; i < count; i++) {                                                        \
                INDEPENDENT_FOR (int64_t c = 0; c < channels; c++)                                       \
                    out[i * channels + c] = combine(out[i * channels + c], in[i * step * channels + c]); \
            }                                                                                            \
        }                                                                                                \
    }                                                                                                    \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)   \
    {                                                                                                    \
        (void)scratch;                                                                                   \
        const int64_t *n = call->ints, channels = n[CHANNELS], width = n[ACROSS] * channels;             \
        const int64_t step = n[STRIDE_X];                                                                \
        const T count = (T)(n[TALL] * n[WIDE]);                                                          \
        (void)count;                                                                                     \
        for (int64_t unit = begin; unit < end; unit++) {                                                 \
            T *out = (T *)p[0] + unit * width;                                                           \
            const T *image = (const T *)p[1] + unit / n[DOWN] * n[HEIGHT] * n[WIDTH] * channels;         \
            int64_t top = unit % n[DOWN] * n[STRIDE_Y] - n[TOP];                                         \
            for (int64_t c = 0; c < width; c++)                                                          \
                out[c] = start;                                                                          \
            for (int64_t a = 0, y = top; a < n[TALL]; a++, y += n[APART_Y])                              \
                for (int64_t j = 0; j < n[WIDE] && y >= 0 && y < n[HEIGHT]; j++) {                       \
                    /* For the windows first .. stop - 1, this position is inside the image. */          \
                    int64_t x = j * n[APART_X] - n[LEFT], first = x < 0 ? (step - 1 - x) / step : 0;     \
                    int64_t room = n[WIDTH] - x;                                                         \
                    int64_t stop = room > 0 ? least(n[ACROSS], (room - 1) / step + 1) : 0;               \
                    run_##name(out + first * channels,                                                   \
                               image + (y * n[WIDTH] + x + first * step) * channels, stop - first, step, \
                               channels);                                                                \
                }                                                                                        \
            for (int64_t c = 0; c < width; c++)                                                          \
                out[c] = end_with(out[c]);                                                               \
        }                                                                                                \
        return 0;                                                                                        \
    }
#define AS_IT_IS(x) (x)
#define MEAN(x) ((x) / count)
POOL(float, max_pool2d_f32, -__builtin_inff(), LARGER, AS_IT_IS)
POOL(double, max_pool2d_f64, -__builtin_inf(), LARGER, AS_IT_IS)
POOL(float, avg_pool2d_f32, 0, SUM, MEAN)
POOL(double, avg_pool2d_f64, 0, SUM, MEAN)

/* --- the gradient of the maximum; a unit is BLOCK channels of an image --- */

#define POOL_VJP(T, name)                                                                              \
    static int name(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch) \
    {                                                                                                  \
        (void)scratch;                                                                                 \
        enum { MOST = 64 };                                                                            \
        const int64_t *n = call->ints, channels = n[CHANNELS];                                         \
        const int64_t blocks = (channels + n[BLOCK] - 1) / n[BLOCK];                                   \
        for (int64_t unit = begin; unit < end; unit++) {                                               \
            const int64_t channel = unit % blocks * n[BLOCK], image = unit / blocks;                   \
            const int64_t count = least(n[BLOCK], channels - channel);                                 \
            const int64_t pixels = n[HEIGHT] * n[WIDTH], windows = n[DOWN] * n[ACROSS];                \
            T *out = (T *)p[0] + image * pixels * channels + channel;                                  \
            const T *g = (const T *)p[1] + image * windows * channels + channel;                       \
            const T *x = (const T *)p[2] + image * pixels * channels + channel;                        \
            for (int64_t i = 0; i < pixels; i++)                                                       \
                memset(out + i * channels, 0, (size_t)count * sizeof(T));                              \
            for (int64_t i = 0; i < windows; i++) {                                                    \
                const int64_t top = i / n[ACROSS] * n[STRIDE_Y] - n[TOP];                              \
                const int64_t left = i % n[ACROSS] * n[STRIDE_X] - n[LEFT];                            \
                const int64_t first = first_column(n, left), stop = end_column(n, left);               \
                T most[MOST], ties[MOST];                                                              \
                for (int64_t c = 0; c < count; c++) {                                                  \
                    most[c] = -(T)__builtin_inf();                                                     \
                    ties[c] = 0;                                                                       \
                }                                                                                      \
                EACH_PLACE                                                                             \
                INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                        \
                    most[c] = LARGER(most[c], x[at + c]);                                              \
                EACH_PLACE                                                                             \
                INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                        \
                    ties[c] += x[at + c] == most[c] ? 1 : 0;                                           \
                INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                        \
                    ties[c] = g[i * channels + c] / ties[c];                                           \
                EACH_PLACE                                                                             \
                INDEPENDENT_FOR (int64_t c = 0; c < count; c++)                                        \
                    out[at + c] += (x[at + c] == most[c] ? 1 : 0) * ties[c];                           \
            }                                                                                          \
        }                                                                                              \
        return 0;                                                                                      \
    }
/* Iterate over the positions of a window that are inside the image. */
#define EACH_PLACE                                                                      \
    for (int64_t a = 0, y = top; a < n[TALL]; a++, y += n[APART_Y])                     \
        for (int64_t b = first, at = (y * n[WIDTH] + left + b * n[APART_X]) * channels; \
             b < stop && y >= 0 && y < n[HEIGHT]; b++, at += n[APART_X] * channels)
POOL_VJP(float, max_pool2d_vjp_f32)
POOL_VJP(double, max_pool2d_vjp_f64)

#define BOTH(name) KERNEL(name##_f32, name##_f32, NULL) KERNEL(name##_f64, name##_f64, NULL)
/* clang-format off */
KERNEL_TABLE(windows, BOTH(patches) BOTH(unpatches) BOTH(max_pool2d)
                          BOTH(max_pool2d_vjp) BOTH(avg_pool2d))
/* clang-format on */
