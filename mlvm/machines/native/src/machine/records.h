/* Stack of residuals of a VM: see mlvm/machines/residuals.py. */
#ifndef MLVM_RECORD_STACK_H
#define MLVM_RECORD_STACK_H

#include "../limited_api.h"

/* Register this file in the module. Return 0, or -1 with an exception set. */
int records_init(PyObject *module);

#endif
