/* Kernel calls and pools as Python has them. */
#ifndef MLVM_CALL_H
#define MLVM_CALL_H

#include "../limited_api.h"
#include "../plan/plan.h"
#include "../plan/pool.h"

/* Nanoseconds of work from which on other Python threads may run meanwhile. */
#define WORTH_RELEASING 20000.0

typedef struct {
    PyObject_HEAD KernelCall call;
    int64_t *ints;
    double *floats;
    PyObject *parts; /* a tuple that keeps the children */
    const KernelCall **children;
    const RowEntry **rows;
    int64_t *patches; /* pairs of a slot and the number of a formula */
    Py_ssize_t nints, nfloats, nrows, npatches;
} KernelCallObject;

/* Slots of patches: integers by their number, and these; then floats, downwards. */
enum { UNITS = -1, WORK = -2, SCRATCH = -3, SHARED = -4, FLOATS = -5 };

typedef struct {
    PyObject_HEAD Pool *pool;
    int busy; /* the process in which a call runs without the interpreter lock, or 0 */
} PoolObject;

int is_kernel_call(PyObject *object);
int is_pool(PyObject *object);

/* Run a call, without the interpreter lock if it takes long. Returns what the kernel returns, or -1
 * with an exception set. `p` is as `pool_run` takes it. */
int run_in_pool(PoolObject *pool, const KernelCall *call, char **p);

/* Add what this file has to the module. Returns 0, or -1 with an exception set. */
int call_init(PyObject *module);

#endif
