/* Accumulators of a tensor's digest, for Python.
 *
 * In: the bytes of a packed array, and the class of the elements.
 * Out:      eight 64-bit sums, as mlvm/machines/digest.py defines them.
 * Callers:  `mlvm/machines/digest.py`, from any thread.
 */
#include "digest.h"

#include <stdint.h>
#include <string.h>

enum { LANES = 8, BLOCK = 512 }; /* 64-bit words */

static uint64_t keys[BLOCK];

static void fill_keys(void)
{
    for (uint64_t i = 0; i < BLOCK; i++) { /* splitmix64 */
        uint64_t z = (i + 1) * 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        keys[i] = z ^ z >> 31;
    }
}

/* Replace each nan by one without sign and payload, so that all nans are equal. */
#define QUIET(type, infinity, nan)                                                       \
    do {                                                                                 \
        type *x = (type *)words;                                                         \
        const type largest = (type)(infinity), magnitude = (type)((type) ~(type)0 >> 1); \
        for (size_t i = 0; i < BLOCK * 8 / sizeof(type); i++)                            \
            x[i] = (type)(x[i] & magnitude) > largest ? (type)(nan) : x[i];              \
    } while (0)

static void quiet_nans(uint64_t *words, int kind)
{
    switch (kind) {
    case 1: QUIET(uint16_t, 0x7C00, 0x7E00); break;
    case 2: QUIET(uint16_t, 0x7F80, 0x7FC0); break;
    case 3: QUIET(uint32_t, 0x7F800000, 0x7FC00000); break;
    case 4: QUIET(uint64_t, 0x7FF0000000000000, 0x7FF8000000000000); break;
    default: break;
    }
}

static void accumulate(const char *data, size_t nbytes, int kind, uint64_t sums[LANES])
{
    uint64_t words[BLOCK] = {0};
    while (nbytes) {
        size_t present = nbytes < sizeof words ? nbytes : sizeof words;
        size_t count = (present + 63) / 64 * LANES;
        memcpy(words, data, present);
        memset((char *)words + present, 0, count * 8 - present);
        quiet_nans(words, kind);
        for (size_t i = 0; i < count; i += LANES)
            for (size_t j = 0; j < LANES; j++) {
                uint64_t mixed = words[i + j] ^ keys[i + j];
                sums[j] += words[i + (j ^ 1)] + (mixed & 0xFFFFFFFFu) * (mixed >> 32);
            }
        for (size_t j = 0; j < LANES; j++)
            sums[j] = (sums[j] ^ sums[j] >> 47) * 0x9E3779B185EBCA87u;
        data += present;
        nbytes -= present;
    }
}

static PyObject *py_accumulate(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *array;
    char *data;
    long long nbytes;
    int kind;
    uint64_t sums[LANES] = {0};
    if (!PyArg_ParseTuple(args, "OLi", &array, &nbytes, &kind) || address_of(array, &data, NULL))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    accumulate(data, (size_t)nbytes, kind, sums);
    Py_END_ALLOW_THREADS;
    return PyBytes_FromStringAndSize((const char *)sums, sizeof sums);
}

static PyMethodDef functions[] = {
    {"accumulate", py_accumulate, METH_VARARGS, "Accumulators of a digest; see mlvm/machines/digest.py."},
    {NULL, NULL, 0, NULL}};

int digest_init(PyObject *module)
{
    fill_keys();
    return PyModule_AddFunctions(module, functions);
}
