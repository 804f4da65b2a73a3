/* Search for offsets of buffers, for Python.
 *
 * In:       packed arrays of 64-bit integers; see offsets.h of `plan`.
 * Out:      the status and the number of visited nodes; offsets and failed states are written in place.
 * Must hold: arrays have the announced lengths, and each thread searches with separate arrays.
 * Callers:  `mlvm/arena/search.py` and `planner.py`.
 */
#include "offsets.h"

#include "../plan/offsets.h"

/* Return whether a signal handler has raised an error. Only the main thread runs handlers. */
static int interrupted(void *state)
{
    PyThreadState **thread = state;
    PyEval_RestoreThread(*thread);
    int failed = PyErr_CheckSignals();
    *thread = PyEval_SaveThread();
    return failed != 0;
}

static PyObject *py_search_offsets(PyObject *module, PyObject *args)
{
    (void)module;
    Buffers buffers = {0};
    PyObject *array[8];
    char *address[8];
    long long count, sections, capacity, nodes;
    int bits;
    if (!PyArg_ParseTuple(args, "OOOOOOOOLLLLip", &array[0], &array[1], &array[2], &array[3], &array[4],
                          &array[5], &array[6], &array[7], &count, &sections, &capacity, &nodes, &bits,
                          &buffers.fewest))
        return NULL;
    for (int i = 0; i < 8; i++)
        if (address_of(array[i], &address[i], NULL))
            return NULL;
    buffers.size = (const int64_t *)address[0];
    buffers.first = (const int64_t *)address[1];
    buffers.last = (const int64_t *)address[2];
    buffers.twin = (const int64_t *)address[3];
    buffers.hash = (const uint64_t *)address[4];
    buffers.rank = (const int64_t *)address[5];
    buffers.failed = (uint64_t *)address[6];
    buffers.offset = (int64_t *)address[7];
    buffers.count = count;
    buffers.sections = sections;
    buffers.capacity = capacity;
    buffers.nodes = nodes;
    buffers.shift = 64 - bits;
    PyThreadState *thread = PyEval_SaveThread();
    buffers.interrupted = interrupted;
    buffers.state = &thread;
    int status = search_offsets(&buffers);
    PyEval_RestoreThread(thread);
    if (status == OFFSETS_INTERRUPTED)
        return NULL;
    if (status == OFFSETS_NO_MEMORY)
        return PyErr_NoMemory();
    return Py_BuildValue("iL", status, nodes - (long long)buffers.nodes);
}

static PyObject *py_place_best_fit(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array[5];
    char *address[5];
    long long count;
    if (!PyArg_ParseTuple(args, "LOOOOO", &count, &array[0], &array[1], &array[2], &array[3], &array[4]))
        return NULL;
    for (int i = 0; i < 5; i++)
        if (address_of(array[i], &address[i], NULL))
            return NULL;
    int failed;
    Py_BEGIN_ALLOW_THREADS;
    failed = place_best_fit(count, (const int64_t *)address[0], (const int64_t *)address[1],
                            (const int64_t *)address[2], (const int64_t *)address[3],
                            (int64_t *)address[4]);
    Py_END_ALLOW_THREADS;
    return failed ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyMethodDef functions[] = {
    {"search_offsets", py_search_offsets, METH_VARARGS, "Search for offsets; see mlvm/arena/search.py."},
    {"place_best_fit", py_place_best_fit, METH_VARARGS, "Place blocks; see mlvm/arena/planner.py."},
    {NULL, NULL, 0, NULL}};

int offsets_init(PyObject *module)
{
    return PyModule_AddFunctions(module, functions);
}
