/* What lies on the native machine's stack: tensors, integers, and other Python objects. */
#ifndef MLVM_VALUE_H
#define MLVM_VALUE_H

#include "../limited_api.h"

#include "../../../mlvm.h"
#include "../plan/loop.h"

#include <stdatomic.h>

/* A TensorType, as the loop sees it. */
typedef struct {
    PyObject_HEAD PyObject *tensor_type;
    Type type;
} TypeObject;

static inline TypeObject *object_of_type(const Type *type)
{
    return (TypeObject *)((char *)type - offsetof(TypeObject, type));
}

#define MOST_RECENT 64

/* The types that a program has met, and keeps. */
typedef struct {
    PyObject *keepalive;                       /* a dict */
    _Atomic(TypeObject *) recent[MOST_RECENT]; /* some of them, each in the place that its hash says */
} Types;

/* An OBJECT on the loop's stack is a str, or an int of more than 64 bits. */

/* Returns 0, or -1 with an exception set. */
int types_init(Types *types);
void types_clear(Types *types);

/* As many are kept while no value of them is left. */
enum { MOST_KEPT = 1024 };

/* Keep none of those met so far: no value of them is left. */
void types_forget(Types *types);
Py_ssize_t types_count(const Types *types);

/* Keep the type. The lock must be held. Returns 0, or -1 with an exception set. */
int types_keep(Types *types, PyObject *type);

/* The type of that dtype and shape, or NULL if it is not at hand. */
TypeObject *types_find(const Types *types, int dtype, int ndim, const int64_t *shape);

/* The type of an array, or NULL if it is not at hand. */
TypeObject *types_of_array(const Types *types, PyObject *array);

/* From now on this thread may make so many bytes of tensors, less those it frees; < 0: any number. */
void limit_made(int64_t most);

/* The bytes of tensors made in this thread since, and not freed; 0 without a limit. */
int64_t get_made(void);

/* Whether there is a limit. */
int is_limited(void);

/* Count so many bytes as made; whether there may be as many. Negative ones are given back. */
int count_made(int64_t nbytes);

/* A tensor with memory of its own, its elements undefined or zero; NULL if there is none, or none
 * within the limit. */
Tensor *tensor_new(const Type *type);
Tensor *tensor_zeros(const Type *type);

/* The tensor of a packed array, which it keeps. NULL with an exception set. */
Tensor *tensor_of(PyObject *array, TypeObject *type);

/* The same in memory of the caller's, who keeps the array. Returns 0, or -1 with an exception. */
int tensor_lend(Tensor *tensor, PyObject *array, TypeObject *type);

/* The tensor as an array: a new reference, or NULL with an exception set. */
PyObject *tensor_array(Tensor *tensor);

/* Give up the last reference. One that has an array needs the interpreter lock. */
void tensor_free(Tensor *tensor);

int is_type(PyObject *object);

/* The value that Python has as this object: a new reference. `asked` is an object whose method `type_of`
 * has the Type of an array, which the types keep. Returns 0, or -1 with an exception set. */
int value_of(Types *types, PyObject *helper, PyObject *object, Value *value);

/* The value as Python has it: a new reference, or NULL with an exception set. */
PyObject *object_of_value(Value value);

/* Give up a value. The lock must be held. */
void drop_value(Value value);

/* Add what this file has to the module. Returns 0, or -1 with an exception set. */
int value_init(PyObject *module);

#endif
