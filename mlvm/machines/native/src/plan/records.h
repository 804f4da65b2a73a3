/* Residuals: records of copies of tensors, on a stack, as mlvm/machines/residuals.py defines them. Their
 * memory, and the table of where they lie, are those of whoever runs the loop. */
#ifndef MLVM_RECORDS_H
#define MLVM_RECORDS_H

#include "loop.h"

/* A record lies in one piece: how many parts it has, what each is, and the elements of each. */
typedef struct Record Record;

typedef struct Records Records;
struct Records {
    /* Memory of so many bytes on top of the stack, and a place in the table for one record more; NULL if
     * there is none. */
    Record *(*take)(Records *records, int64_t nbytes);
    Record **table; /* record i is table[step * i] */
    int64_t step, count;
    int64_t first; /* records of programs around this one */
    char *why;     /* room for what is wrong, RECORDS_WHY bytes */
};
enum { RECORDS_WHY = 100 };

/* Each returns NULL, or what is wrong. */
const char *records_push(Records *records, const Value *params, int64_t count);
const char *records_read(Records *records, const Value *params, int64_t count);
const char *records_read_rows(Records *records, const Value *params, int64_t count);
const char *records_add(Records *records, const Value *params, int64_t count);

#endif
