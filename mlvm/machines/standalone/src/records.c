#include "records.h"

#include "../../mlvm.h"

#include <string.h>

enum { ALIGNMENT = 16 };
static const char FULL[] = "the records of residuals need more bytes than --records says";
static const char WRONG[] = "no record of that number and these types is there";

typedef struct {
    const Type *type; /* types are equal if their addresses are */
    size_t data;      /* bytes from where the record begins */
} Part;

typedef struct {
    int64_t nparts;
    int64_t sum_of[2]; /* the records that this one is to be the sum of */
    Part parts[];
} Record;

static size_t rounded(size_t nbytes)
{
    return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static uint64_t *offset_of(const Records *records, int64_t number)
{
    size_t end = records->nbytes / sizeof(uint64_t) * sizeof(uint64_t);
    return (uint64_t *)(void *)(records->memory + end) - number;
}

static Record *record_of(const Records *records, int64_t number)
{
    return number > 0 && number <= records->count
               ? (Record *)(void *)(records->memory + *offset_of(records, number))
               : NULL;
}

void records_clear(Records *records)
{
    records->used = 0;
    records->count = 0;
}

void records_begin(Records *records)
{
    records_clear(records);
}

void records_end(Records *records)
{
    records_clear(records);
}

/* Room for a record of so many parts and bytes of data; NULL if there is none. Where addresses have 32
 * bits the parts may be more bytes together than a size_t counts. */
static Record *take(Records *records, int64_t nparts, uint64_t data)
{
    size_t head = rounded(sizeof(Record) + (size_t)nparts * sizeof(Part));
    size_t index = ((size_t)records->count + 2) * sizeof(uint64_t);
    if (index > records->nbytes || records->used + head + data > records->nbytes - index)
        return NULL;
    Record *record = (Record *)(void *)(records->memory + records->used);
    record->nparts = nparts;
    *offset_of(records, ++records->count) = records->used;
    records->used += head + (size_t)data;
    return record;
}

const char *records_push(Records *records, const Value *params, int64_t count)
{
    int64_t nparts = count - 1;
    uint64_t data = 0;
    size_t at = rounded(sizeof(Record) + (size_t)nparts * sizeof(Part));
    for (int64_t i = 0; i < nparts; i++)
        data += rounded((size_t)params[i + 1].as.tensor->type->nbytes);
    Record *record = take(records, nparts, data);
    if (!record)
        return FULL;
    for (int64_t i = 0; i < nparts; i++) {
        const Tensor *x = params[i + 1].as.tensor;
        record->parts[i] = (Part){x->type, at};
        memcpy((char *)record + at, x->address, (size_t)x->type->nbytes);
        at += rounded((size_t)x->type->nbytes);
    }
    memcpy(params[0].as.tensor->address, &records->count, sizeof records->count);
    return NULL;
}

const char *records_read(const Records *records, const Value *params, int64_t count)
{
    int64_t n = count - 1, number;
    memcpy(&number, params[n].as.tensor->address, sizeof number);
    const Record *record = record_of(records, number);
    int is_match = !number || (record && n <= record->nparts);
    for (int64_t i = 0; number && is_match && i < n; i++)
        is_match = record->parts[i].type == params[i].as.tensor->type;
    if (!is_match)
        return WRONG;
    for (int64_t i = 0; i < n; i++) {
        const Tensor *out = params[i].as.tensor;
        if (number)
            memcpy(out->address, (const char *)record + record->parts[i].data, (size_t)out->type->nbytes);
        else
            memset(out->address, 0, (size_t)out->type->nbytes);
    }
    return NULL;
}

/* o[i ..] becomes that element of record p[i ..]. */
const char *records_read_rows(const Records *records, const Value *params, int64_t count)
{
    int64_t n = count - 1, number;
    const Tensor *numbers = params[n].as.tensor;
    for (int64_t row = 0; row < numbers->type->size; row++) {
        memcpy(&number, numbers->address + row * (int64_t)sizeof number, sizeof number);
        const Record *record = record_of(records, number);
        if (number && (!record || n > record->nparts))
            return WRONG;
        for (int64_t i = 0; i < n; i++) {
            const Tensor *out = params[i].as.tensor;
            int64_t nbytes = out->type->nbytes / numbers->type->size;
            if (number && record->parts[i].type->nbytes != nbytes)
                return WRONG;
            if (number)
                memcpy(out->address + row * nbytes, (const char *)record + record->parts[i].data,
                       (size_t)nbytes);
            else
                memset(out->address + row * nbytes, 0, (size_t)nbytes);
        }
    }
    return NULL;
}

/* An empty record for the sum of two of the same types, whose parts are still to be summed. Returns its
 * number, 0 where one is not there, -1 without memory. A record of zeros is no record. */
static int64_t begin_sum(Records *records, int64_t p, int64_t q)
{
    if (!p || !q)
        return p ? p : q;
    const Record *x = record_of(records, p), *y = record_of(records, q);
    if (!x || !y || x->nparts != y->nparts)
        return 0;
    uint64_t data = 0;
    for (int64_t i = 0; i < x->nparts; i++)
        data += rounded((size_t)x->parts[i].type->nbytes);
    Record *sum = take(records, x->nparts, data);
    if (!sum)
        return -1;
    sum->sum_of[0] = p;
    sum->sum_of[1] = q;
    memcpy(sum->parts, x->parts, (size_t)x->nparts * sizeof(Part));
    return records->count;
}

#define ADD(T, lanes)                                  \
    for (int64_t i = 0; i < type->size * (lanes); i++) \
        ((T *)(void *)out)[i] = ((const T *)(const void *)x)[i] + ((const T *)(const void *)y)[i];
static const char *add_part(Records *records, const Type *type, char *out, const char *x, const char *y)
{
    switch (type->dtype) {
    case MLVM_F32: ADD(float, 1) return NULL;
    case MLVM_F64: ADD(double, 1) return NULL;
    case MLVM_C64: ADD(float, 2) return NULL;
    case MLVM_C128: ADD(double, 2) return NULL;
    case MLVM_I64: /* numbers of records: what they name is summed after this record */
        for (int64_t i = 0; i < type->size; i++) {
            int64_t pair[2], sum;
            memcpy(&pair[0], x + i * 8, 8);
            memcpy(&pair[1], y + i * 8, 8);
            if ((sum = begin_sum(records, pair[0], pair[1])) < 0)
                return FULL;
            memcpy(out + i * 8, &sum, 8);
        }
        return NULL;
    default: return "residuals of that dtype are not summed without Python";
    }
}

const char *records_add(Records *records, const Value *params, int64_t count)
{
    if (count != 3)
        return WRONG;
    const Tensor *total = params[0].as.tensor, *p = params[1].as.tensor, *q = params[2].as.tensor;
    int64_t first = records->count;
    const char *wrong = add_part(records, total->type, total->address, p->address, q->address);
    for (int64_t number = first + 1; !wrong && number <= records->count; number++) {
        Record *sum = record_of(records, number); /* of which there are more meanwhile */
        const Record *x = record_of(records, sum->sum_of[0]), *y = record_of(records, sum->sum_of[1]);
        for (int64_t i = 0; !wrong && i < sum->nparts; i++)
            wrong = add_part(records, sum->parts[i].type, (char *)sum + sum->parts[i].data,
                             (const char *)x + x->parts[i].data, (const char *)y + y->parts[i].data);
    }
    return wrong;
}
