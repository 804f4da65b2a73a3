/* Convolution of channels-last images in small groups of channels, and its transposes; mainly depthwise
 * convolution, with one channel per group. */
#include "../plan.h"

#include "elements.h"
#include "vectors.h"

#include <string.h>

enum { depthwise_integers(NAME) };
enum { PART = 256 };     /* positions summed separately before the parts are added */
enum { PIXELS = 16384 }; /* bytes of a group's copied pixels, which stay in the first-level cache */
enum { WIDEST = 16, TAPS = 7, PLACES = 32 }; /* channels per group; taps and positions per tile */

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
