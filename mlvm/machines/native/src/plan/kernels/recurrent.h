/* Definitions for recurrences of all dtypes. */
#include "batch.h"
#include "elements.h"
#include "functions.h"

#ifndef WANTED
#include <sched.h>
#endif

/* After the integers of the product of all rows of the state: number of steps, dtype of the lengths,
 * whether the last step is first, parts of a state, sums or cotangents kept per element, the cell,
 * whether the state is bf16, and whether the kernel is. */
enum { STEPS = AXES + 1, LENGTHS, BACKWARD, PARTS, KEPT, CELL, HALF_STATES, HALF_KERNEL, MADE = KEPT };
enum { recurrent_cells(NAME) };

#define SIGMOID(x) _Generic((x), float : sigmoid_f32, double : sigmoid_f64)(x)
#define TANH_(x) _Generic((x), float : tanh_f32, double : tanh_f64)(x)

/* The shared bytes: number of shares of the units; number of finished units in all turns; for each
 * share, at its first unit, the number of turns that were taken; then the states. */
enum { SHARES, DONE, TAKEN = 8 };

static inline char *kept_in(const KernelCall *call, char *const *p)
{
    return p[call->nparams] + 8 * (TAKEN + (call->units + 7) / 8 * 8);
}

typedef void Turn(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch,
                  int64_t turn);

/* Run turns of some units; a turn starts only after the previous one is finished everywhere. A
 * thread first takes its own share, because that part of the kernel is in its cache, and then takes
 * shares that other threads have not begun. Therefore a thread without a processor does not delay
 * other threads. */
static inline void take_turns(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                              char *scratch, int64_t turns, Turn *take)
{
    const int64_t all = call->units;
    if (end - begin == all) {
        for (int64_t turn = 0; turn < turns; turn++)
            take(call, p, begin, end, scratch, turn);
        return;
    }
#ifndef WANTED /* in a step without Python, a single thread runs such a call */
    int64_t *shared = (int64_t *)(void *)p[call->nparams], shares = shared[SHARES], own = 0, done;
    while (all * own / shares < begin || all * (own + 1) / shares < end)
        own++;
    while ((done = __atomic_load_n(shared + DONE, __ATOMIC_ACQUIRE)) < turns * all) {
        const int64_t turn = done / all;
        for (int64_t i = own; i < own + shares; i++) {
            int64_t share = i % shares, first = all * share / shares, last = all * (share + 1) / shares;
            int64_t current = turn;
            if (first == last || !__atomic_compare_exchange_n(shared + TAKEN + first, &current, turn + 1, 0,
                                                              __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
                continue;
            take(call, p, first, last, scratch, turn);
            __atomic_add_fetch(shared + DONE, last - first, __ATOMIC_ACQ_REL);
        }
        for (int spins = 0; __atomic_load_n(shared + DONE, __ATOMIC_ACQUIRE) < (turn + 1) * all; spins++) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            if (spins > 2000) { /* the other thread may be waiting for this processor */
                sched_yield();
                spins -= 100;
            }
        }
    }
#endif
}

static inline int64_t longest_of(const char *lengths, int64_t kind, int64_t count, int64_t most)
{
    int64_t longest = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t length = integer_at(lengths, kind, i);
        longest = length > longest ? length : longest;
    }
    return least(longest, most);
}
