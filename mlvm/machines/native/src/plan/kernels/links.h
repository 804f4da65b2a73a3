/* Links of a chain of single elements. */
#ifndef MLVM_LINKS_H
#define MLVM_LINKS_H

#include "../plan.h"

#include <string.h>

enum { chain_integers(NAME) REST };

/* Write the links of a call of `chain_of_elements` on these parameters; return the next link. `scratch`
 * contains what links work on: the addresses of all values, and temporaries from PITCH on. */
static inline Link *add_links(const KernelCall *call, char *const *p, char *scratch, Link *next)
{
    const int64_t *n = call->ints, *numbers = n + REST;
    char **values = (char **)scratch, *space = scratch + n[PITCH];
    memcpy(values, p, (size_t)call->nparams * sizeof *values);
    for (int64_t i = call->nparams; i < n[NVALUES]; i++, space += MOST_ITEM)
        values[i] = space;
    for (int64_t i = 0; i < n[NLINKS]; i++, numbers += 4, next++) {
        next->run = call->rows[i]->element;
        next->row = call->rows[i]->run;
        for (int k = 0; k < 4; k++)
            next->at[k] = values[numbers[k]];
    }
    return next;
}

#endif
