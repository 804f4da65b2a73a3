/* Kernels, and calls of kernels.
 *
 * A call is prepared once for parameter types; only the addresses differ from run to run. The
 * division of the work into units depends only on the shapes. Each unit computes its elements in
 * the same way on any thread, so the bits of a result do not depend on the number of threads.
 */
#ifndef MLVM_PLAN_H
#define MLVM_PLAN_H

#include "names.h"

#include <stddef.h>
#include <stdint.h>

typedef struct KernelCall KernelCall;

/* Run the units begin .. end - 1 of a call. `p` has the addresses of the result and the
 * operands, then of the call's shared bytes. All are packed, row-major and aligned to the element
 * size. `scratch` is aligned to 64 bytes and private to the thread. Return 0, or 1 if the op
 * rejects a value; the reference kernel then raises the error. */
typedef int (*KernelFn)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch);

/* A loop over n elements of a packed row: p[0] is written, p[1] and following are read. An
 * operand may be the result itself. An operand with step 0 is a block of BLOCK_BYTES of copies
 * of one element; only row functions with steps support it. */
typedef void (*RowFn)(char *const *p, int64_t n, const int64_t *steps);

/* A link computes one element and calls the next link, as its last action: a jump. `at` has the addresses
 * of its result and its operands. It returns the link that stops the chain: the last link, or one that
 * cannot be computed. */
typedef struct Link Link;
typedef const Link *(*LinkFn)(const Link *link);
struct Link {
    LinkFn run;
    char *at[4];
    union {
        RowFn row;
        const KernelCall *call;
        const int64_t *ints; /* integers of a call */
        int64_t nbytes;
    };
};

/* Write a link that computes the call on these parameters; return whether the kernel has a link. If the op
 * rejects a value, the link stops the chain before it writes anything. `link[-1]` is the previous link, which may
 * also do the work of this link and call link[1]; or zeros. */
typedef int (*ToLinkFn)(const KernelCall *call, char *const *p, Link *link);

typedef struct {
    const char *name; /* "layer_norm_f32" */
    KernelFn run;
    KernelFn finish;  /* NULL, or a function that one thread runs after all units */
    ToLinkFn to_link; /* NULL if no call of the kernel is a link */
} KernelEntry;

typedef struct {
    const char *name; /* "add_f32" */
    RowFn run;
    LinkFn element;
    double cost; /* approximate nanoseconds per byte of its result */
} RowEntry;

struct KernelCall {
    const KernelEntry *kernel;
    int64_t units;   /* units of work, which any threads may run */
    double work;     /* approximate nanoseconds for all units on one thread */
    int64_t scratch; /* bytes for each thread */
    int64_t shared;  /* bytes that `run` leaves for `finish`. Without `finish`, units synchronize
                        * here, and a thread may run units of other threads: the bytes begin with the
                        * number of threads and zeros, unless one thread runs all units */
    int nparams;
    const int64_t *ints;               /* lengths, strides, choices: see names.h */
    const double *floats;              /* floating-point attributes */
    const KernelCall *const *children; /* child calls that the kernel runs on parts of the work */
    int nchildren;
    const RowEntry *const *rows; /* row functions of a chain */
    struct MachineCode *code;    /* of a chain's links, or NULL */
};

/* Each file in kernels/ is compiled once per instruction set, with a different TARGET. The last
 * definition of the file is a table of kernels, terminated by a name of NULL. For a step without
 * Python, separate entries for the kernels that the step calls replace the table; no other kernels
 * are compiled. */
#define MLVM_JOIN_(x, y) x##_##y
#define MLVM_JOIN(x, y) MLVM_JOIN_(x, y)
#ifdef TARGET
#define TARGETED(name) MLVM_JOIN(name, TARGET)

/* A function that the compiler specializes for the constant arguments of each call. Not without
 * optimization or with sanitizers, which would take minutes to compile. */
#if defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define SPECIALIZED static inline __attribute__((always_inline))
#else
#define SPECIALIZED static inline
#endif
#endif
#ifdef WANTED /* a file of lines such as `#define USES_kernel_layer_norm_f32 ~, KEPT` */
#include WANTED
#define SECOND_(x, y, ...) y
#define SECOND(...) SECOND_(__VA_ARGS__)
#define KEPT(...) __VA_ARGS__
#define LEFT_OUT(...)
#define IF_USED(kind, name) SECOND(MLVM_JOIN(USES_##kind, name), LEFT_OUT, ~)
#define KERNEL_TABLE(file, ...) __VA_ARGS__ extern const KernelEntry TARGETED(file##_kernels)[];
#define KERNEL_(name, text, run, finish, to_link) \
    IF_USED(kernel, name)(const KernelEntry TARGETED(MLVM_JOIN(kernel, name)) = {text, run, finish, NULL};)
#define ROW_(name, text, run, element, cost) \
    IF_USED(row, name)(const RowEntry TARGETED(MLVM_JOIN(row, name)) = {text, run, element, cost};)
#else
#define KERNEL_TABLE(file, ...) \
    const KernelEntry TARGETED(file##_kernels)[] = {__VA_ARGS__{NULL, NULL, NULL, NULL}};
#define KERNEL_(name, text, run, finish, to_link) {text, run, finish, to_link},
#define ROW_(name, text, run, element, cost) {text, run, element, cost},
#endif
#define KERNEL(name, run, finish) KERNEL_(name, #name, run, finish, NULL)
#define LINKED_KERNEL(name, to_link) KERNEL_(name, #name, name, NULL, to_link)

/* Loops whose iterations are independent: the result may be an operand. */
#if defined(__clang__)
#define INDEPENDENT_FOR(...) _Pragma("clang loop vectorize(assume_safety)") for (__VA_ARGS__)
#elif defined(__GNUC__)
#define INDEPENDENT_FOR(...) _Pragma("GCC ivdep") for (__VA_ARGS__)
#else
#define INDEPENDENT_FOR(...) for (__VA_ARGS__)
#endif

#endif
