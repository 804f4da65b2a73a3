/* libFuzzer: the loop on programs that nobody has verified. The input is a list of steps, four bytes
 * each, of two functions. The loop must end them, never read or write beside its stack, and leave no
 * tensor that it has made. */
#include "native/src/plan/loop.h"
#include "mlvm.h"

#include <stdlib.h>
#include <string.h>

enum { VALUES = 40, FRAMES = 8, MOST_STEPS = 64, ARGUMENTS = 3 };

struct Pool {
    int unused;
};

static int add(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    (void)call, (void)scratch;
    for (int64_t i = begin; i < end; i++)
        ((int32_t *)(void *)p[0])[i] = (int32_t)((uint32_t)((const int32_t *)(const void *)p[1])[i] - 1u);
    return 0;
}

int pool_run(Pool *pool, const KernelCall *call, char **p)
{
    (void)pool;
    p[call->nparams] = NULL;
    return call->kernel->run(call, p, 0, call->units, NULL);
}

static const int64_t lengths[] = {4};
static const Type small = {4, 1, NULL, MLVM_I32, 0}, large = {16, 4, lengths, MLVM_I32, 1};
static const KernelEntry entry = {"add", add, NULL};
static const KernelCall one = {.kernel = &entry, .units = 1, .nparams = 2, .work = 5000};
static const KernelCall four = {.kernel = &entry, .units = 4, .nparams = 2, .work = 5000};
static const Case cases[] = {
    {.count = 1, .call = &one, .types = {&small}, .out = &small},
    {.count = 1, .call = &four, .types = {&large}, .out = &large},
    {.count = 2, .call = &one, .types = {&small, &small}, .nwrites = 1, .over = {2}},
    {.count = 2, .call = &four, .types = {&large, &large}, .nwrites = 1, .over = {0}},
};

static int alive, looks;

static Tensor *make(Machine *m, const Type *type)
{
    (void)m;
    Tensor *tensor = alive < 1000 ? malloc(sizeof *tensor + (size_t)type->nbytes) : NULL;
    if (!tensor)
        return NULL;
    alive++;
    *tensor = (Tensor){.references = 1, .type = type, .address = (char *)(tensor + 1)};
    memset(tensor->address, 1, (size_t)type->nbytes);
    return tensor;
}

static void drop(Machine *m, Value value)
{
    (void)m;
    alive--;
    free(value.as.tensor);
}

static int no_more(Machine *m, int64_t count)
{
    (void)m, (void)count;
    return 1;
}

static int no_more_frames(Machine *m)
{
    (void)m;
    return 1;
}

static int look(Machine *m)
{
    m->worked = 0;
    return ++looks > 20 ? -1 : 0;
}

static int call(Machine *m, const Step *step, int64_t first)
{
    (void)step;
    drop_all(m, first);
    return 0;
}

static int back(Machine *m, const Step *step)
{
    (void)m, (void)step;
    return 0;
}

static const Case *resolve(Machine *m, const Step *step, const Value *params, int count)
{
    (void)m, (void)step, (void)params, (void)count;
    return NULL;
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

static void keep(Machine *m, Value value)
{
    (void)m, (void)value;
}

static const Runner runner = {no_more, no_more_frames, look, call,  back, resolve,
                              make,    drop,           keep, truth, load, store};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int codes[] = {HALT,          LOAD_ARG, CALL,          PUSH,   GET, SET,
                                JUMP_IF_FALSE, JUMP,     CALL_FUNCTION, RETURN, POP, LOAD_GLOBAL,
                                STORE_GLOBAL,  RUN,      BACK,          UNKNOWN};
    static const uint32_t places[] = {0, 1};
    Step steps[2][MOST_STEPS + 1] = {{{0}}};
    Function functions[2];
    int64_t memory[ARGUMENTS][2] = {{3}, {4}, {5, 6}};
    char *addresses[] = {(char *)memory[0], (char *)memory[1]};
    if (size < 2)
        return 0;
    size_t split = data[0] % (MOST_STEPS + 1);
    for (int f = 0; f < 2; f++) {
        size_t count = f ? (size / 4 > split ? size / 4 - split : 0)
                         : (size / 4 < split ? size / 4 : split);
        count = count < MOST_STEPS ? count : MOST_STEPS;
        for (size_t i = 0; i < count; i++) {
            const uint8_t *at = data + 4 * (i + (f ? split : 0));
            Step *step = &steps[f][i];
            step->code = codes[at[0] % 16];
            step->number = (int8_t)at[1] % 12;
            step->nparams = (int8_t)at[2] % 5;
            step->cases = cases;
            step->ncases = 4;
            step->foreign = at[3] & 1;
            step->value = (Value){.kind = INTEGER, .as.integer = (int8_t)at[1]};
            step->bound = (BoundCall){&one, places};
            if (step->code == JUMP || step->code == JUMP_IF_FALSE)
                step->number = at[1] % (int)(count + 1);
            else if (step->code == CALL_FUNCTION)
                step->number = at[1] % 2;
            else if (step->code == LOAD_ARG)
                step->number = at[1] % ARGUMENTS;
            else if (step->code == CALL)
                step->number = at[1] % 5 - 1;
            else if (step->code == POP)
                step->number = at[1] % 5;
        }
        steps[f][count].code = HALT;
        functions[f] = (Function){steps[f], (int)count + 1, NULL, NULL};
    }
    Value *stack = malloc(VALUES * sizeof *stack);
    Return *frames = malloc(FRAMES * sizeof *frames);
    Pool pool = {0};
    int64_t version = 0;
    Tensor arguments[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; i++)
        arguments[i] = (Tensor){.references = IMMORTAL,
                                .type = i < 2 ? &small : &large,
                                .address = (char *)memory[i],
                                .array = &pool,
                                .constant = i == 1};
    Machine m = {.runner = &runner,
                 .functions = functions,
                 .pool = &pool,
                 .addresses = addresses,
                 .version = &version,
                 .stack = stack,
                 .room = VALUES,
                 .frames = frames,
                 .frames_room = FRAMES,
                 .arguments = arguments,
                 .steps_left = -1};
    alive = looks = 0;
    int outcome = run_machine(&m);
    if (outcome < -1 || outcome > 1 || m.top < 0 || m.top > VALUES)
        abort();
    drop_all(&m, 0);
    if (alive)
        abort();
    free(stack);
    free(frames);
    return 0;
}
