#include "records.h"

#include "../../../mlvm.h"
#include "kernels/half.h"

#include <stdio.h>
#include <string.h>

enum { ALIGNMENT = 16 };
static const char FULL[] = "the records of residuals exceed the limit of --records";
static const char NO_TENSORS[] = "expected tensors, and an i64[] as the record's number";

/* Offsets are in bytes from the start of the record. */
typedef struct {
    int32_t dtype, ndim;
    int64_t nbytes, shape, data;
} Part;

struct Record {
    int64_t nparts, nbytes;
    int64_t rank;   /* greater than the ranks of the records it refers to, so sums terminate */
    int64_t addend; /* record that is still to be added to this one; 0: none */
    Part parts[];
};

static int64_t rounded(int64_t nbytes)
{
    return (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static void copy(void *to, const void *from, int64_t nbytes)
{
    if (nbytes)
        memcpy(to, from, (size_t)nbytes);
}

static Record *record_of(const Records *records, int64_t number)
{
    return records->first < number && number <= records->count ? records->table[records->step * number]
                                                               : NULL;
}

/* Return whether the parameters are tensors, and parameter `number` has record numbers. */
static int are_tensors(const Value *params, int64_t count, int64_t number)
{
    for (int64_t i = 0; i < count; i++)
        if (params[i].kind != TENSOR)
            return 0;
    return number < count && params[number].as.tensor->type->dtype == MLVM_I64;
}

const char *records_push(Records *records, const Value *params, int64_t count)
{
    if (!count || !are_tensors(params, count, 0) || params->as.tensor->type->ndim)
        return NO_TENSORS;
    int64_t n = count - 1, shape = (int64_t)(sizeof(Record) + (size_t)n * sizeof(Part)), data = shape;
    for (int64_t i = 1; i < count; i++)
        data += params[i].as.tensor->type->ndim * (int64_t)sizeof(int64_t);
    int64_t nbytes = data = rounded(data);
    for (int64_t i = 1; i < count; i++)
        nbytes += rounded(params[i].as.tensor->type->nbytes);
    Record *record = records->take(records, nbytes);
    if (!record)
        return FULL;
    records->table[records->step * ++records->count] = record;
    *record = (Record){.nparts = n, .nbytes = nbytes, .rank = records->count};
    for (int64_t i = 0; i < n; i++) {
        const Tensor *x = params[i + 1].as.tensor;
        const Type *type = x->type;
        int64_t lengths = type->ndim * (int64_t)sizeof(int64_t);
        record->parts[i] = (Part){type->dtype, type->ndim, type->nbytes, shape, data};
        copy((char *)record + shape, type->shape, lengths);
        copy((char *)record + data, x->address, type->nbytes);
        shape += lengths;
        data += rounded(type->nbytes);
    }
    copy(params->as.tensor->address, &records->count, sizeof records->count);
    return NULL;
}

/* Return whether the first n parts of a record have the types of the parameters. */
static int fits(const Record *record, const Value *params, int64_t n)
{
    if (!record || n > record->nparts)
        return 0;
    for (int64_t i = 0; i < n; i++) {
        const Part *part = &record->parts[i];
        const Type *type = params[i].as.tensor->type;
        if (part->dtype != type->dtype || part->ndim != type->ndim || part->nbytes != type->nbytes ||
            (type->ndim &&
             memcmp((const char *)record + part->shape, type->shape, (size_t)type->ndim * sizeof(int64_t))))
            return 0;
    }
    return 1;
}

/* For each element of `numbers`, read the part of the record at that index; number 0 stands for
 * a record of zeros. */
static const char *read_each(Records *records, const Value *params, int64_t n)
{
    const Tensor *numbers = params[n].as.tensor;
    int64_t rows = numbers->type->size, number;
    for (int64_t row = 0; row < rows; row++) {
        copy(&number, numbers->address + row * (int64_t)sizeof number, sizeof number);
        const Record *record = record_of(records, number);
        if (number && !fits(record, params, n)) {
            snprintf(records->why, RECORDS_WHY, "unknown record %lld of %lld tensors with these types",
                     (long long)number, (long long)n);
            return records->why;
        }
        for (int64_t i = 0; i < n; i++) {
            const Tensor *out = params[i].as.tensor;
            int64_t nbytes = out->type->nbytes / rows, at = row * nbytes;
            if (number)
                copy(out->address + at, (const char *)record + record->parts[i].data + at, nbytes);
            else if (nbytes)
                memset(out->address + at, 0, (size_t)nbytes);
        }
    }
    return NULL;
}

const char *records_read(Records *records, const Value *params, int64_t count)
{
    if (!count || !are_tensors(params, count, count - 1) || params[count - 1].as.tensor->type->ndim)
        return NO_TENSORS;
    return read_each(records, params, count - 1);
}

const char *records_read_rows(Records *records, const Value *params, int64_t count)
{
    if (!count || !are_tensors(params, count, count - 1) || !params[count - 1].as.tensor->type->ndim)
        return NO_TENSORS;
    const Type *rows = params[count - 1].as.tensor->type;
    for (int64_t i = 0; i < count; i++) {
        const Type *type = params[i].as.tensor->type;
        if (type->ndim < rows->ndim ||
            memcmp(type->shape, rows->shape, (size_t)rows->ndim * sizeof *rows->shape) ||
            (rows->size && type->nbytes % rows->size))
            return "expected a row of each tensor for each number of a record";
    }
    return read_each(records, params, count - 1);
}

/* Return the number of the sum of two records with lower ranks, to which the second is added
 * later; -1 if there is no memory. A record of zeros is omitted. */
static int64_t begin_sum(Records *records, int64_t rank, int64_t p, int64_t q, const char **wrong)
{
    if (!p || !q)
        return p ? p : q;
    const Record *x = record_of(records, p), *y = record_of(records, q);
    if (!x || !y || x->rank >= rank || y->rank >= rank || x->nparts != y->nparts ||
        memcmp(x->parts, y->parts, (size_t)x->nparts * sizeof(Part))) {
        snprintf(records->why, RECORDS_WHY, "records %lld and %lld do not exist or differ in types",
                 (long long)p, (long long)q);
        *wrong = records->why;
        return -1;
    }
    Record *sum = records->take(records, x->nbytes);
    if (!sum) {
        *wrong = FULL;
        return -1;
    }
    copy(sum, x, x->nbytes);
    sum->rank = x->rank > y->rank ? x->rank : y->rank;
    sum->addend = q;
    records->table[records->step * ++records->count] = sum;
    return records->count;
}

#define ADD(T, narrow, widen)                                         \
    for (int64_t i = 0; i < nbytes / (int64_t)sizeof(T); i++)         \
        ((T *)(void *)out)[i] = narrow(widen(((T *)(void *)out)[i]) + \
                                       widen(((const T *)(const void *)y)[i]));
#define AS_IS(x) (x)

/* Write the numbers of sums of records, which are computed later. */
static const char *add_numbers(Records *records, int64_t rank, int64_t nbytes, char *out, const char *x,
                               const char *y)
{
    const char *wrong = NULL;
    for (int64_t i = 0, p, q; i < nbytes && !wrong; i += (int64_t)sizeof p) {
        memcpy(&p, x + i, sizeof p);
        memcpy(&q, y + i, sizeof q);
        p = begin_sum(records, rank, p, q, &wrong);
        memcpy(out + i, &p, sizeof p);
    }
    return wrong;
}

/* Add the elements of y to those of `out`. */
static const char *add_part(Records *records, const Record *sum, const Part *part, const char *y)
{
    char *out = (char *)sum + part->data;
    int64_t nbytes = part->nbytes;
    switch (part->dtype) {
    case MLVM_F32:
    case MLVM_C64: ADD(float, AS_IS, AS_IS) return NULL;
    case MLVM_F64:
    case MLVM_C128: ADD(double, AS_IS, AS_IS) return NULL;
    case MLVM_F16: ADD(uint16_t, narrow_f16, widen_f16) return NULL;
    case MLVM_BF16: ADD(uint16_t, narrow_bf16, widen_bf16) return NULL;
    case MLVM_I64: return add_numbers(records, sum->rank, nbytes, out, out, y);
    default: return "only floats and records can be added";
    }
}

const char *records_add(Records *records, const Value *params, int64_t count)
{
    if (count != 3 || !are_tensors(params, 3, 0) || params[1].as.tensor->type->dtype != MLVM_I64 ||
        params[2].as.tensor->type->dtype != MLVM_I64)
        return NO_TENSORS;
    const Tensor *total = params[0].as.tensor, *p = params[1].as.tensor, *q = params[2].as.tensor;
    int64_t first = records->count, nbytes = total->type->nbytes;
    if (p->type->nbytes != nbytes || q->type->nbytes != nbytes)
        return NO_TENSORS;
    const char *wrong = add_numbers(records, first + 1, nbytes, total->address, p->address, q->address);
    for (int64_t number = first + 1; !wrong && number <= records->count; number++) {
        const Record *sum = record_of(records, number); /* the table may have grown */
        const Record *y = record_of(records, sum->addend);
        for (int64_t i = 0; !wrong && i < sum->nparts; i++) {
            const Part *part = &sum->parts[i];
            wrong = add_part(records, sum, part, (const char *)y + part->data);
        }
    }
    return wrong;
}
