/* What recurrences of all dtypes have in common. */
#include "functions.h"

#ifdef WANTED /* a step without Python has one thread make such a call */
#define YIELD() ((void)0)
#else
#include <sched.h>
#define YIELD() sched_yield()
#endif

/* Behind the integers of a product of all rows of the state: how many steps there are, of which kind the
 * lengths are, whether the last comes first, how many parts a state has, how many sums are kept or
 * cotangents made of each element, the cell; whether the state is bf16, and whether the kernel is. */
enum { STEPS = AXES + 1, LENGTHS, BACKWARD, PARTS, KEPT, CELL, HALF_STATES, HALF_KERNEL, MADE = KEPT };
enum { TANH, RELU, LSTM, GRU };

#define SIGMOID(x) _Generic((x), float: sigmoid_f32, double: sigmoid_f64)(x)
#define TANH_(x) _Generic((x), float: tanh_f32, double: tanh_f64)(x)

/* How many units have come here, in all; each comes as often. A call that is divided has all its units
 * running at once. */
static inline void meet(int64_t *count, int64_t units, int64_t all, int64_t *target)
{
    if (units == all)
        return;
    *target += all;
    __atomic_add_fetch(count, units, __ATOMIC_ACQ_REL);
    for (int64_t spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < *target; spins++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
        if (spins > 2000)
            YIELD(); /* one may wait for this processor */
    }
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
