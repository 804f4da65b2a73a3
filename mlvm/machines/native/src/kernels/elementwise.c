/* Row functions of the elementwise ops, for every dtype. */
#include "../plan.h"

const RowEntry TARGETED(elementwise_rows)[] = {{NULL, NULL}};
