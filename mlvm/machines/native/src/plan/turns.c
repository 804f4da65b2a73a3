/* Turns of a loop of short calls: one chain of links with fixed addresses.
 *
 * In:       the steps of a loop: RUN steps for the condition, LOAD_ARG and JUMP_IF_FALSE, RUN steps for the body.
 * Out:      the same memory as after these steps.
 * Must hold: addresses do not change; one launch at a time runs the loop.
 * Callers:  machine/loop.c.
 * Locks:    the VM's lock, held by the caller for the launch.
 *
 * A link is an op on single elements, a call of another kernel, or the test of the condition. If a link stops
 * the turn, its step is the next step of the machine.
 */
#include "turns.h"

#include "../../../mlvm.h"
#include "kernels/links.h"

#include <stdlib.h>

_Static_assert(sizeof(Link) <= LINK_BYTES, "planners/chain.py allocates links");

struct Turns {
    Pool *pool;
    const Step *steps;
    int start, condition; /* pc of the first step; number of the argument that the condition is in */
    double work;          /* of a turn */
    Link *space, *links, *test, *last; /* `space` has zeros before the links */
    char *memory;
};

static const Link *test_condition(const Link *link)
{
    return *link->at[0] ? link[1].run(link + 1) : link;
}

static const Link *call_kernel(const Link *link)
{
    const Turns *turns = (const Turns *)link->at[0];
    return pool_run(turns->pool, link->call, (char **)link->at[1]) ? link : link[1].run(link + 1);
}

static const Link *end_turn(const Link *link)
{
    return link;
}

static int is_chain(const KernelCall *call)
{
    return !strcmp(call->kernel->name, "chain_of_elements");
}

static int64_t links_of(const Step *step)
{
    if (step->code != RUN)
        return step->code == LOAD_ARG; /* with the next step, the test of the condition */
    return is_chain(step->bound.call) ? step->bound.call->ints[NLINKS] : 1;
}

/* Return the bytes that a call needs besides its links. */
static int64_t memory_of(const KernelCall *call)
{
    return is_chain(call) ? call->ints[PIECE] : (call->nparams + 1) * (int64_t)sizeof(char *);
}

static Link *add_step(Turns *turns, const Step *step, char *const *addresses, char *memory, Link *link)
{
    const KernelCall *call = step->bound.call;
    char *p[MOST_PARAMETERS + 1] = {NULL};
    for (int i = 0; i < call->nparams; i++)
        p[i] = addresses[step->bound.places[i]];
    if (is_chain(call))
        return add_links(call, p, memory, link, 1 << 12);
    if (!call->kernel->to_link || !call->kernel->to_link(call, p, link)) {
        memcpy(memory, p, (size_t)call->nparams * sizeof *p);
        *link = (Link){.run = call_kernel, .at = {(char *)turns, memory}, .call = call};
    }
    return link + 1;
}

Turns *turns_new(const Function *function, int pc, char *const *addresses)
{
    const Step *steps = function->steps;
    int start = steps[pc].number, test = 0;
    int64_t nlinks = 1, nbytes = 0;
    double work = JUMP_WORK;
    for (int i = start; i < pc; i++) {
        const KernelCall *call = steps[i].bound.call;
        if (steps[i].code == LOAD_ARG && !test && steps[i + 1].code == JUMP_IF_FALSE) {
            nlinks += links_of(&steps[test = i++]);
            continue;
        }
        if (steps[i].code != RUN)
            return NULL;
        nlinks += links_of(&steps[i]);
        nbytes += (memory_of(call) + 15) & -16;
        work += call->work;
    }
    Turns *turns = test && work < TILL_CLOCK / 8 ? calloc(1, sizeof *turns) : NULL;
    if (!turns)
        return NULL;
    *turns = (Turns){.steps = steps, .start = start, .condition = steps[test].number, .work = work};
    turns->space = calloc((size_t)nlinks + 1, sizeof *turns->space);
    turns->memory = malloc((size_t)nbytes);
    if (!turns->space || !turns->memory) {
        turns_free(turns);
        return NULL;
    }
    Link *link = turns->links = turns->space + 1;
    char *memory = turns->memory;
    for (int i = start; i < pc; i++) {
        if (i == test) {
            turns->test = link;
            *link++ = (Link){.run = test_condition};
            i++;
            continue;
        }
        link = add_step(turns, &steps[i], addresses, memory, link);
        memory += (memory_of(steps[i].bound.call) + 15) & -16;
    }
    link->run = end_turn;
    turns->last = link;
    return turns;
}

void turns_free(Turns *turns)
{
    if (turns) {
        free(turns->space);
        free(turns->memory);
    }
    free(turns);
}

/* Return the pc of a link's step. */
static int step_of(const Turns *turns, const Link *link)
{
    int pc = turns->start;
    for (const Link *next = turns->links; (next += links_of(&turns->steps[pc])) <= link;)
        pc++;
    return pc;
}

int run_turns(Machine *m, Turns *turns)
{
    const Tensor *condition = &m->arguments[turns->condition];
    if (condition->type->dtype != MLVM_BOOL || condition->type->size != 1)
        return turns->start;
    turns->pool = m->pool;
    turns->test->at[0] = condition->address;
    double left = TILL_CLOCK;
    const Link *link = turns->last;
    for (; left > 0 && link == turns->last; left -= turns->work)
        link = turns->links->run(turns->links);
    m->worked += TILL_CLOCK - (int64_t)left;
    return link == turns->last ? turns->start : step_of(turns, link);
}
