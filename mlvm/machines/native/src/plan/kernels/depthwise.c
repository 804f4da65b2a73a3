/* Depthwise convolution of images, channels last, and its transposes: each channel by itself. What is
 * beyond an image is left out. */
#include "../plan.h"

#include "elements.h"
#include "vectors.h"

#include <string.h>

enum { depthwise_integers(NAME) };

#define T float
#define OF(name) MLVM_JOIN(name, f32)
#include "vector_of.h"
#include "depthwise_of.h"
#undef T
#undef OF

#define T double
#define OF(name) MLVM_JOIN(name, f64)
#include "vector_of.h"
#include "depthwise_of.h"
#undef T
#undef OF

#define ENTRIES(dtype)                                                                   \
    {"depthwise_" #dtype, depthwise_##dtype, NULL},                                      \
        {"depthwise_transpose_" #dtype, depthwise_transpose_##dtype, NULL},              \
        {"depthwise_kernel_vjp_" #dtype, depthwise_kernel_vjp_##dtype, NULL}

const KernelEntry TARGETED(depthwise_kernels)[] = {ENTRIES(f32), ENTRIES(f64), {NULL, NULL, NULL}};
