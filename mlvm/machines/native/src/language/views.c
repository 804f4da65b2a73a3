/* Views, and reads and writes of a few elements, without a launch.
 *
 * In:        `alias(call, x, type)`; x[key] and x[key] = values with integers, slices, None and `...`;
 *            x[mask]; `scalar(x)`.
 * Out:       a view, a copy of the selected elements, an updated tensor, a Python number; or the
 *            result of the Python function that defines the call: `alias_in_python` in tensor/apply.py,
 *            `getitem` and `setitem` in functions/indexing.py. It is called before any side effect.
 * Must hold: plain tensors on one native VM without instruments, no recorder in any thread, and at most
 *            MOST_COPIED bytes. Larger copies are launches, which share the work among threads.
 * Callers:   eager functions; the interpreter, by the slots of `AllocationFields`.
 * Locks:     the interpreter lock throughout; the VM's lock while elements are copied, because a launch of
 *            a different thread may write them. All addresses are looked up again under the lock.
 */
#include "views.h"

#include "../plan/kernels/elements.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum { MOST_COPIED = 1 << 18, REMEMBERED = 1024, MOST_LISTED = 128 };

/* Positions along an axis. */
typedef struct {
    int64_t start, length, step;
} Span;

/* Caches of types by address, and by dtype and shape: the last type for each hash, with a reference. The entries by shape
 * have no size, itemsize and kind. */
static Layout by_type[REMEMBERED], by_shape[REMEMBERED];

#define OBJECTS(EACH) \
    EACH(slow_alias)  \
    EACH(slow_getitem) EACH(slow_setitem) EACH(slow_operand) EACH(warn_of_lost) EACH(make_type)
OBJECTS(DECLARE_OBJECT)
static const Installed objects[] = TABLE_OF(OBJECTS);
#define NAMES(EACH) EACH(shape) EACH(dtype) EACH(kind) EACH(itemsize) EACH(size) EACH(numpy)
NAMES(DECLARE_NAME)

/* --- types --- */

/* Freeing the old type may run Python, which must find the new type. */
static void replace_layout(Layout *place, const Layout *with)
{
    PyObject *old = place->type;
    Py_INCREF(with->type);
    *place = *with;
    Py_XDECREF(old);
}

static int64_t attribute(PyObject *object, PyObject *name)
{
    PyObject *value = PyObject_GetAttr(object, name);
    int64_t number = value && PyLong_CheckExact(value) ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

static char kind_of(PyObject *dtype, int itemsize)
{
    PyObject *kind = PyObject_GetAttr(dtype, kind_name);
    Py_UCS4 first = kind && PyUnicode_Check(kind) ? PyUnicode_ReadChar(kind, 0) : 0;
    Py_UCS4 second = first == 's' ? PyUnicode_ReadChar(kind, 1) : 0;
    Py_XDECREF(kind);
    if (first == 's') /* the kind begins with s: signed or storage */
        return second == 'i' ? 'i' : 0;
    return first == 'f' && itemsize == 2 ? 'h' : (char)first;
}

int layout_of(PyObject *type, Layout *layout)
{
    Layout *place = &by_type[((uintptr_t)type >> 5) % REMEMBERED];
    if (place->type == type) {
        *layout = *place;
        return 1;
    }
    PyObject *shape = PyObject_GetAttr(type, shape_name);
    PyObject *dtype = shape ? PyObject_GetAttr(type, dtype_name) : NULL;
    Py_ssize_t ndim = dtype && PyTuple_CheckExact(shape) ? PyTuple_Size(shape) : MOST_AXES + 1;
    Layout found = {.type = type, .dtype = dtype, .ndim = (int)ndim};
    int fits = ndim <= MOST_AXES;
    for (Py_ssize_t i = 0; fits && i < ndim; i++) {
        PyObject *length = PyTuple_GetItem(shape, i);
        fits = PyLong_CheckExact(length);
        found.dims[i] = fits ? PyLong_AsLongLong(length) : 0;
    }
    if (fits) {
        found.itemsize = (int)attribute(dtype, itemsize_name);
        found.size = attribute(type, size_name);
        found.kind = kind_of(dtype, found.itemsize);
        fits = found.kind && found.itemsize > 0 && found.size >= 0;
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype); /* the type keeps it alive */
    if (!fits || PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    *layout = found;
    replace_layout(place, &found);
    return 1;
}

PyObject *type_of(PyObject *dtype, const int64_t *dims, int ndim)
{
    uint64_t hash = (uintptr_t)dtype >> 4;
    for (int i = 0; i < ndim; i++)
        hash = (hash ^ (uint64_t)dims[i]) * 0x9E3779B97F4A7C15u;
    Layout *place = &by_shape[(hash >> 32) % REMEMBERED];
    if (place->type && place->dtype == dtype && place->ndim == ndim &&
        !memcmp(place->dims, dims, sizeof *dims * (size_t)ndim))
        return Py_NewRef(place->type);
    PyObject *shape = PyTuple_New(ndim);
    for (int i = 0; shape && i < ndim; i++)
        PyTuple_SetItem(shape, i, PyLong_FromLongLong(dims[i]));
    PyObject *type = shape ? PyObject_CallFunctionObjArgs(make_type, dtype, shape, NULL) : NULL;
    Py_XDECREF(shape);
    Layout layout = {.type = type, .dtype = dtype, .ndim = ndim};
    memcpy(layout.dims, dims, sizeof *dims * (size_t)ndim);
    if (type)
        replace_layout(place, &layout);
    else
        PyErr_Clear();
    return type;
}

/* --- tensors --- */

/* The fast path of a tensor that this file handles; NULL for any other. */
static FastPath *plain_path(PyObject *object)
{
    Allocation *x = (Allocation *)object;
    if (Py_TYPE(object) != tensor_class || !x->type || !x->arena)
        return NULL;
    FastPath *fast_path = fast_path_of(x->arena);
    return fast_path && is_unwatched(fast_path) && is_alive(x) ? fast_path : NULL;
}

PyObject *view_as(Allocation *x, PyObject *type)
{
    Layout from, to;
    if (!is_quiet() || !plain_path((PyObject *)x) || !layout_of(x->type, &from) || !layout_of(type, &to) ||
        from.size * from.itemsize != to.size * to.itemsize)
        return NULL;
    Allocation *root = root_of(x);
    Region *region = region_of(root);
    PyObject *handle = region && region->handles ? PyDict_GetItemWithError(region->handles, type) : NULL;
    Allocation *out = handle || (region && region->address) ? (Allocation *)object_of(tensor_class) : NULL;
    if (!out) {
        PyErr_Clear();
        return NULL;
    }
    if (root->region !=
        (PyObject *)region) { /* creating an object may collect garbage, which runs Python */
        Py_DECREF((PyObject *)out);
        return NULL;
    }
    out->region = Py_NewRef(Py_None);
    out->arena = Py_NewRef(x->arena);
    out->type = Py_NewRef(type);
    out->base = Py_NewRef((PyObject *)root);
    out->handle = Py_XNewRef(handle);
    out->tape = Py_NewRef(Py_None);
    out->is_part = Py_NewRef(Py_True);
    link_view(region, out);
    return (PyObject *)out;
}

/* alias(call, x, type), which `alias_in_python` defines. */
static PyObject *alias(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3)
        return PyErr_Format(PyExc_TypeError, "alias: expected 3 arguments, got %zd", nargs);
    int is_plain = Py_TYPE(args[1]) == tensor_class && is_call(args[0]);
    PyObject *out = is_plain ? view_as((Allocation *)args[1], args[2]) : NULL;
    if (out) {
        Allocation *const operands[] = {(Allocation *)args[1]};
        if (record_call(args[0], fast_path_of(operands[0]->arena), operands, 1, (Allocation *)out))
            Py_CLEAR(out);
    } else if (!clear_nonfatal_error()) {
        out = PyObject_CallFunctionObjArgs(slow_alias, args[0], args[1], args[2], NULL);
    }
    if (out && later.is_recording())
        later.note_step(ALIAS, args[0], args[2], args + 1, 1, out);
    return out;
}

/* view_as(x, type): a view that no tape tracks, or None if Python must create it. */
static PyObject *view_as_python(PyObject *module, PyObject *args)
{
    PyObject *x, *type, *view = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:view_as", &x, &type))
        return NULL;
    if (Py_TYPE(x) == tensor_class && !(view = view_as((Allocation *)x, type)) && clear_nonfatal_error())
        return NULL;
    if (view && later.is_recording())
        later.note_step(ALIAS, NULL, type, &x, 1, view);
    return view ? view : Py_NewRef(Py_None);
}

/* --- keys --- */

/* Resolve a key of integers, slices, None and `...` against the axes of a tensor: a span for each axis, and
 * the shape of the result. `places`: the axis of the result that each axis becomes, -1 for none. Returns the number
 * of axes of the result; -1 for any other key, and for errors. */
static int resolve_key(PyObject *key, const Layout *x, Span *spans, int64_t *dims, int *places)
{
    PyObject *const single[] = {key};
    Py_ssize_t nitems = PyTuple_CheckExact(key) ? PyTuple_Size(key) : 1, indices = 0;
    for (Py_ssize_t i = 0; i < nitems; i++) {
        PyObject *item = PyTuple_CheckExact(key) ? PyTuple_GetItem(key, i) : single[0];
        indices += item != Py_None && item != Py_Ellipsis;
    }
    int axis = 0, ndim = 0, ellipsis = 0;
    if (indices > x->ndim || nitems > MOST_AXES)
        return -1;
    for (Py_ssize_t i = 0; i <= nitems; i++) {
        PyObject *item = i == nitems               ? Py_Ellipsis
                         : PyTuple_CheckExact(key) ? PyTuple_GetItem(key, i)
                                                   : single[0];
        if (item == Py_Ellipsis) {
            if (i < nitems && ellipsis++)
                return -1;
            Py_ssize_t missing = i == nitems ? x->ndim - axis : x->ndim - indices;
            for (; missing > 0; missing--, axis++) {
                if (ndim == MOST_AXES)
                    return -1;
                spans[axis] = (Span){0, x->dims[axis], 1};
                places[axis] = ndim;
                dims[ndim++] = x->dims[axis];
            }
            continue;
        }
        if (item != Py_None && !PyLong_CheckExact(item) && Py_TYPE(item) != &PySlice_Type)
            return -1;
        if (PyLong_CheckExact(item)) {
            int64_t index = PyLong_AsLongLong(item), length = x->dims[axis];
            if (index == -1 && PyErr_Occurred())
                return PyErr_Clear(), -1;
            if (index < -length || index >= length)
                return -1;
            places[axis] = -1;
            spans[axis++] = (Span){index < 0 ? index + length : index, 1, 1};
            continue;
        }
        if (ndim == MOST_AXES)
            return -1;
        if (item == Py_None) {
            dims[ndim++] = 1;
            continue;
        }
        Py_ssize_t start, stop, step;
        /* The first call refuses bounds whose class has a method __index__, which Python calls once. */
        if (PySlice_GetIndices(item, PY_SSIZE_T_MAX, &start, &stop, &step) || PyErr_Occurred() ||
            PySlice_Unpack(item, &start, &stop, &step))
            return PyErr_Clear(), -1;
        Py_ssize_t length = PySlice_AdjustIndices((Py_ssize_t)x->dims[axis], &start, &stop, step);
        places[axis] = ndim;
        spans[axis++] = (Span){start, length, length > 1 ? step : 1};
        dims[ndim++] = length;
    }
    return ndim;
}

static int selects_all(const Layout *x, const Span *spans)
{
    for (int i = 0; i < x->ndim; i++)
        if (spans[i].length != x->dims[i] || (x->dims[i] && (spans[i].start || spans[i].step != 1)))
            return 0;
    return 1;
}

/* --- copies --- */

/* Copy the elements of a box from one strided array to another; strides and sizes are in bytes. */
static void copy_box(char *to, const int64_t *to_by, const char *from, const int64_t *from_by,
                     const int64_t *dims, int ndim, int64_t itemsize)
{
    int64_t run = itemsize;
    while (ndim && to_by[ndim - 1] == run && from_by[ndim - 1] == run)
        run *= dims[--ndim];
    if (!ndim) {
        memcpy(to, from, (size_t)run);
        return;
    }
    int64_t n = dims[ndim - 1], out = to_by[ndim - 1], in = from_by[ndim - 1];
    if (ndim > 1) {
        for (int64_t i = 0; i < dims[0]; i++)
            copy_box(to + i * to_by[0], to_by + 1, from + i * from_by[0], from_by + 1, dims + 1, ndim - 1,
                     run);
    } else if (run == 4) {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * out, from + i * in, 4);
    } else if (run == 8) {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * out, from + i * in, 8);
    } else {
        for (int64_t i = 0; i < n; i++)
            memcpy(to + i * out, from + i * in, (size_t)run);
    }
}

static void packed_strides(const int64_t *dims, int ndim, int64_t itemsize, int64_t *strides)
{
    for (int i = ndim; i-- > 0; itemsize *= dims[i])
        strides[i] = itemsize;
}

/* Compute the strides of a selection of x; return the offset of its first element. */
static int64_t window_of(const Layout *x, const Span *spans, int64_t *strides)
{
    int64_t offset = 0;
    packed_strides(x->dims, x->ndim, x->itemsize, strides);
    for (int i = 0; i < x->ndim; i++) {
        offset += spans[i].start * strides[i];
        strides[i] *= spans[i].step;
    }
    return offset;
}

/* Create a tensor in an arena of the VM, which is locked until `release_lock`: `*to` is the first
 * byte of the tensor, and `*from` the first byte of x, which may be NULL. NULL without the lock if
 * Python must do the caller's work; an exception may be set. */
static Allocation *locked_tensor(FastPath *fast_path, PyObject *arena, PyObject *type, const Allocation *x,
                                 char **to, char **from)
{
    Allocation *out = arena && fast_path_of(arena) == fast_path ? tensor_in(arena, type) : NULL;
    if (out && (!x || address_in(fast_path, x, 1)) && address_in(fast_path, out, 1) &&
        !acquire_lock(fast_path->lock)) {
        *to = address_in(fast_path, out, 0);
        *from = x ? address_in(fast_path, x, 0) : NULL;
        if (*to && (!x || *from) && !fast_path->observed && !fast_path->instrumented)
            return out;
        release_lock(fast_path->lock);
    }
    Py_XDECREF((PyObject *)out);
    return NULL;
}

/* Return the tensor to Python, or None if Python must create it, which then raises any error. */
static PyObject *tensor_or_none(void *out)
{
    return out || clear_nonfatal_error() ? out : Py_NewRef(Py_None);
}

/* Return whether a tape tracks x; -1 with an exception set. */
static int is_tracked(const Allocation *x)
{
    if (!x->tape || x->tape == Py_None)
        return 0;
    PyObject *tape = present_tape();
    int answer = tape ? tape == x->tape : -1;
    Py_XDECREF(tape);
    return answer;
}

/* Return a copy of a selection, or a view if it is all of x. NULL with no exception set for the slow
 * path. */
static PyObject *selected(Allocation *x, PyObject *key)
{
    Layout layout;
    Span spans[MOST_AXES];
    int64_t dims[MOST_AXES], from[MOST_AXES], into[MOST_AXES], lengths[MOST_AXES];
    int places[MOST_AXES];
    FastPath *fast_path = is_quiet() ? plain_path((PyObject *)x) : NULL;
    if (!fast_path || is_tracked(x) || !layout_of(x->type, &layout))
        return NULL;
    int ndim = resolve_key(key, &layout, spans, dims, places);
    PyObject *type = ndim < 0 ? NULL : type_of(layout.dtype, dims, ndim);
    if (!type)
        return NULL;
    PyObject *result = NULL;
    int64_t nbytes = layout.itemsize, offset = window_of(&layout, spans, from);
    for (int i = 0; i < layout.ndim; i++)
        nbytes *= lengths[i] = spans[i].length;
    if (selects_all(&layout, spans)) {
        result = view_as(x, type);
    } else if (nbytes <= MOST_COPIED) {
        char *target, *source;
        PyObject *arena = present_arena();
        result = (PyObject *)locked_tensor(fast_path, arena, type, x, &target, &source);
        if (result) {
            set(&((Allocation *)result)->is_part, Py_True);
            packed_strides(lengths, layout.ndim, layout.itemsize, into);
            if (nbytes)
                copy_box(target, into, source + offset, from, lengths, layout.ndim, layout.itemsize);
            release_lock(fast_path->lock);
        }
        Py_XDECREF(arena);
    }
    Py_DECREF(type);
    return result;
}

/* Return the rows of x where the mask is True. NULL with no exception set for the slow path. */
static PyObject *chosen(Allocation *x, Allocation *mask)
{
    Layout layout, covers;
    FastPath *fast_path = is_quiet() ? plain_path((PyObject *)x) : NULL;
    if (!fast_path || plain_path((PyObject *)mask) != fast_path || is_tracked(x) ||
        !layout_of(mask->type, &covers) || covers.kind != 'b' || !layout_of(x->type, &layout) ||
        layout.size * layout.itemsize > MOST_COPIED || covers.ndim > layout.ndim ||
        memcmp(covers.dims, layout.dims, sizeof *layout.dims * (size_t)covers.ndim) || !covers.size ||
        !address_in(fast_path, mask, 1) || acquire_lock(fast_path->lock))
        return NULL;
    const char *flags = address_in(fast_path, mask, 0);
    const int64_t count = flags ? count_true(flags, covers.size) : -1;
    release_lock(fast_path->lock);
    int64_t dims[MOST_AXES + 1] = {count}, row = layout.size / covers.size * layout.itemsize;
    int ndim = 1 + layout.ndim - covers.ndim;
    memcpy(dims + 1, layout.dims + covers.ndim, sizeof *dims * (size_t)(ndim - 1));
    PyObject *type = count < 0 || ndim > MOST_AXES ? NULL : type_of(layout.dtype, dims, ndim);
    PyObject *arena = type ? present_arena() : NULL;
    char *to, *in;
    Allocation *out = locked_tensor(fast_path, arena, type, x, &to, &in);
    Py_XDECREF(arena);
    Py_XDECREF(type);
    if (!out)
        return NULL;
    /* Creating the tensor may have run Python, which may have changed the mask. */
    flags = address_in(fast_path, mask, 0);
    int holds = flags && count_true(flags, covers.size) == count;
    if (holds)
        copy_chosen(to, in, flags, covers.size, count, row);
    release_lock(fast_path->lock);
    if (!holds)
        Py_CLEAR(out);
    return (PyObject *)out;
}

/* chosen(x, mask) -> the rows of x where the mask is True; None if Python must choose them. */
static PyObject *chosen_in_python(PyObject *module, PyObject *args)
{
    PyObject *x, *mask;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:chosen", &x, &mask))
        return NULL;
    return tensor_or_none(chosen((Allocation *)x, (Allocation *)mask));
}

/* Set a flag for each element that is not zero. */
static void flag_nonzero(char *flags, const char *p, const Layout *x)
{
    int parts = x->kind == 'c' ? 2 : 1, is_float = x->kind == 'c' || x->kind == 'f' || x->kind == 'h';
    if (x->kind == 'b') {
        memcpy(flags, p, (size_t)x->size);
        return;
    }
    memset(flags, 0, (size_t)x->size);
#define FLAG(T)                                                                        \
    for (int part = 0; part < parts; part++)                                           \
        for (int64_t i = 0; i < x->size; i++) {                                        \
            T bits;                                                                    \
            memcpy(&bits, p + (i * parts + part) * (int64_t)sizeof bits, sizeof bits); \
            flags[i] |= (T)(bits << is_float) != 0; /* -0.0 is 0 */                    \
        }
    switch (x->itemsize / parts) {
    case 1: FLAG(uint8_t) break;
    case 2: FLAG(uint16_t) break;
    case 4: FLAG(uint32_t) break;
    default: FLAG(uint64_t)
    }
#undef FLAG
}

/* positions(dtype, x) -> the positions of the nonzero elements, [count, ndim] of that dtype of 64 bits; None if Python
 * must find them. */
static PyObject *positions(PyObject *module, PyObject *args)
{
    PyObject *object, *dtype;
    Layout x;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:positions", &dtype, &object))
        return NULL;
    FastPath *fast_path = is_quiet() ? plain_path(object) : NULL;
    if (!fast_path || !layout_of(((Allocation *)object)->type, &x) || x.size * x.ndim * 8 > MOST_COPIED ||
        !address_in(fast_path, (Allocation *)object, 1) || acquire_lock(fast_path->lock))
        return tensor_or_none(NULL);
    const char *p = address_in(fast_path, (Allocation *)object, 0);
    char *flags = p ? PyMem_Malloc((size_t)x.size + 1) : NULL, *to, *unused;
    if (flags)
        flag_nonzero(flags, p, &x);
    release_lock(fast_path->lock);
    int64_t dims[2] = {flags ? count_true(flags, x.size) : 0, x.ndim}, at[MOST_AXES] = {0};
    PyObject *type = flags ? type_of(dtype, dims, 2) : NULL, *arena = type ? present_arena() : NULL;
    Allocation *out = locked_tensor(fast_path, arena, type, NULL, &to, &unused);
    const int last = x.ndim - 1;
    for (int64_t i = 0; out && x.ndim && i < x.size; i += x.dims[last]) {
        for (at[last] = 0; at[last] < x.dims[last]; at[last]++)
            if (flags[i + at[last]])
                for (int axis = 0; axis < x.ndim; axis++, to += sizeof *at)
                    memcpy(to, &at[axis], sizeof *at);
        for (int axis = last; axis-- > 0 && ++at[axis] == x.dims[axis];)
            at[axis] = 0;
    }
    if (out)
        release_lock(fast_path->lock);
    PyMem_Free(flags);
    Py_XDECREF(arena);
    Py_XDECREF(type);
    return tensor_or_none(out);
}

/* Call a function of Python, by a template if one exists. */
static PyObject *call_with(PyObject *function, PyObject *const *args, int count)
{
    PyObject *tuple = tuple_of(args, count);
    PyObject *result = tuple ? later.call_composed(function, tuple, NULL) : NULL;
    Py_XDECREF(tuple);
    return result;
}

static PyObject *subscript(PyObject *x, PyObject *key)
{
    if (Py_TYPE(x) != tensor_class || !slow_getitem)
        return PyErr_Format(PyExc_TypeError, "expected a Tensor to subscript, got %R", x);
    int by_mask = Py_TYPE(key) == tensor_class;
    PyObject *result = by_mask ? chosen((Allocation *)x, (Allocation *)key)
                               : selected((Allocation *)x, key);
    if (result && by_mask)
        later.note_opaque(); /* the shape depends on values */
    else if (result && later.is_recording())
        later.note_step(SUBSCRIPT, NULL, key, &x, 1, result);
    if (result || clear_nonfatal_error())
        return result;
    return call_with(slow_getitem, (PyObject *[]){x, key}, 2);
}

/* --- assignments --- */

/* Convert a Python number to an element. Return 0 if Python must convert or reject it. */
static int element_of(PyObject *number, const Layout *x, char *element)
{
    double real;
    long long integer;
    int overflow = 0;
    if (x->kind == 'f' && PyFloat_CheckExact(number)) {
        real = PyFloat_AsDouble(number);
    } else if (PyLong_CheckExact(number)) {
        integer = PyLong_AsLongLongAndOverflow(number, &overflow);
        if (overflow)
            return 0;
        if (x->kind == 'i' && x->itemsize == 8) {
            memcpy(element, &integer, 8);
            return 1;
        }
        if (x->kind == 'i' && x->itemsize == 4 && integer >= INT32_MIN && integer <= INT32_MAX) {
            int32_t small = (int32_t)integer;
            memcpy(element, &small, 4);
            return 1;
        }
        if (x->kind != 'f' || integer < -(1 << 24) || integer > 1 << 24)
            return 0;
        real = (double)integer;
    } else if (x->kind == 'b' && PyBool_Check(number)) {
        *element = number == Py_True;
        return 1;
    } else {
        return 0;
    }
    if (x->itemsize == 8) {
        memcpy(element, &real, 8);
        return 1;
    }
    float single = (float)real;
    memcpy(element, &single, 4);
    return x->itemsize == 4;
}

/* Strides along the axes of x with which `values` broadcasts to a selection: 0 along axes of length
 * 1. Returns 0 if `values` does not broadcast. */
static int broadcast_strides(const Layout *values, const Layout *x, const int *places, const int64_t *dims,
                             int ndim, int64_t *strides)
{
    int64_t own[MOST_AXES], by_result[MOST_AXES] = {0};
    if (values->ndim > ndim)
        return 0;
    packed_strides(values->dims, values->ndim, values->itemsize, own);
    for (int i = 0; i < values->ndim; i++) {
        int at = ndim - values->ndim + i;
        if (values->dims[i] != 1 && values->dims[i] != dims[at])
            return 0;
        by_result[at] = values->dims[i] == 1 ? 0 : own[i];
    }
    for (int i = 0; i < x->ndim; i++)
        strides[i] = places[i] < 0 ? 0 : by_result[places[i]];
    return 1;
}

/* Write values to a selection of x. Returns 1 if that is done, 0 for the slow path; -1 with an exception. */
static int assign(Allocation *x, PyObject *key, PyObject *values)
{
    Layout layout, given;
    Span spans[MOST_AXES];
    int64_t dims[MOST_AXES], from[MOST_AXES] = {0}, into[MOST_AXES], lengths[MOST_AXES];
    char element[16];
    int places[MOST_AXES];
    FastPath *fast_path = is_quiet() ? plain_path((PyObject *)x) : NULL;
    Region *region = region_of(x);
    if (!fast_path || !region || region->first_view || region->watched || PySet_Size(live_tapes) ||
        values == (PyObject *)x || !layout_of(x->type, &layout))
        return 0;
    int ndim = resolve_key(key, &layout, spans, dims, places);
    if (ndim < 0)
        return 0;
    int64_t nbytes = layout.itemsize, offset = window_of(&layout, spans, into);
    for (int i = 0; i < layout.ndim; i++)
        nbytes *= lengths[i] = spans[i].length;
    if (nbytes > MOST_COPIED)
        return 0;
    Allocation *tensor = Py_TYPE(values) == tensor_class ? (Allocation *)values : NULL;
    if (tensor) {
        if (plain_path(values) != fast_path || !layout_of(tensor->type, &given) ||
            given.dtype != layout.dtype || !broadcast_strides(&given, &layout, places, dims, ndim, from))
            return 0;
    } else if (!element_of(values, &layout, element)) {
        return 0;
    }
    PyObject *arena = present_arena();
    int same = arena && fast_path_of(arena) == fast_path;
    Py_XDECREF(arena);
    if (!same || !address_in(fast_path, x, 1) || (tensor && !address_in(fast_path, tensor, 1)) ||
        acquire_lock(fast_path->lock))
        return PyErr_Occurred() ? -1 : 0;
    char *target = address_in(fast_path, x, 0);
    char *source = tensor ? address_in(fast_path, tensor, 0) : element;
    int holds = target && source && !fast_path->observed && !fast_path->instrumented &&
                region_of(x) == region && !region->first_view;
    if (holds && nbytes)
        copy_box(target + offset, into, source, from, lengths, layout.ndim, layout.itemsize);
    release_lock(fast_path->lock);
    return holds;
}

static int assign_subscript(PyObject *x, PyObject *key, PyObject *values)
{
    if (Py_TYPE(x) != tensor_class || !slow_setitem) {
        PyErr_Format(PyExc_TypeError, "expected a Tensor for item assignment, got %R", x);
        return -1;
    }
    if (!values) {
        PyErr_Format(PyExc_TypeError, "a Tensor does not support item deletion; select the other elements");
        return -1;
    }
    Py_ssize_t references = Py_REFCNT(x); /* 1: only the stack refers to it; 2: also one name */
    int done = assign((Allocation *)x, key, values);
    PyObject *result = done > 0 ? Py_NewRef(Py_None) : NULL;
    if (done)
        later.note_opaque();
    else
        result = call_with(slow_setitem, (PyObject *[]){x, key, values}, 3);
    if (result && (references == 1 || ((Allocation *)x)->is_part == Py_True)) {
        Py_DECREF(result);
        result = PyObject_CallFunction(warn_of_lost, "On", x, references);
    }
    Py_XDECREF(result);
    return result ? 0 : -1;
}

/* --- numbers --- */

static PyObject *number_at(const char *p, const Layout *x)
{
    int64_t wide = 0;
    double real;
    float single;
    switch (x->kind) {
    case 'b': return PyBool_FromLong(*p != 0);
    case 'f':
        if (x->itemsize == 8)
            return memcpy(&real, p, 8), PyFloat_FromDouble(real);
        return memcpy(&single, p, 4), PyFloat_FromDouble(single);
    case 'i':
        if (x->itemsize == 8)
            return memcpy(&wide, p, 8), PyLong_FromLongLong(wide);
        if (x->itemsize == 4) {
            int32_t narrow;
            return memcpy(&narrow, p, 4), PyLong_FromLongLong(narrow);
        }
        return NULL;
    default: return NULL;
    }
}

/* The elements at `*p`, in lists nested from that axis on. */
static PyObject *nested_at(const char **p, const Layout *x, int axis)
{
    if (axis == x->ndim) {
        PyObject *element = number_at(*p, x);
        *p += x->itemsize;
        return element;
    }
    PyObject *list = PyList_New((Py_ssize_t)x->dims[axis]);
    for (Py_ssize_t i = 0; list && i < (Py_ssize_t)x->dims[axis]; i++) {
        PyObject *item = nested_at(p, x, axis + 1);
        if (!item || PyList_SetItem(list, i, item))
            Py_CLEAR(list);
    }
    return list;
}

/* A new array for a tensor of that type, and its first byte; NULL with an exception set. */
static PyObject *new_array(PyObject *empty, PyObject *type, PyObject *dtype, char **to)
{
    PyObject *shape = PyObject_GetAttr(type, shape_name), *of = PyObject_GetAttr(dtype, numpy_name);
    PyObject *values = shape && of ? PyObject_CallFunctionObjArgs(empty, shape, of, NULL) : NULL;
    Py_XDECREF(shape);
    Py_XDECREF(of);
    if (values && address_of(values, to, NULL))
        Py_CLEAR(values);
    return values;
}

/* Return the only element of a tensor as a Python number, or all elements in nested lists, or with `empty` in
 * the array that it creates for a shape and dtype; None if Python must read them. */
static PyObject *values_of(PyObject *object, int is_one, PyObject *empty)
{
    Allocation *x = (Allocation *)object;
    Layout layout;
    char bytes[MOST_LISTED * 8], *to = bytes;
    FastPath *fast_path = is_quiet() ? plain_path(object) : NULL;
    PyObject *values = NULL, *tape = fast_path ? present_tape() : NULL; /* a tape records reads */
    int is_read = 0;
    if (tape == Py_None && x->tape == Py_None && layout_of(x->type, &layout) && layout.itemsize <= 8 &&
        (is_one  ? layout.size == 1
         : empty ? layout.kind != 'h' && layout.size * layout.itemsize <= MOST_COPIED &&
                       (values = new_array(empty, x->type, layout.dtype, &to))
                 : layout.size <= MOST_LISTED) &&
        address_in(fast_path, x, 1) && !acquire_lock(fast_path->lock)) {
        char *source = address_in(fast_path, x, 0);
        int is_known = source && !fast_path->observed && !fast_path->instrumented;
        if (is_known)
            memcpy(to, source, (size_t)(layout.size * layout.itemsize));
        release_lock(fast_path->lock);
        const char *p = bytes;
        if (is_known && !empty)
            values = nested_at(&p, &layout, is_one ? layout.ndim : 0);
        is_read = is_known && values;
    }
    Py_XDECREF(tape);
    if (!is_read)
        Py_CLEAR(values);
    if (values)
        later.note_opaque();
    return values || PyErr_Occurred() ? values : Py_NewRef(Py_None);
}

static PyObject *scalar(PyObject *module, PyObject *x)
{
    (void)module;
    return values_of(x, 1, NULL);
}

static PyObject *nested(PyObject *module, PyObject *x)
{
    (void)module;
    return values_of(x, 0, NULL);
}

/* array(x, empty) -> the elements in an array that `empty(shape, dtype)` returns; None if Python must read them. */
static PyObject *array(PyObject *module, PyObject *args)
{
    PyObject *x, *empty;
    (void)module;
    return PyArg_ParseTuple(args, "OO:array", &x, &empty) ? values_of(x, 0, empty) : NULL;
}

/* Write bytes to a new tensor of an arena. NULL with no exception set if Python must do it. */
static Allocation *tensor_with(PyObject *arena, PyObject *type, const char *bytes, int64_t nbytes)
{
    FastPath *fast_path = is_quiet() ? fast_path_of(arena) : NULL;
    char *target, *unused;
    if (!fast_path || !is_unwatched(fast_path))
        return NULL;
    Allocation *out = locked_tensor(fast_path, arena, type, NULL, &target, &unused);
    if (out) {
        memcpy(target, bytes, (size_t)nbytes);
        release_lock(fast_path->lock);
    }
    return out;
}

Allocation *tensor_of_number(PyObject *arena, PyObject *type, PyObject *value)
{
    Layout layout;
    char element[16];
    if (!layout_of(type, &layout) || layout.size != 1 || !element_of(value, &layout, element))
        return NULL;
    return tensor_with(arena, type, element, layout.itemsize);
}

/* number(arena, type, value): a tensor with one element in the arena; None if Python must create it. */
static PyObject *number(PyObject *module, PyObject *args)
{
    PyObject *arena, *type, *value;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:number", &arena, &type, &value))
        return NULL;
    return tensor_or_none(tensor_of_number(arena, type, value));
}

/* Weak references to tensors of numbers that were recent operands; the VM keeps the tensors alive while they are in
 * use. */
typedef struct {
    long long fast_path; /* number of the VM; 0: free */
    PyObject *dtype;     /* dtype of the other operand, which is never freed */
    uint64_t bits;
    int is_int;
    PyObject *tensor;
} NumberOperand;
static NumberOperand number_operands[REMEMBERED];

/* Find the cache entry for a number that is combined with a tensor. NULL for any other value, and
 * for a float with an integer tensor, because that result also depends on the default dtype. */
static NumberOperand *place_of_number(PyObject *value, PyObject *like, NumberOperand *wanted)
{
    Layout layout;
    int overflow = 0;
    int is_int = PyLong_CheckExact(value);
    if ((!is_int && !PyFloat_CheckExact(value)) || Py_TYPE(like) != tensor_class ||
        !((Allocation *)like)->type || !layout_of(((Allocation *)like)->type, &layout))
        return NULL;
    int is_float_dtype = layout.kind == 'f' || layout.kind == 'h';
    if (!is_float_dtype && !(is_int && (layout.kind == 'i' || layout.kind == 'u')))
        return NULL;
    PyObject *arena = present_arena();
    FastPath *fast_path = arena ? fast_path_of(arena) : NULL;
    *wanted = (NumberOperand){
        .fast_path = fast_path ? fast_path->number : 0, .dtype = layout.dtype, .is_int = is_int};
    Py_XDECREF(arena);
    if (is_int) {
        wanted->bits = (uint64_t)PyLong_AsLongLongAndOverflow(value, &overflow);
    } else {
        double real = PyFloat_AsDouble(value);
        memcpy(&wanted->bits, &real, sizeof real);
    }
    if (!wanted->fast_path || overflow)
        return NULL;
    uint64_t hash = (wanted->bits ^ (uint64_t)wanted->fast_path << 20 ^ (uintptr_t)layout.dtype >> 4 ^
                     (uint64_t)is_int) *
                    0x9E3779B97F4A7C15u;
    return &number_operands[(hash >> 32) % REMEMBERED];
}

/* operand(value, like): as `as_operand`. */
static PyObject *operand(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 2)
        return PyErr_Format(PyExc_TypeError, "operand: expected 2 arguments, got %zd", nargs);
    if (Py_TYPE(args[0]) == tensor_class)
        return Py_NewRef(args[0]);
    NumberOperand wanted, *place = place_of_number(args[0], args[1], &wanted);
    if (place && place->fast_path == wanted.fast_path && place->dtype == wanted.dtype &&
        place->bits == wanted.bits && place->is_int == wanted.is_int) {
        PyObject *tensor = PyWeakref_GetObject(place->tensor);
        if (tensor && tensor != Py_None && is_alive((Allocation *)tensor))
            return Py_NewRef(tensor);
    }
    PyObject *result = PyErr_Occurred()
                           ? NULL
                           : PyObject_CallFunctionObjArgs(slow_operand, args[0], args[1], NULL);
    if (result && place && Py_TYPE(result) == tensor_class) {
        PyObject *old = place->tensor;
        if ((wanted.tensor = PyWeakref_NewRef(result, NULL))) {
            *place = wanted;
            Py_XDECREF(old); /* a weak reference without a callback: this runs no Python */
        }
        PyErr_Clear();
    }
    return result;
}

/* are_alive(tensors): whether each tensor of a list has memory, without a handle for it. */
static PyObject *are_alive(PyObject *module, PyObject *tensors)
{
    (void)module;
    if (!PyList_CheckExact(tensors))
        return PyErr_Format(PyExc_TypeError, "are_alive: expected a list, got %R", tensors);
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++) {
        PyObject *x = PyList_GetItem(tensors, i);
        if (Py_TYPE(x) != tensor_class || !is_alive((Allocation *)x))
            Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

/* filled(x, type): a tensor of that type with the one element of x everywhere; None if Python must launch it. */
static PyObject *filled(PyObject *module, PyObject *args)
{
    PyObject *object, *type;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:filled", &object, &type))
        return NULL;
    Layout from, to;
    const int64_t none[MOST_AXES] = {0};
    int64_t into[MOST_AXES];
    FastPath *fast_path = is_quiet() && !later.is_recording() ? plain_path(object) : NULL;
    Allocation *x = (Allocation *)object, *out = NULL;
    if (fast_path && !is_tracked(x) && layout_of(x->type, &from) && layout_of(type, &to) &&
        from.size == 1 && from.dtype == to.dtype && to.size * to.itemsize <= MOST_COPIED) {
        char *target, *source;
        PyObject *arena = present_arena();
        if ((out = locked_tensor(fast_path, arena, type, x, &target, &source))) {
            packed_strides(to.dims, to.ndim, to.itemsize, into);
            if (to.size)
                copy_box(target, into, source, none, to.dims, to.ndim, to.itemsize);
            release_lock(fast_path->lock);
        }
        Py_XDECREF(arena);
    }
    return tensor_or_none(out);
}

/* As `tensor_with`, in the current arena; a recorded call depends on the bytes. */
static PyObject *present_tensor_with(PyObject *type, const char *bytes, int64_t nbytes)
{
    PyObject *arena = present_arena();
    Allocation *out = arena ? tensor_with(arena, type, bytes, nbytes) : NULL;
    if (out)
        later.note_opaque();
    Py_XDECREF(arena);
    return (PyObject *)out;
}

/* Return the key that the op `call` splits off a state of random keys, which advances; NULL with no exception set if
 * Python must do both. Either the caller holds the lock of the keys, or `locked()` returns whether another thread
 * holds it. */
static PyObject *next_key_in(PyObject *arena, PyObject *call, Allocation *state, PyObject *type,
                             PyObject *locked)
{
    FastPath *fast_path = is_quiet() ? plain_path((PyObject *)state) : NULL;
    Region *region = region_of(state);
    KernelCallObject *kernel = fast_path && region ? kernel_of(call, fast_path, &state, 1) : NULL;
    Allocation *out = NULL;
    char *p[] = {NULL, NULL, NULL};
    int done = 0;
    if (kernel && (out = locked_tensor(fast_path, arena, type, state, &p[0], &p[1]))) {
        PyObject *held = locked ? PyObject_CallNoArgs(locked) : Py_NewRef(Py_False);
        Py_XDECREF(held);
        if (held == Py_False && !region->first_view && !region->watched && region_of(state) == region) {
            uint64_t number;
            done = !run_in_pool(fast_path->pool, &kernel->call, p);
            memcpy(&number, p[1] + sizeof number, sizeof number);
            number += (uint64_t)done;
            memcpy(p[1] + sizeof number, &number, sizeof number);
        }
        release_lock(fast_path->lock);
    }
    Py_XDECREF((PyObject *)kernel);
    if (!done)
        Py_CLEAR(out);
    return out || clear_nonfatal_error() ? (PyObject *)out : NULL;
}

/* next_key(call, state, type): that key in the current arena, or None. */
static PyObject *next_key(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs != 3 || Py_TYPE(args[1]) != tensor_class)
        return PyErr_Format(PyExc_TypeError, "next_key: expected (op, tensor, type), got %zd args", nargs);
    PyObject *arena = present_arena();
    PyObject *key = arena ? next_key_in(arena, args[0], (Allocation *)args[1], args[2], NULL) : NULL;
    Py_XDECREF(arena);
    return tensor_or_none(key);
}

/* copied(type, array): a tensor with the values of a packed array of that type; None if Python must write it. */
static PyObject *copied(PyObject *module, PyObject *args)
{
    PyObject *type, *array, *result = NULL;
    Py_buffer buffer;
    Layout layout;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:copied", &type, &array))
        return NULL;
    if (layout_of(type, &layout) && layout.size * layout.itemsize <= MOST_COPIED &&
        !PyObject_GetBuffer(array, &buffer, PyBUF_STRIDES)) {
        if (PyBuffer_IsContiguous(&buffer, 'C') && buffer.len == layout.size * layout.itemsize)
            result = present_tensor_with(type, buffer.buf, buffer.len);
        PyBuffer_Release(&buffer);
    }
    return tensor_or_none(result);
}

/* listed(numbers, float_type, int_type): convert a Python float or int, or a list of them, to a tensor. Its dtype is
 * float_type's if a float occurs, otherwise int_type's. Return None for any other list. */
static PyObject *listed(PyObject *module, PyObject *args)
{
    PyObject *numbers, *types[2], *result = NULL;
    char bytes[MOST_LISTED * 8];
    Layout layout;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:listed", &numbers, &types[0], &types[1]))
        return NULL;
    int is_one = PyFloat_CheckExact(numbers) || PyLong_CheckExact(numbers);
    Py_ssize_t count = is_one ? 1 : PyList_CheckExact(numbers) ? PyList_Size(numbers) : 0, floats = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        floats += PyFloat_CheckExact(is_one ? numbers : PyList_GetItem(numbers, i));
    int fits = count && count <= MOST_LISTED && layout_of(types[!floats], &layout) && layout.itemsize <= 8;
    for (Py_ssize_t i = 0; fits && i < count; i++) {
        PyObject *each = is_one ? numbers : PyList_GetItem(numbers, i);
        fits = (PyFloat_CheckExact(each) || PyLong_CheckExact(each)) &&
               element_of(each, &layout, bytes + i * layout.itemsize);
    }
    int64_t length = count;
    PyObject *type = fits ? type_of(layout.dtype, &length, !is_one) : NULL;
    if (type && layout_of(type, &layout))
        result = present_tensor_with(type, bytes, layout.size * layout.itemsize);
    Py_XDECREF(type);
    return tensor_or_none(result);
}

static PyMethodDef views_functions[] = {
    {"alias", (PyCFunction)(void (*)(void))alias, METH_FASTCALL,
     "alias(call, x, type): view x as another type, as `alias_in_python` does."},
    {"view_as", view_as_python, METH_VARARGS, "view_as(x, type): an untracked view of x, or None."},
    {"number", number, METH_VARARGS, "number(arena, type, value): a tensor of one element, or None."},
    {"operand", (PyCFunction)(void (*)(void))operand, METH_FASTCALL,
     "operand(value, like): the tensor of an operand combined with another, as `as_operand` returns it."},
    {"are_alive", are_alive, METH_O, "are_alive(tensors): whether each tensor of a list has memory."},
    {"filled", filled, METH_VARARGS, "filled(x, type): a tensor filled with the element of x, or None."},
    {"next_key", (PyCFunction)(void (*)(void))next_key, METH_FASTCALL,
     "next_key(call, state, type): the key that the op splits off a state, which advances, or None."},
    {"copied", copied, METH_VARARGS, "copied(type, array): a tensor with the array's values, or None."},
    {"listed", listed, METH_VARARGS,
     "listed(numbers, float_type, int_type): a tensor of a list of floats and ints, or None."},
    {"scalar", scalar, METH_O, "scalar(x): the only element as a Python number, or None."},
    {"chosen", chosen_in_python, METH_VARARGS,
     "chosen(x, mask): the rows of x where the mask is True, or None."},
    {"positions", positions, METH_VARARGS,
     "positions(dtype, x): the positions of the nonzero elements, or None."},
    {"array", array, METH_VARARGS,
     "array(x, empty): the elements in an array that empty(shape, dtype) returns, or None."},
    {"nested", nested, METH_O, "nested(x): the elements as numbers in nested lists, or None."},
    {NULL, NULL, 0, NULL}};

int views_init(PyObject *module)
{
    later.subscript = subscript;
    later.assign_subscript = assign_subscript;
    later.alias = alias;
    later.next_key_in = next_key_in;
    expect_objects(objects);
    NAMES(INTERN_NAME)
    return PyErr_Occurred() ? -1 : PyModule_AddFunctions(module, views_functions);
}
