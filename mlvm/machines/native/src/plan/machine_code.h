/* Machine code for the links of a chain, on x86-64 with AVX2. */
#ifndef MLVM_MACHINE_CODE_H
#define MLVM_MACHINE_CODE_H

#include "plan.h"

#include <stdatomic.h>

enum { CODE_VECTOR = 32 }; /* bytes of a vector */

/* Code for `nlinks` links. It computes the first `nbytes` of each value, the first `vectors` of them, a multiple of
 * CODE_VECTOR, in vectors. `values` has the addresses of a piece's values, `scratch` is the start of the scratch
 * memory. For a chain of elements the code is the link's function `element`; at[0] is the start of the scratch
 * memory, which begins with the addresses of the values. */
typedef struct {
    union { /* NULL: none */
        void (*run)(char *const *values, int64_t vectors, const char *scratch, int64_t nbytes);
        LinkFn element;
    };
    int64_t nlinks, nints, size; /* links, and their integers; bytes of an element */
} CodeSegment;

/* The code of a call. It is generated when the call has computed enough elements that it pays. */
typedef struct MachineCode {
    atomic_llong elements;           /* computed so far */
    _Atomic(CodeSegment *) segments; /* one for each link, or NULL */
    void *pages;
    size_t nbytes;
} MachineCode;

#ifdef WANTED /* a step without Python has no code */
#define code_count(call, elements) ((void)(elements))
#else
/* Count elements that the call computes; generate the code when there are enough. */
void code_count(const KernelCall *call, int64_t elements);
extern int64_t code_after; /* elements */
void code_free(MachineCode *code);
#endif

/* Return the segments of a call's links, one for each; NULL if there is no code. */
static inline const CodeSegment *code_of(const KernelCall *call)
{
    return call->code ? atomic_load_explicit(&call->code->segments, memory_order_acquire) : NULL;
}

#endif
