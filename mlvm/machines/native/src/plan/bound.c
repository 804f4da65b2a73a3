#include "bound.h"

int run_bound(Pool *pool, const BoundCall *calls, int count, int *next, double *most)
{
    for (; *next < count && *most > 0; ++*next) {
        const BoundCall *call = &calls[*next];
        int refused = pool_run(pool, call->call, call->p);
        if (refused)
            return refused;
        *most -= call->call->work;
    }
    return 0;
}
