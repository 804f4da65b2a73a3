/* Residuals: records of copies of tensors, on a stack, as defined by mlvm/machines/residuals.py.
 * The runner of the loop owns the memory and the table of records. */
#ifndef MLVM_RECORDS_H
#define MLVM_RECORDS_H

#include "loop.h"

/* A record is contiguous: the number of parts, the descriptions of the parts, and the elements. */
typedef struct Record Record;

typedef struct Records Records;
struct Records {
    /* Allocate a record on top of the stack, and an entry in the table; NULL if memory is exhausted. */
    Record *(*take)(Records *records, int64_t nbytes);
    Record **table; /* record i is table[step * i] */
    int64_t step, count;
    int64_t first; /* number of records of enclosing programs */
    char *why;     /* buffer of RECORDS_WHY bytes for error messages */
};
enum { RECORDS_WHY = 100 };

/* Each returns NULL, or an error message. */
const char *records_push(Records *records, const Value *params, int64_t count);
const char *records_read(Records *records, const Value *params, int64_t count);
const char *records_read_rows(Records *records, const Value *params, int64_t count);
const char *records_add(Records *records, const Value *params, int64_t count);

#endif
