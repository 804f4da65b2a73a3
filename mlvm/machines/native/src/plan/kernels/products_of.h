/* Includes the parts of products for the dtype DT. */
#define OF(name) MLVM_JOIN(name, DT)
#include "vector_of.h"

#include "tile.h"

#include "take.h"

#include "gemm.h"
#undef OF
#undef DT
#undef T
#undef S
#undef HALVES
#undef PACK
