/* Kernel calls and pools as Python has them. */
#ifndef MLVM_CALL_H
#define MLVM_CALL_H

#include "../limited_api.h"
#include "../plan/plan.h"
#include "../plan/pool.h"

enum { MOST_PARAMETERS = 256 };

/* Nanoseconds of work from which on other Python threads may run meanwhile. */
#define WORTH_RELEASING 20000.0

typedef struct {
    PyObject_HEAD
    Plan plan;
    const char *name;
    int64_t *ints;
    double *floats;
    PyObject *parts; /* a tuple that keeps the children */
    const Plan **children;
} PlanObject;

typedef struct {
    PyObject_HEAD
    Pool *pool;
    int busy; /* while a plan runs without the interpreter lock */
} PoolObject;

int is_plan(PyObject *object);
int is_pool(PyObject *object);

/* Run a plan, without the interpreter lock if it takes long. Returns what the kernel returns, or -1
 * with an exception set. `p` is as `pool_run` takes it. */
int run_in_pool(PoolObject *pool, const Plan *plan, char **p);

/* Add what this file has to the module. Returns 0, or -1 with an exception set. */
int call_init(PyObject *module);

#endif
