/* Links of a chain of single elements. */
#ifndef MLVM_LINKS_H
#define MLVM_LINKS_H

#include "../machine_code.h"

#include <string.h>

enum { chain_integers(NAME) REST };
enum { chain_value_integers(NAME) STRIDES };

/* Write the links of a call of `chain_of_elements` on these parameters; return the next link. `scratch`
 * contains what links work on: the addresses of all values, and temporaries. `runs`: how often the links run. */
static inline Link *add_links(const KernelCall *call, char *const *p, char *scratch, Link *links, int runs)
{
    const int64_t *n = call->ints, *numbers = n + REST + n[NAXES];
    char **values = (char **)scratch;
    code_count(call, 8 * runs); /* eight f32 in a vector need about the same time as one element */
    const CodeSegment *segments = code_of(call);
    for (int64_t i = 0; i < n[NVALUES]; i++, numbers += STRIDES + n[NAXES])
        values[i] = numbers[KIND] == WHOLE ? p[numbers[PARAMETER]] : scratch + numbers[PLACE];
    for (int64_t i = 0; i < n[NLINKS];) {
        if (segments && segments[i].element) {
            links[i] = (Link){.run = segments[i].element, .at = {scratch}};
            numbers += segments[i].nints;
            i += segments[i].nlinks;
            continue;
        }
        links[i] = (Link){.run = call->rows[i]->element, .row = call->rows[i]->run};
        for (int64_t k = 0; k < 4; k++)
            links[i].at[k] = values[numbers[1 + (k < numbers[0] ? k : numbers[0] - 1)]];
        numbers += 1 + 2 * numbers[0];
        i++;
    }
    return links + n[NLINKS];
}

#endif
