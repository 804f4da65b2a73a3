/* The machine's loop in C, with the semantics of `mlvm.core.machine.run`. It does not use Python.
 *
 * In:       a Machine (loop.h): functions of prepared steps, a stack, and a runner's callbacks.
 * Out:      the status of loop.h, and the state of the machine. Rare cases and errors end the loop with
 *           the state before the step, for the runner to explain.
 * Must hold: steps and their calls outlive the run. Raw programs are not verified: a step that would leave
 *           the stack ends the loop.
 * Callers:  machine/loop.c for Python; build/src/step.c for built steps.
 * Locks:    the VM's lock, held by the caller for the launch. The function table changes only under it, so
 *           only in this thread, by a host function or signal handler: each call checks `version`.
 *
 * A call with parameters on the stack has a cache by parameter types: the kernel call, and the type
 * of the result. The runner resolves new types.
 */
#include "loop.h"

#include "../../../mlvm.h"

#include <string.h>

static void drop(Machine *m, Value value)
{
    if (value.kind == INTEGER || (value.kind == TENSOR && --value.as.tensor->references))
        return;
    m->runner->drop(m, value);
}

static Value another(Machine *m, Value value)
{
    if (value.kind == TENSOR)
        value.as.tensor->references++;
    else if (value.kind == OBJECT)
        m->runner->keep(m, value);
    return value;
}

void drop_all(Machine *m, int64_t first)
{
    while (m->top > first)
        drop(m, m->stack[--m->top]);
}

int make_room(Machine *m, int64_t count)
{
    return m->top + count > m->room ? m->runner->more_values(m, count) : 0;
}

/* Return whether the function table has changed since the launch began. */
static int changed(const Machine *m)
{
    return *m->version != m->version_seen;
}

void replace_below(Machine *m, int64_t first, int64_t count)
{
    int64_t from = m->top - count;
    for (int64_t i = first; i < from; i++)
        drop(m, m->stack[i]);
    memmove(m->stack + first, m->stack + from, sizeof *m->stack * (size_t)count);
    m->top = first + count;
}

static const Case *find_case(const Step *step, const Value *params, int count)
{
    for (int i = 0; i < step->ncases; i++) {
        const Case *entry = &step->cases[i];
        int j = 0;
        while (j < count && entry->types[j] == params[j].as.tensor->type)
            j++;
        if (j == count && entry->count == count)
            return entry;
    }
    return NULL;
}

/* Return whether a result would overwrite an operand, another result, or a constant. */
static int collides(const Case *entry, const Value *params, int count)
{
    for (int i = 0; i < entry->nwrites; i++) {
        const Tensor *out = params[i].as.tensor;
        if (out->constant)
            return 1;
        for (int j = 0; entry->over[i] != OVER_ANYTHING && j < count; j++) {
            const Tensor *x = params[j].as.tensor;
            if (j != i && out->address < x->address + x->type->nbytes &&
                x->address < out->address + out->type->nbytes &&
                (out->address != x->address || !(entry->over[i] >> j & 1)))
                return 1;
        }
    }
    return 0;
}

/* Call a function of the table on the parameters from `first` on. Return as the runner's `call` does;
 * also 1, without side effects, if the kernel rejects values or memory is missing. */
static int call_function(Machine *m, const Step *step, int64_t first)
{
    const Runner *runner = m->runner;
    if (step->foreign)
        return runner->call(m, step, first);
    int count = (int)(m->top - first);
    Value *params = m->stack + first;
    for (int i = 0; i < count; i++)
        if (count > MOST_TYPES || params[i].kind != TENSOR)
            return runner->call(m, step, first);
    const Case *entry = find_case(step, params, count);
    if (!entry && !(entry = runner->resolve(m, step, params, count)))
        return -1;
    if (!entry->call || collides(entry, params, count))
        return runner->call(m, step, first);
    char *p[MOST_TYPES + 2]; /* addresses of the result, the parameters and shared bytes */
    Tensor *out = NULL;
    if (entry->out) {
        out = runner->make(m, entry->out);
        if (!out)
            return 1;
        p[0] = out->address;
    }
    for (int i = 0; i < count; i++)
        p[i + (out != NULL)] = params[i].as.tensor->address;
    m->worked += (int64_t)entry->call->work;
    if (pool_run(m->pool, entry->call, p)) {
        if (out)
            runner->drop(m, (Value){.kind = TENSOR, .as.tensor = out});
        return 1;
    }
    drop_all(m, first);
    if (out) {
        m->stack[m->top].kind = TENSOR;
        m->stack[m->top++].as.tensor = out;
    }
    return 0;
}

int is_true(const void *element, int dtype)
{
    const float *single = element;
    const double *twice = element;
    switch (dtype) {
    case MLVM_F32: return *single != 0;
    case MLVM_F64: return *twice != 0;
    case MLVM_C64: return single[0] != 0 || single[1] != 0;
    case MLVM_C128: return twice[0] != 0 || twice[1] != 0;
    case MLVM_F16:
    case MLVM_BF16: return (*(const uint16_t *)element & 0x7FFF) != 0; /* zeros of both signs are false */
    case MLVM_F8E4M3:
    case MLVM_F8E5M2: return (*(const uint8_t *)element & 0x7F) != 0;
    case MLVM_I16:
    case MLVM_U16: return *(const uint16_t *)element != 0;
    case MLVM_I32:
    case MLVM_U32: return *(const uint32_t *)element != 0;
    case MLVM_I64:
    case MLVM_U64: return *(const uint64_t *)element != 0;
    default: /* a byte; packed low-bit dtypes have no single elements */
        return *(const uint8_t *)element != 0;
    }
}

/* Return whether a value is true; -1 if it is not a condition. */
static int truth(const Machine *m, Value value)
{
    if (value.kind == INTEGER)
        return value.as.integer != 0;
    if (value.kind == OBJECT)
        return m->runner->truth(value);
    const Tensor *x = value.as.tensor;
    if (x->type->size != 1)
        return -1;
    return is_true(x->address, x->type->dtype);
}

/* Count the instructions of the steps since .. pc - 1. Return whether the limit is exceeded. */
static int spend(Machine *m, const Function *function, int pc)
{
    if (m->steps_left >= 0) {
        int64_t nsteps = function->ends[pc - 1] - function->starts[m->since] + 1;
        if (nsteps > m->steps_left)
            return 1;
        m->steps_left -= nsteps;
    }
    return 0;
}

int run_machine(Machine *m)
{
    const Runner *runner = m->runner;
    const Function *functions = m->functions, *function = &functions[m->function];
    const Step *step;
    int pc = m->pc, outcome;
    int64_t first, slot;
#define TOP(i) m->stack[m->top - 1 - (i)]
#define STOP(result)    \
    do {                \
        m->pc = pc - 1; \
        return result;  \
    } while (0)
#define NEED(condition)   \
    do {                  \
        if (!(condition)) \
            STOP(0);      \
    } while (0)
#define CALLED(result)                                         \
    do {                                                       \
        outcome = look_up(m) ? -1 : changed(m) ? 1 : (result); \
        if (outcome)                                           \
            STOP(outcome < 0 ? -1 : 0);                        \
    } while (0)
#define GO_TO(target)             \
    do {                          \
        m->since = pc = (target); \
        m->worked += JUMP_WORK;   \
        if (look_up(m)) {         \
            pc++;                 \
            STOP(-1);             \
        }                         \
    } while (0)
    for (;;) {
        step = &function->steps[pc++];
        if (m->top == m->room && (outcome = runner->more_values(m, 1)))
            STOP(outcome < 0 ? -1 : 0);
        switch (step->code) {
        case RUN:
            m->worked += (int64_t)step->bound.call->work;
            if (look_up(m))
                STOP(-1);
            if (changed(m) || run_one(m->pool, m->addresses, &step->bound))
                STOP(0);
            break;
        case CALL:
            first = step->number == ALL ? m->base : m->top - step->number;
            NEED(first >= 0 && first <= m->top);
            CALLED(call_function(m, step, first));
            break;
        case BACK: CALLED(runner->back(m, step)); break;
        case LOAD_ARG:
            m->stack[m->top].kind = TENSOR;
            m->stack[m->top++].as.tensor = &m->arguments[step->number];
            m->arguments[step->number].references++;
            break;
        case PUSH:
            if (step->value.kind == INTEGER)
                m->stack[m->top] = step->value;
            else
                m->stack[m->top] = another(m, step->value);
            m->top++;
            break;
        case GET:
            slot = (int64_t)m->base + step->number;
            NEED(slot >= 0 && slot < m->top);
            m->stack[m->top] = another(m, m->stack[slot]);
            m->top++;
            break;
        case SET: {
            slot = (int64_t)m->base + step->number;
            NEED(slot >= 0 && slot < m->top - 1);
            Value old = m->stack[slot];
            m->stack[slot] = TOP(0);
            m->top--;
            drop(m, old);
            break;
        }
        case POP:
            NEED(step->number <= m->top);
            drop_all(m, m->top - step->number);
            break;
        case JUMP_IF_FALSE:
            NEED(m->top);
            outcome = truth(m, TOP(0));
            NEED(outcome >= 0);
            if (!outcome && spend(m, function, pc))
                STOP(0);
            drop(m, TOP(0));
            m->top--;
            if (!outcome)
                GO_TO(step->number);
            break;
        case JUMP:
            if (spend(m, function, pc))
                STOP(0);
            GO_TO(step->number);
            if (step->turns && m->steps_left < 0 && !changed(m))
                pc = runner->turns(m, step->turns);
            break;
        case CALL_FUNCTION:
            if (m->depth >= MOST_DEPTH || (m->depth == m->frames_room && runner->more_frames(m)) ||
                spend(m, function, pc))
                STOP(0);
            m->frames[m->depth++] = (Return){m->function, pc, m->base, m->nparams};
            m->function = step->number;
            m->base = (int)m->top;
            m->nparams = step->nparams;
            function = &functions[m->function];
            m->since = pc = 0;
            break;
        case RETURN: {
            first = (int64_t)m->base - m->nparams;
            NEED(m->depth && first >= 0 && step->number >= 0 && m->top - step->number >= first);
            if (spend(m, function, pc))
                STOP(0);
            Return back = m->frames[--m->depth];
            replace_below(m, first, step->number);
            m->function = back.function;
            m->base = back.base;
            m->nparams = back.nparams;
            function = &functions[m->function];
            GO_TO(back.pc);
            break;
        }
        case LOAD_GLOBAL: {
            NEED(m->top && TOP(0).kind == INTEGER);
            outcome = runner->load(m, TOP(0).as.integer);
            if (outcome)
                STOP(outcome < 0 ? -1 : 0);
            m->top--;
            m->stack[m->top - 1] = m->stack[m->top];
            break;
        }
        case STORE_GLOBAL:
            NEED(m->top > 1 && TOP(0).kind == INTEGER && TOP(1).kind == TENSOR);
            outcome = runner->store(m, TOP(0).as.integer, TOP(1).as.tensor);
            if (outcome)
                STOP(outcome < 0 ? -1 : 0);
            drop_all(m, m->top - 2);
            break;
        case HALT:
            NEED(m->base <= m->top);
            if (spend(m, function, pc))
                STOP(0);
            return 1;
        default: STOP(0);
        }
    }
}
