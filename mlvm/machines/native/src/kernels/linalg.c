/* Matrix products. */
#include "../plan.h"

const KernelEntry TARGETED(linalg_kernels)[] = {{NULL, NULL, NULL}};
