/* Convolution of images in narrow groups of channels, channels last, and its transposes; above all that of
 * each channel by itself, the depthwise one. */
#include "../plan.h"

#include "elements.h"
#include "vectors.h"

#include <string.h>

enum { depthwise_integers(NAME) };
enum { PART = 256 };     /* places whose terms are added before others are */
enum { PIXELS = 16384 }; /* bytes of a group's pixels that are copied, and stay in the first-level cache */
enum { WIDEST = 16, TAPS = 7, PLACES = 32 }; /* channels of a group; what is summed, and copied, at once */

#define T float
#define OF(name) MLVM_JOIN(name, f32)
#include "vector_of.h"
#include "depthwise_of.h"
#include "grouped_of.h"
#undef T
#undef OF

#define T double
#define OF(name) MLVM_JOIN(name, f64)
#include "vector_of.h"
#include "depthwise_of.h"
#include "grouped_of.h"
#undef T
#undef OF

#define ENTRY(name) KERNEL(name, name, NULL)
/* clang-format off */
#define ENTRIES(dtype)                                                                   \
    ENTRY(depthwise_##dtype) ENTRY(depthwise_transpose_##dtype)                          \
    ENTRY(depthwise_kernel_vjp_##dtype) ENTRY(grouped_##dtype) ENTRY(grouped_kernel_vjp_##dtype)
/* clang-format on */
KERNEL_TABLE(depthwise, ENTRIES(f32) ENTRIES(f64))
