/* Values on the native machine's stack: tensors, integers, and other Python objects. */
#ifndef MLVM_VALUE_H
#define MLVM_VALUE_H

#include "../limited_api.h"

#include "../../../mlvm.h"
#include "../plan/loop.h"

#include <stdatomic.h>

/* A TensorType for the loop. */
typedef struct {
    PyObject_HEAD PyObject *tensor_type;
    Type type;
} TypeObject;

static inline TypeObject *object_of_type(const Type *type)
{
    return (TypeObject *)((char *)type - offsetof(TypeObject, type));
}

#define MOST_RECENT 64

/* Cache of the types of a program. */
typedef struct {
    PyObject *keepalive;                       /* a dict */
    _Atomic(TypeObject *) recent[MOST_RECENT]; /* recently used types, indexed by hash */
} Types;

/* An OBJECT on the loop's stack is a str, or an int of more than 64 bits. */

/* Initialize. Return 0, or -1 with an exception set. */
int types_init(Types *types);
void types_clear(Types *types);

/* Number of types that are kept although no value uses them. */
enum { MOST_KEPT = 1024 };

/* Release all types; no value may use them. */
void types_forget(Types *types);
Py_ssize_t types_count(const Types *types);

/* Keep the type alive. The interpreter lock must be held. Return 0, or -1 with an exception set. */
int types_keep(Types *types, PyObject *type);

/* Return the type with that dtype and shape, or NULL if it is not cached. */
TypeObject *types_find(const Types *types, int dtype, int ndim, const int64_t *shape);

/* Return the type of an array, or NULL if it is not cached. */
TypeObject *types_of_array(const Types *types, PyObject *array);

/* Limit the bytes of tensors that this thread may allocate, minus freed bytes; < 0: no limit. */
void limit_made(int64_t most);

/* Return the bytes allocated in this thread since, minus freed bytes; 0 without a limit. */
int64_t get_made(void);

/* Whether there is a limit. */
int is_limited(void);

/* Count allocated bytes; return whether the limit allows them. Negative numbers free bytes. */
int count_made(int64_t nbytes);

/* Allocate a tensor, uninitialized or zeroed; NULL if memory is exhausted, or beyond the limit. */
Tensor *tensor_new(const Type *type);
Tensor *tensor_zeros(const Type *type);

/* Return the tensor of a packed array, and keep the array alive. NULL with an exception set. */
Tensor *tensor_of(PyObject *array, TypeObject *type);

/* As `tensor_of`, in the caller's memory; the caller keeps the array alive. Return 0, or -1 with an
 * exception. */
int tensor_lend(Tensor *tensor, PyObject *array, TypeObject *type);

/* The tensor as an array: a new reference, or NULL with an exception set. */
PyObject *tensor_array(Tensor *tensor);

/* Free a tensor without references. If it has an array, the interpreter lock must be held. */
void tensor_free(Tensor *tensor);

int is_type(PyObject *object);

/* Convert a Python object to a value, a new reference. `helper` has a method `type_of` that
 * returns the Type of an array, which the types keep. Return 0, or -1 with an exception set. */
int value_of(Types *types, PyObject *helper, PyObject *object, Value *value);

/* Convert a value to a Python object: a new reference, or NULL with an exception set. */
PyObject *object_of_value(Value value);

/* Convert values to a list of Python objects: a new reference, or NULL with an exception set. */
PyObject *list_of_values(const Value *values, int64_t count);

/* Release a value. The interpreter lock must be held. */
void drop_value(Value value);

/* Register this file in the module. Return 0, or -1 with an exception set. */
int value_init(PyObject *module);

#endif
