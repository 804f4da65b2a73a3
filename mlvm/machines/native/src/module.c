/* Python module `_native`: registers the Python interfaces of all files. */
#include "language/dispatch.h"
#include "language/families.h"
#include "language/guards.h"
#include "language/lock.h"
#include "language/posts.h"
#include "language/replay.h"
#include "language/templates.h"
#include "language/views.h"
#include "machine/call.h"
#include "machine/formulas.h"
#include "machine/host.h"
#include "machine/lanes.h"
#include "machine/loop.h"
#include "machine/offsets.h"
#include "machine/records.h"
#include "machine/value.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
/* The digest of these files by `sources.py`, which `setup.py` defines. */
static const char sources[] = "sources " TEXT(SOURCES);

static int (*const parts[])(PyObject *) = {call_init,     value_init,    host_init,      loop_init,
                                           records_init,  lanes_init,    posts_init,     lock_init,
                                           dispatch_init, views_init,    templates_init, guards_init,
                                           replay_init,   formulas_init, offsets_init,   families_init};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                                        "_native",
                                        "Kernels and the loop of the native machine.",
                                        -1,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL,
                                        NULL};

PyMODINIT_FUNC PyInit__native(void)
{
    PyObject *module = PyModule_Create(&definition);
    for (size_t i = 0; module && i < sizeof parts / sizeof *parts; i++)
        if (parts[i](module))
            Py_CLEAR(module);
    if (module && PyModule_AddStringConstant(module, "sources", sources))
        Py_CLEAR(module);
    return module;
}
