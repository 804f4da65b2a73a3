/* Residuals in the caller's memory: see mlvm/machines/residuals.py. */
#ifndef MLVM_STANDALONE_RECORDS_H
#define MLVM_STANDALONE_RECORDS_H

#include "../../native/src/plan/loop.h"

#include <stddef.h>

/* Records grow from the front of the memory, their offsets from its end. */
typedef struct {
    char *memory;
    size_t nbytes, used;
    int64_t count;
} Records;

void records_clear(Records *records);
void records_begin(Records *records);
void records_end(Records *records);

/* Each returns NULL, or what is wrong. */
const char *records_push(Records *records, const Value *params, int64_t count);
const char *records_read(const Records *records, const Value *params, int64_t count);
const char *records_read_rows(const Records *records, const Value *params, int64_t count);
const char *records_add(Records *records, const Value *params, int64_t count);

#endif
