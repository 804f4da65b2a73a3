/* The lock of a VM: a reentrant lock that C acquires without a call of Python.
 *
 * In:        calls by any thread.
 * Out:       as `threading.RLock`, which is the definition. A thread that waits releases the interpreter lock, and
 *            runs the handlers of signals.
 * Must hold: the owner is the only thread that releases it. `gate` is locked except between a release and the
 *            first waiting thread that passes. That thread locks it again by passing, and looks at `count`: the
 *            lock may have been acquired meanwhile, and the next release opens the gate again.
 * Callers:   the fast path, before it runs a kernel or copies elements; Python, by `with vm.lock`.
 * Locks:     the interpreter lock guards all fields, so an acquisition without waiting only writes to them.
 */
#include "lock.h"

#include "posts.h"

static PyTypeObject *lock_type;

int is_lock(PyObject *object)
{
    return Py_TYPE(object) == lock_type;
}

static int is_mine(const LockObject *self)
{
    return self->count && self->owner == PyThread_get_thread_ident();
}

/* Acquire the lock, and wait for that number of seconds, or for ever if it is negative. Return 1; 0 if another thread
 * still has the lock; -1 with an exception set. */
static int acquire_within(LockObject *self, double seconds)
{
    const double end = seconds > 0 ? now() + seconds : 0;
    while (self->count && !is_mine(self)) {
        const double left = seconds > 0 ? end - now() : seconds;
        if (seconds >= 0 && left <= 0)
            return 0;
        PyLockStatus status;
        self->waiting++;
        Py_BEGIN_ALLOW_THREADS status = PyThread_acquire_lock_timed(
            self->gate, left < 0 ? -1 : (long long)(left * 1e6) + 1, 1);
        Py_END_ALLOW_THREADS self->waiting--;
        if (status == PY_LOCK_ACQUIRED)
            self->is_open = 0;
        else if (status == PY_LOCK_INTR && Py_MakePendingCalls())
            return -1;
    }
    self->owner = PyThread_get_thread_ident();
    self->count++;
    return 1;
}

int acquire_lock(LockObject *self)
{
    return acquire_within(self, -1) < 0 ? -1 : 0;
}

void release_lock(LockObject *self)
{
    if (--self->count || !self->waiting || self->is_open)
        return;
    self->is_open = 1;
    PyThread_release_lock(self->gate);
}

/* Make the lock free, in a process without the threads that had it or waited. */
static int reinitialize(LockObject *self)
{
    PyThread_type_lock gate =
        PyThread_allocate_lock(); /* the old one is lost, because its state is unknown */
    if (!gate)
        return -1;
    PyThread_acquire_lock(gate, WAIT_LOCK);
    self->gate = gate;
    self->count = self->waiting = self->is_open = 0;
    return 0;
}

static PyObject *lock_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Lock", names))
        return NULL;
    LockObject *self = (LockObject *)object_of(type);
    if (self && reinitialize(self)) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void lock_dealloc(LockObject *self)
{
    if (self->weakrefs)
        PyObject_ClearWeakRefs((PyObject *)self);
    if (self->gate) {
        if (!self->is_open)
            PyThread_release_lock(self->gate);
        PyThread_free_lock(self->gate);
    }
    free_object((PyObject *)self);
}

static PyObject *lock_acquire(LockObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"blocking", "timeout", NULL};
    int blocking = 1;
    double timeout = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|pd:acquire", names, &blocking, &timeout))
        return NULL;
    if (timeout != -1 && (!blocking || !(timeout >= 0 && timeout < 1e9)))
        return PyErr_Format(PyExc_ValueError,
                            "acquire: expected timeout=0 to 1e9 with blocking=True, got %R", args);
    int done = acquire_within(self, blocking ? timeout : 0);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyObject *lock_enter(LockObject *self, PyObject *unused)
{
    (void)unused;
    return acquire_lock(self) ? NULL : Py_NewRef(Py_True);
}

static PyObject *lock_release(LockObject *self, PyObject *unused)
{
    (void)unused;
    if (!is_mine(self))
        return PyErr_Format(PyExc_RuntimeError, "cannot release un-acquired lock");
    release_lock(self);
    Py_RETURN_NONE;
}

static PyObject *lock_exit(LockObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)args, (void)nargs;
    return lock_release(self, NULL);
}

static PyObject *lock_is_owned(LockObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(is_mine(self));
}

static PyObject *lock_reinitialize(LockObject *self, PyObject *unused)
{
    (void)unused;
    return reinitialize(self) ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyMemberDef lock_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(LockObject, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))lock_acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire(blocking=True, timeout=-1) -> whether this thread has the lock now."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Undo one `acquire` of this thread."},
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))lock_exit, METH_FASTCALL, NULL},
    {"_is_owned", (PyCFunction)lock_is_owned, METH_NOARGS, "Whether this thread has the lock."},
    {"_at_fork_reinit", (PyCFunction)lock_reinitialize, METH_NOARGS,
     "Make the lock free, in a forked process."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot lock_slots[] = {{Py_tp_new, lock_new},
                                   {Py_tp_dealloc, lock_dealloc},
                                   {Py_tp_members, lock_members},
                                   {Py_tp_methods, lock_methods},
                                   {Py_tp_doc, "Lock(): as threading.RLock; C acquires it faster."},
                                   {0, NULL}};
static PyType_Spec lock_spec = {"mlvm.machines.native._native.Lock", sizeof(LockObject), 0,
                                Py_TPFLAGS_DEFAULT, lock_slots};

int lock_init(PyObject *module)
{
    lock_type = add_type(module, "Lock", &lock_spec);
    return lock_type ? 0 : -1;
}
