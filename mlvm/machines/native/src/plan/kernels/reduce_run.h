/* Kernel of one reduction. Include it after reduce.h, with the same macros, and optionally FINISH(out,
 * n), which is applied to n results at the end, and REPAIR(call, p), which is applied after all results. */
#ifndef FINISH
#define FINISH(out, n) (void)(out)
#endif

static int REDUCE(run)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, length = n[LENGTH], inner = n[INNER];
    (void)scratch;
    A *out = (A *)p[0];
    const X *x = (const X *)p[1];
    if (n[CONTIGUOUS] && inner == 1) {
        for (int64_t u = begin; u < end; u++)
            out[u] = REDUCE(row)(x + u * length, length, 0);
        FINISH(out + begin, end - begin);
        return 0;
    }
    for (int64_t u = begin; u < end; u++) {
        const Part part = part_of(n, u);
        A *to = (n[PARTS] > 1 ? (A *)p[2] : out) + part.to;
        const X *from = x + part.from;
        if (inner == 1) {
            *to = REDUCE(rows)(from, part.rows, n[STRIDE], part.length, 0);
        } else {
            REDUCE(groups)(to, from, part.rows, n[STRIDE], part.length, inner, part.width, NULL);
        }
        if (n[PARTS] == 1)
            FINISH(to, part.width);
    }
    return 0;
}

static int REDUCE(finish)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, inner = n[INNER];
    (void)begin, (void)end, (void)scratch;
    for (int64_t output = 0; n[PARTS] > 1 && output < n[OUTPUTS]; output++) {
        A *to = (A *)p[0] + output * inner, *s = (A *)p[2] + output * n[PARTS] * inner;
        REDUCE(fold)(s, n[PARTS], inner);
        for (int64_t j = 0; j < inner; j++)
            to[j] = s[j];
        FINISH(to, inner);
    }
#ifdef REPAIR
    REPAIR(call, p);
#endif
    return 0;
}

#include "reduce_end.h"
