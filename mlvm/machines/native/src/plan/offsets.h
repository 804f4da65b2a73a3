/* Search for offsets of buffers with fixed lifetimes below a capacity. */
#ifndef MLVM_OFFSETS_H
#define MLVM_OFFSETS_H

#include <stdint.h>

enum { OFFSETS_FOUND, OFFSETS_NONE, OFFSETS_LIMIT, OFFSETS_NO_MEMORY, OFFSETS_INTERRUPTED };

/* Buffers, and the state that outlives a search.
 *
 * size, first, last: bytes, and the first and last section of each buffer.
 * twin: the buffer before with the same size and sections, or -1.
 * rank: order in which buffers are tried.
 * hash: random numbers of the buffers.
 * failed: hash table of states without a solution, with 2^(64 - shift) entries. fewest: whether the
 * next section is that with the fewest candidates, not that with the least slack. nodes: the number
 * of nodes that the search may still visit. offset: result. interrupted: function that is called
 * every few thousand nodes; if it returns true, the search stops. */
typedef struct {
    int64_t count, sections, capacity;
    const int64_t *size, *first, *last, *twin, *rank;
    const uint64_t *hash;
    uint64_t *failed;
    int shift, fewest;
    int64_t nodes, *offset;
    int (*interrupted)(void *state);
    void *state;
} Buffers;

/* Search. Return one of the results above. */
int search_offsets(Buffers *buffers);

/* Place buffers, which are in use from `start` to `end`, in a sequence, each by best fit. Return
 * 0, or -1 without memory. */
int place_best_fit(int64_t count, const int64_t *sequence, const int64_t *size, const int64_t *start,
                   const int64_t *end, int64_t *offset);

#endif
