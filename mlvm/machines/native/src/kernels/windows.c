/* Sliding windows over images, and pooling. */
#include "../plan.h"

const KernelEntry TARGETED(windows_kernels)[] = {{NULL, NULL, NULL}};
