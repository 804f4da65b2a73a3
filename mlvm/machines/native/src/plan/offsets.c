/* Search for offsets of buffers with fixed lifetimes below a capacity.
 *
 * In:       buffers with ranges of sections as lifetimes (offsets.h).
 * Out:      an offset for each buffer; or that no solution exists, or that the node limit was reached.
 * Must hold: the search equals `_searched` in mlvm/arena/search.py, node by node: both return the same
 *           offsets, and the docstring of that file explains the algorithm. In the same way,
 *           `place_best_fit` equals `_place` in mlvm/arena/planner.py.
 * Callers:  machine/offsets.c.
 */
#include "offsets.h"

#include <stdlib.h>
#include <string.h>

/* Part: buffers without an offset that share no section with other parts. */
typedef struct {
    int64_t low, high;    /* sections low .. high - 1 */
    int64_t items, count; /* range of the buffers in `pool` */
    int64_t origin;       /* node that created it, and fails with it */
    int64_t next;         /* part to solve after it, or -1 */
} Part;

/* Node: a part, and the buffers that may be the lowest in a section of the part. */
typedef struct {
    Part part;
    int64_t section, left, right; /* the section, and the valley around it */
    int64_t candidates, count, at;
    int64_t placed; /* placed buffer, or -1 */
    int64_t raises, pool, parts;
    uint64_t key;
} Node;

typedef struct {
    int64_t section, floor;
} Raise;

/* Growable stack. */
typedef struct {
    char *items;
    int64_t count, room;
} Stack;

typedef struct {
    const Buffers *buffers;
    int64_t *floor, *top, *candidates, *low;
    char *is_joined, *is_placed;
    Stack nodes, parts, raises, pool;
    int has_failed; /* an allocation failed */
} Search;

#define NODE(search, i) (&((Node *)(search)->nodes.items)[i])
#define PART(search, i) (&((Part *)(search)->parts.items)[i])
#define POOL(search, i) (((int64_t *)(search)->pool.items)[i])

/* Push an item of that size; set `has_failed` without memory. */
static void push(Search *search, Stack *stack, const void *item, size_t size)
{
    if (stack->count == stack->room) {
        int64_t room = 2 * stack->room + 64;
        char *items = realloc(stack->items, (size_t)room * size);
        if (!items) {
            search->has_failed = 1;
            return;
        }
        stack->items = items;
        stack->room = room;
    }
    memcpy(stack->items + (size_t)stack->count++ * size, item, size);
}

static void push_buffer(Search *search, int64_t buffer)
{
    push(search, &search->pool, &buffer, sizeof buffer);
}

static void raise_floor(Search *search, int64_t section, int64_t floor)
{
    Raise raise = {section, search->floor[section]};
    push(search, &search->raises, &raise, sizeof raise);
    search->floor[section] = floor;
}

/* Return the highest floor in the buffer's sections, a lower bound of its offset. */
static int64_t lowest(const Search *search, int64_t buffer)
{
    int64_t low = 0;
    for (int64_t x = search->buffers->first[buffer]; x <= search->buffers->last[buffer]; x++)
        if (search->floor[x] > low)
            low = search->floor[x];
    return low;
}

/* Undo the choice of a node. */
static void undo(Search *search, Node *node)
{
    while (search->raises.count > node->raises) {
        Raise raise = ((Raise *)search->raises.items)[--search->raises.count];
        search->floor[raise.section] = raise.floor;
    }
    if (node->placed >= 0)
        search->is_placed[node->placed] = 0;
    node->placed = -1;
    search->pool.count = node->pool;
    search->parts.count = node->parts;
}

/* Sort buffers by their lowest offsets, and stack the buffers of each section in this order; no
 * placement has a lower top in the section. Return whether all stacks are within the capacity. */
static int stack_up(Search *search, int64_t from, int64_t to, int64_t items, int64_t count)
{
    const Buffers *buffers = search->buffers;
    int64_t *low = search->low, *top = search->top, *sorted = &POOL(search, items);
    for (int64_t k = 0; k < count; k++) {
        int64_t i = sorted[k], at = k;
        low[i] = lowest(search, i);
        while (at &&
               (low[sorted[at - 1]] > low[i] || (low[sorted[at - 1]] == low[i] && sorted[at - 1] > i))) {
            sorted[at] = sorted[at - 1];
            at--;
        }
        sorted[at] = i;
    }
    memset(top + from, 0, sizeof *top * (size_t)(to - from));
    for (int64_t k = 0; k < count; k++) {
        int64_t i = sorted[k];
        for (int64_t x = buffers->first[i]; x <= buffers->last[i]; x++) {
            top[x] = (top[x] > low[i] ? top[x] : low[i]) + buffers->size[i];
            if (top[x] > buffers->capacity)
                return 0;
        }
    }
    return 1;
}

/* Return the last section of the part with the same floor as `left` and all sections between. */
static int64_t end_of_level(const Search *search, const Part *part, int64_t left)
{
    int64_t right = left;
    while (right + 1 < part->high && search->floor[right + 1] == search->floor[left])
        right++;
    return right;
}

/* Return the depth of a level: its distance to the lower of the floors on both sides; 0 if it is
 * not a valley. */
static int64_t depth(const Search *search, const Part *part, int64_t left, int64_t right)
{
    int64_t before = left > part->low ? search->floor[left - 1] - search->floor[left] : INT64_MAX;
    int64_t after = right + 1 < part->high ? search->floor[right + 1] - search->floor[left] : INT64_MAX;
    int64_t least = before < after ? before : after;
    return least > 0 ? least : 0;
}

/* Count the blocks that may be at the floor of each section, and raise valleys without such
 * blocks to their lower side, until none remain. This does not change any lowest offset. */
static void fill_valleys(Search *search, const Part *part)
{
    const Buffers *buffers = search->buffers;
    int64_t *count = search->candidates;
    for (int has_changed = 1; has_changed && !search->has_failed;) {
        has_changed = 0;
        memset(count + part->low, 0, sizeof *count * (size_t)(part->high - part->low));
        for (int64_t k = 0; k < part->count; k++) {
            int64_t i = POOL(search, part->items + k);
            for (int64_t x = buffers->first[i]; x <= buffers->last[i]; x++)
                count[x] += search->floor[x] == search->low[i];
        }
        for (int64_t left = part->low, right; left < part->high; left = right + 1) {
            right = end_of_level(search, part, left);
            int64_t up = depth(search, part, left, right), candidates = 0;
            for (int64_t x = left; x <= right; x++)
                candidates += count[x];
            if (!up || candidates)
                continue;
            has_changed = 1;
            for (int64_t x = left; x <= right; x++)
                raise_floor(search, x, search->floor[x] + up);
        }
    }
}

/* Choose the section of a node, in a valley: the section with the fewest candidates, or with the
 * least slack. */
static void choose_section(Search *search, Node *node)
{
    const Part *part = &node->part;
    const int64_t *count = search->candidates, *top = search->top;
    int fewest = search->buffers->fewest;
    node->section = -1;
    for (int64_t left = part->low, right; left < part->high; left = right + 1) {
        right = end_of_level(search, part, left);
        if (!depth(search, part, left, right))
            continue;
        for (int64_t x = left; x <= right; x++) {
            int64_t best = node->section, fewer = best < 0 || !fewest ? 0 : count[best] - count[x];
            if (best >= 0 && (fewer < 0 || (fewer == 0 && top[x] <= top[best])))
                continue;
            node->section = x;
            node->left = left;
            node->right = right;
        }
    }
}

/* Open a node for a part. Return 0 if the part is known to have no solution. */
static int open_node(Search *search, Part part)
{
    const Buffers *buffers = search->buffers;
    if (part.origin != search->nodes.count - 1) /* otherwise `divide` has just stacked them */
        stack_up(search, part.low, part.high, part.items, part.count);
    uint64_t key = 1 + (uint64_t)buffers->capacity;
    for (int64_t k = 0; k < part.count; k++) {
        int64_t i = POOL(search, part.items + k);
        key += buffers->hash[i] * (uint64_t)(search->low[i] + 1);
    }
    if (buffers->failed[key >> buffers->shift] == key)
        return 0;
    fill_valleys(search, &part);
    if (search->has_failed)
        return 0;
    Node node = {.part = part, .placed = -1, .key = key, .candidates = search->pool.count};
    node.raises = search->raises.count;
    node.parts = search->parts.count;
    choose_section(search, &node);
    for (int64_t k = 0; k < part.count; k++) {
        int64_t i = POOL(search, part.items + k);
        if (buffers->first[i] < node.left || node.section < buffers->first[i] ||
            buffers->last[i] < node.section || node.right < buffers->last[i])
            continue;
        push_buffer(search, i);
        if (search->has_failed)
            return 0;
        int64_t at = search->pool.count - 1;
        for (; at > node.candidates && buffers->rank[POOL(search, at - 1)] > buffers->rank[i]; at--)
            POOL(search, at) = POOL(search, at - 1);
        POOL(search, at) = i;
    }
    node.pool = search->pool.count;
    node.count = node.pool - node.candidates;
    push(search, &search->nodes, &node, sizeof node);
    return 1;
}

/* Return the lowest offset in the node's section, if no buffer is at its floor: each buffer is
 * above the floors of its sections, or on a buffer that is not in this section. */
static int64_t next_floor(const Search *search, const Node *node)
{
    const int64_t *first = search->buffers->first, *last = search->buffers->last;
    int64_t section = node->section, lowest_of_all = INT64_MAX, *low_of = search->low;
    for (int64_t k = 0; k < node->part.count; k++) {
        int64_t i = POOL(search, node->part.items + k);
        low_of[i] = lowest(search, i);
    }
    for (int64_t k = 0; k < node->part.count; k++) {
        int64_t i = POOL(search, node->part.items + k), low = INT64_MAX;
        if (section < first[i] || last[i] < section)
            continue;
        if (first[i] < node->left || node->right < last[i])
            low = low_of[i];
        else
            for (int64_t q = 0; q < node->part.count; q++) {
                int64_t j = POOL(search, node->part.items + q);
                if (last[j] < first[i] || last[i] < first[j] || (first[j] <= section && section <= last[j]))
                    continue;
                int64_t end = low_of[j] + search->buffers->size[j];
                low = end < low ? end : low;
            }
        lowest_of_all = low < lowest_of_all ? low : lowest_of_all;
    }
    return lowest_of_all;
}

/* Make the next choice of a node. Return 0 if none remains. */
static int choose(Search *search, Node *node)
{
    const Buffers *buffers = search->buffers;
    int64_t at = node->at++, floor = search->floor[node->section];
    if (at == node->count) {
        int64_t next = next_floor(search, node);
        if (next > buffers->capacity)
            return 0;
        raise_floor(search, node->section, next);
        return 1;
    }
    int64_t i = node->placed = POOL(search, node->candidates + at);
    search->is_placed[i] = 1;
    buffers->offset[i] = floor;
    for (int64_t x = buffers->first[i]; x <= buffers->last[i]; x++)
        raise_floor(search, x, floor + buffers->size[i]);
    return 1;
}

/* Divide the buffers without an offset into parts. Return the first part to solve, -1 if all are
 * solved, or -2 if they do not fit. */
static int64_t divide(Search *search, int64_t origin)
{
    const Buffers *buffers = search->buffers;
    Node *node = NODE(search, origin);
    Part part = node->part;
    int64_t items = search->pool.count;
    for (int64_t k = 0; k < part.count; k++)
        if (POOL(search, part.items + k) != node->placed)
            push_buffer(search, POOL(search, part.items + k));
    int64_t count = search->pool.count - items, next = part.next;
    if (search->has_failed || !stack_up(search, part.low, part.high, items, count))
        return -2;
    char *is_joined = search->is_joined;
    memset(is_joined + part.low, 0, (size_t)(part.high - part.low));
    for (int64_t k = 0; k < count; k++) {
        int64_t i = POOL(search, items + k);
        memset(is_joined + buffers->first[i], 1, (size_t)(buffers->last[i] - buffers->first[i]));
    }
    for (int64_t high = part.high, low; high > part.low; high = low) {
        for (low = high - 1; low > part.low && is_joined[low - 1];)
            low--;
        Part of = {low, high, search->pool.count, 0, origin, next};
        for (int64_t k = 0; k < count; k++) {
            int64_t i = POOL(search, items + k);
            if (low <= buffers->first[i] && buffers->first[i] < high)
                push_buffer(search, i);
        }
        of.count = search->pool.count - of.items;
        if (of.count) {
            next = search->parts.count;
            push(search, &search->parts, &of, sizeof of);
        }
    }
    return next;
}

/* Return to the node that created a part without a solution. */
static void unwind(Search *search, int64_t origin)
{
    while (search->nodes.count > origin + 1)
        undo(search, NODE(search, --search->nodes.count));
}

enum { BETWEEN_CHECKS = (1 << 12) - 1 }; /* nodes */

static int run(Search *search, Buffers *buffers)
{
    for (int64_t i = 0; i < buffers->count; i++)
        push_buffer(search, i);
    Part all = {0, buffers->sections, 0, buffers->count, -1, -1};
    if (search->has_failed || !stack_up(search, 0, all.high, 0, all.count) || !open_node(search, all))
        return OFFSETS_NONE;
    while (search->nodes.count) {
        int64_t top = search->nodes.count - 1;
        Node *node = NODE(search, top);
        undo(search, node);
        if (node->at > node->count) {
            buffers->failed[node->key >> buffers->shift] = node->key;
            unwind(search, node->part.origin);
            continue;
        }
        if (node->at < node->count) {
            int64_t twin = buffers->twin[POOL(search, node->candidates + node->at)];
            if (twin >= 0 && !search->is_placed[twin]) {
                node->at++;
                continue;
            }
        }
        if (!buffers->nodes)
            return OFFSETS_LIMIT;
        if (!(buffers->nodes-- & BETWEEN_CHECKS) && buffers->interrupted(buffers->state))
            return OFFSETS_INTERRUPTED;
        if (!choose(search, node))
            continue;
        int64_t next = search->has_failed ? -2 : divide(search, top);
        if (next == -1)
            return search->has_failed ? OFFSETS_NO_MEMORY : OFFSETS_FOUND;
        if (next >= 0 && !search->has_failed && !open_node(search, *PART(search, next)))
            unwind(search, PART(search, next)->origin);
        if (search->has_failed)
            return OFFSETS_NO_MEMORY;
    }
    return OFFSETS_NONE;
}

int search_offsets(Buffers *buffers)
{
    if (!buffers->count)
        return OFFSETS_FOUND;
    size_t count = (size_t)buffers->count, sections = (size_t)buffers->sections;
    int64_t *numbers = calloc(3 * sections + count, sizeof *numbers);
    char *flags = calloc(sections + count, 1);
    Search search = {.buffers = buffers, .has_failed = !numbers || !flags};
    int status = OFFSETS_NO_MEMORY;
    if (!search.has_failed) {
        search.floor = numbers;
        search.top = numbers + sections;
        search.candidates = numbers + 2 * sections;
        search.low = numbers + 3 * sections;
        search.is_joined = flags;
        search.is_placed = flags + sections;
        status = run(&search, buffers);
        status = search.has_failed ? OFFSETS_NO_MEMORY : status;
    }
    free(search.nodes.items);
    free(search.parts.items);
    free(search.raises.items);
    free(search.pool.items);
    free(numbers);
    free(flags);
    return status;
}

int place_best_fit(int64_t count, const int64_t *sequence, const int64_t *size, const int64_t *start,
                   const int64_t *end, int64_t *offset)
{
    int64_t *sorted = malloc(sizeof *sorted * (size_t)(count + 1)); /* placed buffers by offset */
    if (!sorted)
        return -1;
    for (int64_t k = 0; k < count; k++) {
        int64_t i = sequence[k], floor = 0, best = INT64_MAX, at = 0;
        for (int64_t q = 0; q < k; q++) {
            int64_t j = sorted[q];
            if (start[j] >= end[i] || end[j] <= start[i])
                continue;
            int64_t gap = offset[j] - floor, top = offset[j] + size[j];
            if (gap >= size[i] && gap < best) {
                best = gap;
                offset[i] = floor;
            }
            floor = top > floor ? top : floor;
        }
        if (best == INT64_MAX)
            offset[i] = floor;
        while (at < k && offset[sorted[at]] < offset[i])
            at++;
        memmove(sorted + at + 1, sorted + at, sizeof *sorted * (size_t)(k - at));
        sorted[at] = i;
    }
    free(sorted);
    return 0;
}
