/* mlvm.h: host functions in C. It needs only C99 (or C++) and the standard headers.
 *
 * A function receives a frame: parameters, attributes, and callbacks to create and push results. It
 * returns 0, or anything else for an error. A shared library lists functions with MLVM_FUNCTIONS,
 * and `vm.register_library(path)` puts them into a VM's function table:
 *
 *     static int twice(mlvm_frame *frame)
 *     {
 *         const mlvm_tensor *x = &frame->params[0].tensor;
 *         mlvm_tensor *y;
 *         int64_t i;
 *         if (frame->params[0].kind != MLVM_TENSOR || x->dtype != MLVM_I64)
 *             return frame->error(frame, "takes an i64 tensor");
 *         y = frame->new_tensor(frame, x->dtype, x->ndim, x->shape);
 *         if (y == NULL)
 *             return 1;
 *         for (i = 0; i < x->size; i++)
 *             ((int64_t *)y->data)[i] = 2 * ((const int64_t *)x->data)[i];
 *         return frame->push(frame, y);
 *     }
 *
 *     MLVM_FUNCTIONS({"twice", twice, 1, 1});
 *
 * Parameters are read, never written. The VM owns all memory to which a frame or tensor points,
 * which is valid until the function returns. The GIL is released while a function runs; a callback
 * takes it if it needs it, and any thread of the call may use callbacks. A function called from
 * several VMs runs in several threads simultaneously.
 */
#ifndef MLVM_H
#define MLVM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Incremented for every change of a struct, a code or a meaning below. */
#define MLVM_ABI_VERSION 3

/* Values of `dtype`: X(name, code) for each dtype. A bool is one byte, 0 or 1. C64 is two floats, the
 * real part and then the imaginary part, C128 two doubles. F16 is IEEE 754 binary16, BF16 the upper half
 * of a float. I4 and the following types are for storage only. F8E4M3 and F8E5M2 need one byte per element. The other
 * storage types pack two or four elements into a byte, the first in the lowest bits. */
/* clang-format off */
#define MLVM_DTYPES(X)                                                                   \
    X(BOOL, 0) X(U8, 1) X(I8, 2) X(I16, 3) X(I32, 4) X(I64, 5) X(U16, 6) X(U32, 7)       \
    X(U64, 8) X(F32, 9) X(F64, 10) X(C64, 11) X(C128, 12) X(F16, 13) X(BF16, 14)      \
    X(I4, 15) X(U4, 16) X(I2, 17) X(U2, 18) X(F8E4M3, 19) X(F8E5M2, 20) X(F4E2M1, 21)
/* clang-format on */
#define MLVM_DTYPE_(name, code) MLVM_##name = code,
enum mlvm_dtype { MLVM_DTYPES(MLVM_DTYPE_) };

/* Packed elements in row-major order. `size` counts elements, `nbytes` bytes. */
typedef struct mlvm_tensor {
    void *data;
    int64_t nbytes;
    int64_t size;
    const int64_t *shape; /* ndim lengths */
    int32_t dtype;        /* an mlvm_dtype */
    int32_t ndim;         /* 0 to 64 */
} mlvm_tensor;

/* Codes of `kind`: which other member of a value is set. */
enum mlvm_kind { MLVM_TENSOR = 0, MLVM_INT = 1, MLVM_STR = 2 };

/* A value on the machine's stack. */
typedef struct mlvm_value {
    mlvm_tensor tensor;
    int64_t integer;
    const char *string; /* UTF-8 */
    int32_t kind;       /* an mlvm_kind */
} mlvm_value;

/* Interface of a function to the machine. If a callback fails, the call fails with the first failure's
 * message, whatever the function returns. */
typedef struct mlvm_frame mlvm_frame;
struct mlvm_frame {
    int64_t nparams;
    const mlvm_value *params;

    /* The call's attributes as a JSON object, "{}" if there are none. */
    const char *attributes;

    /* Set *value to the attribute of that name, a number or bool; leave it unchanged if there is none.
     * Returns 0, or 1 if the attribute is something else. */
    int (*number)(mlvm_frame *frame, const char *name, double *value);

    /* Create a tensor of zeros, aligned to 64 bytes. It becomes a result when it is pushed; otherwise it
     * is freed when the function returns. NULL for an invalid type, or without memory. */
    mlvm_tensor *(*new_tensor)(mlvm_frame *frame, int32_t dtype, int32_t ndim, const int64_t *shape);

    /* Push a result: a new tensor, or the tensor of a parameter. Returns 0, or 1 for any other pointer.
     * Do not write to a tensor after it is pushed. */
    int (*push)(mlvm_frame *frame, const mlvm_tensor *tensor);
    int (*push_int)(mlvm_frame *frame, int64_t value);
    int (*push_str)(mlvm_frame *frame, const char *value); /* UTF-8, copied */

    /* Make the call fail with this message, which is copied. Returns 1. */
    int (*error)(mlvm_frame *frame, const char *message);
};

typedef int (*mlvm_function)(mlvm_frame *frame);

/* A function of a library: the name in the function table, and the numbers of parameters and
 * results, MLVM_ANY for any number. The VM checks every call. */
#define MLVM_ANY (-1)
typedef struct mlvm_entry {
    const char *name;
    mlvm_function function;
    int32_t nparams;
    int32_t nresults;
} mlvm_entry;

#if defined(_WIN32)
#define MLVM_EXPORT __declspec(dllexport)
#elif defined(__GNUC__)
#define MLVM_EXPORT __attribute__((visibility("default")))
#else
#define MLVM_EXPORT
#endif

/* The two symbols that the VM loads. The last entry of the table has no name. */
extern MLVM_EXPORT const int32_t mlvm_abi_version;
extern MLVM_EXPORT const mlvm_entry mlvm_functions[];

/* Define both, once in a library: MLVM_FUNCTIONS({"f", f, 1, 1}, {"g", g, 2, MLVM_ANY}); */
#define MLVM_FUNCTIONS(...)                            \
    const int32_t mlvm_abi_version = MLVM_ABI_VERSION; \
    const mlvm_entry mlvm_functions[] = {__VA_ARGS__, {NULL, NULL, 0, 0}}

#ifdef __cplusplus
}
#endif

#endif
