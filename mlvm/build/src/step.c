/* A step without Python: the loop of plan/loop.c on the tables of a build, in the caller's
 * memory. */
#include "step.h"

#include "built.h"

#include "../../machines/native/src/plan/processor.h"
#include "../../machines/native/src/plan/records.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { HEADER = 64 };
static const double WORTH_SHARING = 4000; /* in nanoseconds; waking other threads needs about 500 */

/* --- the caller's threads --- */

struct Pool {
    const struct step_threads *threads; /* NULL for a single thread */
    unsigned char *memory;              /* memory of the step */
    const KernelCall *call;             /* the current job */
    char *const *p;
    int count;
    atomic_int result;
};

/* Return the scratch memory of a thread; shared memory follows after the memory of all threads. */
static char *scratch_of(const Pool *pool, const KernelCall *call, int index)
{
    size_t at = ((const Placed *)(const void *)call)->scratch;
    return (char *)pool->memory + at + (size_t)index * rounded((size_t)call->scratch);
}

static void do_share(void *job, int index)
{
    Pool *pool = job;
    const KernelCall *call = pool->call;
    int64_t begin = call->units * index / pool->count, end = call->units * (index + 1) / pool->count;
    if (begin < end && call->kernel->run(call, pool->p, begin, end, scratch_of(pool, call, index)))
        atomic_store(&pool->result, 1);
}

int pool_run(Pool *pool, const KernelCall *call, char **p)
{
    int result, most = built.threads;
    p[call->nparams] = scratch_of(pool, call, most);
    if (!pool->threads || pool->threads->count < 2 || call->units == 1 || call->work < WORTH_SHARING ||
        (call->shared && !call->kernel->finish)) {
        result = call->kernel->run(call, p, 0, call->units, scratch_of(pool, call, 0));
    } else {
        pool->call = call;
        pool->p = p;
        pool->count = pool->threads->count < most ? pool->threads->count : most;
        atomic_store(&pool->result, 0);
        pool->threads->run(pool->threads->context, do_share, pool, pool->count);
        result = atomic_load(&pool->result);
    }
    if (!result && call->kernel->finish)
        result = call->kernel->finish(call, p, 0, call->units, scratch_of(pool, call, 0));
    return result;
}

/* --- memory for tensors that functions allocate: a stack; free blocks on top are released --- */

typedef struct Block {
    Tensor tensor;
    struct Block *below;
    int used;
} Block;

typedef struct {
    Machine m; /* first member: the state of the loop */
    Pool pool;
    struct step *step;
    Records records;
    char *residuals; /* records from the start, a table of records from the end */
    int64_t residuals_used;
    char *heap, *heap_end, *heap_top;
    Block *top;
    char *room; /* memory for lanes */
    const unsigned char *weights;
    const Set *set;
    const Variant *variant; /* NULL if all sizes are constant */
    Number *numbers;        /* values of formulas for the sizes */
    char *image;            /* addresses of the arguments, then other private memory */
    char *addresses[];      /* of the arguments; the remaining memory follows */
} Running;

static int fail(struct step *step, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    vsnprintf(step->error, sizeof step->error, format, values);
    va_end(values);
    return -1;
}

static Running *running_of(const struct step *step)
{
    return (Running *)(void *)(step->memory + built.ours);
}

static Tensor *make_tensor(Machine *m, const Type *type)
{
    Running *r = (Running *)m;
    size_t nbytes = rounded(sizeof(Block)) + rounded((size_t)type->nbytes);
    if (nbytes > (size_t)(r->heap_end - r->heap_top)) {
        fail(r->step, "%s", "the memory for tensors of functions is full: build with a larger --depth");
        return NULL;
    }
    Block *block = (Block *)(void *)r->heap_top;
    *block = (Block){
        .tensor = {.references = 1, .type = type, .address = r->heap_top + rounded(sizeof(Block))},
        .below = r->top,
        .used = 1};
    r->heap_top += nbytes;
    r->top = block;
    return &block->tensor;
}

static void drop_tensor(Machine *m, Value value)
{
    Running *r = (Running *)m;
    if (value.kind != TENSOR)
        return;
    ((Block *)value.as.tensor)->used = 0;
    while (r->top && !r->top->used) {
        r->heap_top = (char *)r->top;
        r->top = r->top->below;
    }
}

/* --- callbacks of the loop --- */

static int more_values(Machine *m, int64_t count)
{
    (void)count;
    return fail(((Running *)m)->step, "%s",
                "call depth exceeds the limit of the build: build with a larger --depth");
}

static int more_frames(Machine *m)
{
    return more_values(m, 1);
}

static int look(Machine *m)
{
    m->worked = 0;
    return 0;
}

static Record *take_record(Records *records, int64_t nbytes)
{
    Running *r = (Running *)(void *)((char *)records - offsetof(Running, records));
    uint64_t table = ((uint64_t)records->count + 2) * sizeof(Record *);
    if (table > built.records || (uint64_t)(r->residuals_used + nbytes) > built.records - table)
        return NULL;
    Record *record = (Record *)(void *)(r->residuals + r->residuals_used);
    r->residuals_used += nbytes;
    return record;
}

static void clear_records(Running *r)
{
    Record **end = (Record **)(void *)(r->residuals + built.records / sizeof(Record *) * sizeof(Record *));
    r->residuals_used = 0;
    r->records = (Records){.take = take_record, .table = end, .step = -1};
}

static int call_foreign(Machine *m, const Step *step, int64_t first)
{
    Running *r = (Running *)m;
    const char *wrong = NULL;
    char why[128];
    int64_t count = m->top - first;
    const Value *params = m->stack + first;
    if (!step->foreign)
        return 1; /* an op with overlapping parameters */
    r->records.why = why;
    switch (step->nparams) {
    case RECORDS_BEGIN:
    case RECORDS_END: clear_records(r); break;
    case RECORDS_PUSH: wrong = records_push(&r->records, params, count); break;
    case RECORDS_READ: wrong = records_read(&r->records, params, count); break;
    case RECORDS_READ_ROWS: wrong = records_read_rows(&r->records, params, count); break;
    case RECORDS_ADD: wrong = records_add(&r->records, params, count); break;
    default:
        wrong = built.run_lanes(step->callee, m->pool, (char *)r->step->memory, r->room, built.lanes,
                                params, count, why);
        break;
    }
    if (wrong)
        return fail(r->step, "%s", wrong);
    drop_all(m, first);
    return 0;
}

static int back(Machine *m, const Step *step)
{
    (void)m, (void)step;
    return 1;
}

static const Case *resolve(Machine *m, const Step *step, const Value *params, int count)
{
    (void)step, (void)params, (void)count;
    fail(((Running *)m)->step, "%s", "a function is called with types that were unknown at build time");
    return NULL;
}

static void keep(Machine *m, Value value)
{
    (void)m, (void)value;
}

static int truth(Value value)
{
    (void)value;
    return -1;
}

static int load(Machine *m, int64_t handle)
{
    (void)m, (void)handle;
    return 1;
}

static int store(Machine *m, int64_t handle, Tensor *tensor)
{
    (void)m, (void)handle, (void)tensor;
    return 1;
}

static const Runner runner = {.more_values = more_values,
                              .more_frames = more_frames,
                              .look = look,
                              .call = call_foreign,
                              .back = back,
                              .resolve = resolve,
                              .make = make_tensor,
                              .drop = drop_tensor,
                              .keep = keep,
                              .truth = truth,
                              .load = load,
                              .store = store};

/* --- the step --- */

static size_t parts(Running *r, char *at);

size_t step_memory(void)
{
    return built.ours + parts(NULL, NULL);
}

/* Lay out the machine's private memory from offset `at`. Return the number of bytes. */
static size_t parts(Running *r, char *at)
{
    size_t used = rounded(sizeof(Running) + built.narguments * sizeof(char *));
#define PART(name, nbytes)            \
    if (r)                            \
        (name) = (void *)(at + used); \
    used += rounded(nbytes)
    PART(r->m.arguments, built.npushed * sizeof(Tensor));
    PART(r->m.stack, built.values * sizeof(Value));
    PART(r->m.frames, built.frames * sizeof(Return));
    PART(r->heap, built.heap);
    PART(r->residuals, built.records);
    PART(r->room, built.lanes);
    PART(r->numbers, built.nformulas * sizeof(Number));
    PART(r->image, built.image);
#undef PART
    return used;
}

/* --- lengths --- */

#ifdef STEP_LENGTHS
/* Return whether all numbers that a variant writes are defined and in range. */
static int is_defined(const Running *r, const Variant *variant)
{
    for (uint32_t i = 0; i < built.nscalars; i++) {
        const Number *number = &r->numbers[built.scalars[i].formula];
        int narrow = built.scalars[i].dtype == MLVM_I32 && number->integer != (int32_t)number->integer;
        if (number->kind == UNDEFINED || narrow)
            return 0;
    }
    for (uint32_t i = 0; i < variant->npatches; i++)
        if (r->numbers[variant->patches[i].formula].kind == UNDEFINED)
            return 0;
    return 1;
}

/* Compute the formulas for these sizes, and return the valid variant, or NULL. */
static const Variant *variant_for(Running *r, const int64_t *lengths)
{
    memcpy(r->numbers, built.constants, built.nformulas * sizeof(Number));
    for (uint32_t i = 0; i < STEP_LENGTHS; i++)
        r->numbers[i] = (Number){INTEGRAL, lengths[i], 0};
    evaluate(built.formulas, r->numbers, built.nformulas);
    for (uint32_t k = 0; k < built.nvariants; k++) {
        const Variant *variant = &built.variants[k];
        uint32_t i = 0;
        while (i < variant->nguards &&
               is_same_number(&r->numbers[variant->guards[i].formula], &variant->guards[i].value))
            i++;
        if (i == variant->nguards && is_defined(r, variant))
            return variant;
    }
    return NULL;
}

/* Write a number as an element of that dtype; a build supports only these four. */
static void write_number(void *to, int dtype, const Number *number)
{
    double real = real_of(number);
    float narrow = (float)real; /* rounded twice, as in numpy */
    int32_t small = (int32_t)number->integer;
    switch (dtype) {
    case MLVM_F32: memcpy(to, &narrow, sizeof narrow); break;
    case MLVM_F64: memcpy(to, &real, sizeof real); break;
    case MLVM_I32: memcpy(to, &small, sizeof small); break;
    default: memcpy(to, &number->integer, sizeof number->integer);
    }
}

/* Switch to the variant for the current sizes. */
static void use_variant(Running *r, const Variant *variant)
{
    const char *image = r->set->images[variant - built.variants];
    memcpy(r->image, image, variant->nbytes);
    for (uint32_t i = 0; i < variant->npointers; i++) {
        uintptr_t pointer;
        memcpy(&pointer, r->image + variant->pointers[i], sizeof pointer);
        pointer += (uintptr_t)r->image - (uintptr_t)image;
        memcpy(r->image + variant->pointers[i], &pointer, sizeof pointer);
    }
    for (uint32_t i = 0; i < variant->npatches; i++) {
        const Patch *patch = &variant->patches[i];
        const Number *number = &r->numbers[patch->formula];
        double real = real_of(number);
        const void *from = patch->is_real ? (const void *)&real : &number->integer;
        memcpy(r->image + patch->at, from, sizeof real);
    }
    for (uint32_t i = 0; i < built.nscalars; i++)
        write_number(r->step->memory + built.scalars[i].at, built.scalars[i].dtype,
                     &r->numbers[built.scalars[i].formula]);
    r->variant = variant;
    r->m.functions = (const Function *)(void *)r->image;
}

int step_set_lengths(struct step *step, const struct step_lengths *lengths)
{
    Running *r = running_of(step);
    int64_t sizes[STEP_LENGTHS], before[STEP_LENGTHS];
    if (!lengths)
        return fail(step, "%s", "the lengths are NULL");
    memcpy(sizes, lengths, sizeof sizes);
    for (uint32_t i = 0; i < STEP_LENGTHS; i++) {
        before[i] = r->numbers[i].integer;
        if (sizes[i] < 1 || sizes[i] > built.lengths[i].most)
            return fail(step, "%s = %lld: expected 1 to %lld", built.lengths[i].name, (long long)sizes[i],
                        (long long)built.lengths[i].most);
    }
    const Variant *variant = variant_for(r, sizes);
    if (!variant) {
        char text[160];
        size_t at = 0;
        for (uint32_t i = 0; i < STEP_LENGTHS && at < sizeof text; i++)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s = %lld", i ? ", " : "",
                                   built.lengths[i].name, (long long)sizes[i]);
        variant_for(r, before);
        return fail(step, "at %s the function takes other branches than in the call before saving", text);
    }
    use_variant(r, variant);
    return 0;
}

int step_output_shape(const struct step *step, int output, int64_t *shape)
{
    if (output < 0 || (uint32_t)output >= built.noutputs)
        return -1;
    const Shape *of = &built.shapes[output];
    for (int i = 0; i < of->ndim; i++)
        shape[i] = running_of(step)->numbers[of->formulas[i]].integer;
    return of->ndim;
}

#endif

static const char *checked_weights(const unsigned char *weights, size_t nbytes)
{
    uint64_t header[3];
    if ((uintptr_t)weights % 16)
        return "expected weights at a multiple of 16 bytes";
    if (nbytes < HEADER)
        return "expected weights, got too few bytes";
    memcpy(header, weights, sizeof header);
    if (memcmp(weights, "MLVMSTEP", 8))
        return "expected weights that begin with MLVMSTEP";
    if (header[1] != built.fingerprint)
        return "the weights belong to a different step";
    if (header[2] != built.weights || nbytes != built.weights)
        return "the weights are incomplete";
    return NULL;
}

int step_init_for(struct step *step, void *memory, const void *weights, size_t nbytes, const char *simd)
{
    *step = (struct step){.memory = memory};
    if (!memory || (uintptr_t)memory % ALIGNMENT)
        return fail(step, "expected memory at a multiple of %d bytes", ALIGNMENT);
    if (!weights) {
        weights = built.embedded;
        nbytes = built.weights;
    }
    if (!weights)
        return fail(
            step, "%s",
            "expected weights: the step was built without; pass the file of the build (--weights FILE)");
    const char *wrong = checked_weights(weights, nbytes);
    if (wrong)
        return fail(step, "%s", wrong);
    const Set *set = built.sets;
    while (set->name && (!processor_has(set->name) || (simd && strcmp(simd, set->name))))
        set++;
    if (!set->name)
        return fail(step, "the step was not built for this processor%s%s", simd ? " and " : "",
                    simd ? simd : "");
    step->simd = set->name;
    Running *r = running_of(step);
    memset(r, 0, sizeof *r);
    parts(r, (char *)r);
    r->step = step;
    r->weights = weights;
    r->heap_end = r->heap + built.heap;
    r->pool.memory = step->memory;
    r->m.runner = &runner;
    r->m.functions = set->functions;
    r->set = set;
    r->m.pool = &r->pool;
    r->m.addresses = r->addresses;
    r->m.version = &r->m.version_seen;
    r->m.room = built.values;
    r->m.frames_room = built.frames;
    r->m.steps_left = -1;
    for (uint32_t i = 0; i < built.nstates; i++) {
        const State *state = &built.states[i];
        if (state->copied && state->nbytes)
            memcpy(step->memory + state->at, r->weights + state->in_weights, state->nbytes);
    }
    for (uint32_t i = 0; i < built.narguments; i++) {
        const Address *argument = &built.arguments[i];
        if (argument->where != IN_INPUT)
            r->addresses[i] = argument->where == IN_MEMORY ? (char *)step->memory + argument->at
                                                           : (char *)(uintptr_t)r->weights + argument->at;
    }
#ifdef STEP_LENGTHS
    int64_t saved[STEP_LENGTHS];
    for (uint32_t i = 0; i < STEP_LENGTHS; i++)
        saved[i] = built.lengths[i].saved;
    const Variant *variant = variant_for(r, saved);
    if (!variant)
        return fail(step, "%s", "the build does not support the lengths of the call before saving");
    use_variant(r, variant);
#endif
    return 0;
}

int step_init(struct step *step, void *memory, const void *weights, size_t nbytes)
{
    return step_init_for(step, memory, weights, nbytes, NULL);
}

void step_use_threads(struct step *step, const struct step_threads *threads)
{
    running_of(step)->pool.threads = threads;
}

/* Describe why and where the loop stopped. */
static int explain(Running *r)
{
    struct step *step = r->step;
    const Place *places = r->variant ? r->variant->places : built.places[r->m.function];
    const Place *place = &places[r->m.pc];
    char why[sizeof step->error];
    memcpy(why, step->error, sizeof why);
    const char *reason = why[0] ? why : "an operand has an invalid value";
    return fail(step, "%s: %s, at %s", built.ops[place->op], reason, built.lines[place->line]);
}

/* Return pointer i of a struct that consists of pointers. */
static const void *pointer_in(const void *pointers, size_t i)
{
    const void *pointer;
    memcpy(&pointer, (const char *)pointers + i * sizeof pointer, sizeof pointer);
    return pointer;
}

int step_run(struct step *step, const struct step_inputs *inputs, struct step_outputs *outputs)
{
    Running *r = running_of(step);
    step->error[0] = 0;
    for (uint32_t i = 0; i < built.ninputs; i++) {
        const Input *input = &built.inputs[i];
        const void *source = inputs ? pointer_in(inputs, i) : NULL;
#ifdef STEP_LENGTHS
        size_t nbytes = (size_t)r->numbers[built.input_formulas[i]].integer;
#else
        size_t nbytes = input->nbytes;
#endif
        if (!source && nbytes)
            return fail(step, "input %u is NULL", (unsigned)i);
        if (input->copied && nbytes)
            memcpy(step->memory + input->at, source, nbytes);
    }
    for (uint32_t i = 0; i < built.narguments; i++)
        if (built.arguments[i].where == IN_INPUT)
            r->addresses[i] = (char *)(uintptr_t)pointer_in(inputs, built.arguments[i].at);
    for (uint32_t i = 0; i < built.npushed; i++) {
        const Pushed *pushed = &built.pushed[i];
        Where where = built.arguments[pushed->argument].where;
        r->m.arguments[i] = (Tensor){.references = IMMORTAL,
                                     .address = r->addresses[pushed->argument],
                                     .type = pushed->type,
                                     .array = step,
                                     .constant = where != IN_MEMORY};
    }
    r->m.top = r->m.depth = r->m.worked = 0;
    r->m.function = r->m.pc = r->m.base = r->m.nparams = r->m.since = 0;
    r->heap_top = r->heap;
    r->top = NULL;
    clear_records(r);
    if (run_machine(&r->m) != 1)
        return explain(r);
    for (uint32_t i = 0; outputs && i < built.noutputs; i++) {
        const Address *output = &built.outputs[i];
        const void *address = output->where == IN_INPUT    ? pointer_in(inputs, output->at)
                              : output->where == IN_MEMORY ? (const void *)(step->memory + output->at)
                                                           : (const void *)(r->weights + output->at);
        memcpy((char *)outputs + i * sizeof address, &address, sizeof address);
    }
    return 0;
}

long step_feed(struct step *step, int (*next)(void *context, struct step_inputs *inputs),
               void (*done)(void *context, const struct step_outputs *outputs), void *context)
{
    struct step_inputs inputs;
    struct step_outputs outputs;
    long steps = 0;
    for (; next(context, &inputs); steps++) {
        if (step_run(step, &inputs, &outputs))
            return -1;
        if (done)
            done(context, &outputs);
    }
    return steps;
}

size_t step_state(void)
{
    return built.weights;
}

int step_save(const struct step *step, void *state, size_t nbytes)
{
    const Running *r = running_of(step);
    unsigned char *to = state;
    uint64_t header[3] = {0, built.fingerprint, built.weights};
    if (!state || nbytes < built.weights)
        return -1;
    memcpy(header, "MLVMSTEP", 8);
    memset(to, 0, built.weights);
    memcpy(to, header, sizeof header);
    for (uint32_t i = 0; i < built.nstates; i++) {
        const State *x = &built.states[i];
        if (x->nbytes)
            memcpy(to + x->in_weights, x->copied ? step->memory + x->at : r->weights + x->in_weights,
                   x->nbytes);
    }
    return 0;
}

const char *step_error(const struct step *step)
{
    return step->error;
}

const char *step_simd(const struct step *step)
{
    return step->simd;
}
