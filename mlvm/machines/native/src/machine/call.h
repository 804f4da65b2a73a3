/* Kernel calls and pools as Python objects. */
#ifndef MLVM_CALL_H
#define MLVM_CALL_H

#include "../limited_api.h"
#include "../plan/machine_code.h"
#include "../plan/pool.h"

/* Estimated nanoseconds from which the interpreter lock is released during a call. */
#define WORTH_RELEASING 20000.0

typedef struct {
    PyObject_HEAD KernelCall call;
    int64_t *ints;
    double *floats;
    PyObject *parts; /* tuple that keeps the children alive */
    const KernelCall **children;
    const RowEntry **rows;
    MachineCode code;
    int64_t *patches; /* pairs of a slot and a formula number */
    Py_ssize_t nints, nfloats, nrows, npatches;
} KernelCallObject;

/* Slots of patches: integers by index, these special slots, then floats in descending order. */
enum { UNITS = -1, WORK = -2, SCRATCH = -3, SHARED = -4, FLOATS = -5 };

typedef struct {
    PyObject_HEAD Pool *pool;
    int busy; /* process in which a call runs without the interpreter lock, or 0 */
} PoolObject;

int is_kernel_call(PyObject *object);
int is_pool(PyObject *object);

/* Run a call, without the interpreter lock if it is long. Return the kernel's result, or -1 with
 * an exception set. `p` is as in `pool_run`. */
int run_in_pool(PoolObject *pool, const KernelCall *call, char **p);

/* Register this file in the module. Return 0, or -1 with an exception set. */
int call_init(PyObject *module);

#endif
