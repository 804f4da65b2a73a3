#include "bound.h"

int run_one(Pool *pool, char *const *addresses, const BoundCall *bound)
{
    char *p[MOST_PARAMETERS + 1];
    for (int i = 0; i < bound->call->nparams; i++)
        p[i] = addresses[bound->places[i]];
    return pool_run(pool, bound->call, p);
}

int run_bound(Pool *pool, char *const *addresses, const BoundCall *calls, int count, int *next,
              double *most)
{
    for (; *next<count && * most> 0; ++*next) {
        int refused = run_one(pool, addresses, &calls[*next]);
        if (refused)
            return refused;
        *most -= calls[*next].call->work;
    }
    return 0;
}
