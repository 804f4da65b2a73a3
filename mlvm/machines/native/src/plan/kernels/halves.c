/* Calls of f32 kernels with half-precision operands and results. The operands of some units are widened
 * in scratch memory, where the child reads them, and the child's results are rounded while they are
 * in the cache. */
#include "../plan.h"

#include "elements.h"

enum { halves_integers(NAME) REST };
enum { halves_value_integers(NAME) WIDTH };

/* Set the parameters of the child: those that are not converted, and those that are converted once. */
static void begin_call(const KernelCall *call, char *const *p, char **q)
{
    const int64_t *n = call->ints;
    for (int i = 0; i < call->nparams; i++)
        q[i] = p[i];
    q[call->nparams] = p[call->nparams] + n[SHARED_AT];
    if (n[REST + KIND] == LATER)
        q[0] = p[call->nparams];
}

static int halves(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    const KernelCall *child = call->children[0];
    RowFn widen = call->rows[0]->run, narrow = call->rows[1]->run;
    char *q[MOST_PARAMETERS + 1];
    begin_call(call, p, q);
    for (int64_t u = begin, last; u < end; u = last) {
        last = least(u + n[TOGETHER], end);
        for (int i = 0; i < call->nparams; i++) {
            const int64_t *value = n + REST + i * WIDTH, from = u * value[LENGTH];
            char *place = scratch + value[PLACE];
            if (value[KIND] == PIECES) {
                char *row[] = {place, p[i] + from * 2};
                if (i)
                    widen(row, least(last * value[LENGTH], value[COUNT]) - from, NULL);
                q[i] = place - from * 4;
            } else if (value[KIND] == ENTIRE && u == begin) {
                char *row[] = {place, p[i]};
                widen(row, value[COUNT], NULL);
                q[i] = place;
            }
        }
        if (child->kernel->run(child, q, u, last, scratch + n[SCRATCH_AT]))
            return 1;
        if (n[REST + KIND] == PIECES) {
            int64_t length = n[REST + LENGTH];
            char *row[] = {p[0] + u * length * 2, scratch + n[REST + PLACE]};
            narrow(row, (last - u) * length, NULL);
        }
    }
    return 0;
}

static int finish_halves(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints;
    const KernelCall *child = call->children[0];
    char *q[MOST_PARAMETERS + 1];
    begin_call(call, p, q);
    if (child->kernel->finish && child->kernel->finish(child, q, begin, end, scratch + n[SCRATCH_AT]))
        return 1;
    if (n[REST + KIND] == LATER) {
        char *row[] = {p[0], q[0]};
        call->rows[1]->run(row, n[REST + COUNT], NULL);
    }
    return 0;
}

KERNEL_TABLE(halves, KERNEL(halves, halves, finish_halves))
