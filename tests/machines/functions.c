/* Functions that say what they see, and misuse their frame; `mlvm.h` is included before them. */

#include <stdio.h>
#include <string.h>

/* Pushes each parameter as it is. */
static int echo(mlvm_frame *frame)
{
    for (int64_t i = 0; i < frame->nparams; i++) {
        const mlvm_value *v = &frame->params[i];
        if (v->kind == MLVM_TENSOR ? frame->push(frame, &v->tensor)
            : v->kind == MLVM_INT  ? frame->push_int(frame, v->integer)
                                   : frame->push_str(frame, v->string))
            return 1;
    }
    return 0;
}

/* Everything a tensor says, as i64s: dtype, ndim, size, nbytes, alignment, shape ... */
static int describe(mlvm_frame *frame)
{
    const mlvm_tensor *x = &frame->params[0].tensor;
    int64_t length = 5 + x->ndim;
    mlvm_tensor *y = frame->new_tensor(frame, MLVM_I64, 1, &length);
    int64_t *to = (int64_t *)y->data;
    to[0] = x->dtype;
    to[1] = x->ndim;
    to[2] = x->size;
    to[3] = x->nbytes;
    to[4] = (int64_t)((uintptr_t)x->data % 64);
    for (int i = 0; i < x->ndim; i++)
        to[5 + i] = x->shape[i];
    return frame->push(frame, y);
}

/* The attributes as u8s. */
static int attributes(mlvm_frame *frame)
{
    int64_t length = (int64_t)strlen(frame->attributes);
    mlvm_tensor *y = frame->new_tensor(frame, MLVM_U8, 1, &length);
    memcpy(y->data, frame->attributes, (size_t)length);
    return frame->push(frame, y);
}

static int number(mlvm_frame *frame)
{
    double value = -1.0;
    mlvm_tensor *y = frame->new_tensor(frame, MLVM_F64, 0, NULL);
    frame->number(frame, "value", &value);
    *(double *)y->data = value;
    return frame->push(frame, y);
}

/* What goes wrong: the case is the Int on top. */
static int wrong(mlvm_frame *frame)
{
    const int64_t negative[] = {2, -1}, huge[] = {1LL << 50}, endless[] = {1LL << 60, 1LL << 60};
    mlvm_tensor stray;
    memset(&stray, 0, sizeof stray);
    switch (frame->params[frame->nparams - 1].integer) {
    case 0: return frame->error(frame, "no cream left");
    case 1: frame->error(frame, "reported, and still 0"); return 0;
    case 2: return 7;
    case 3: return frame->error(frame, NULL);
    case 4: return frame->error(frame, "caf\xe9");
    case 10: return frame->new_tensor(frame, 99, 0, NULL) == NULL ? 5 : 0;
    case 11: frame->new_tensor(frame, -1, 0, NULL); return 0;
    case 12: frame->new_tensor(frame, MLVM_F32, 65, negative); return 0;
    case 13: frame->new_tensor(frame, MLVM_F32, -1, negative); return 0;
    case 14: frame->new_tensor(frame, MLVM_F32, 2, negative); return 0;
    case 15: frame->new_tensor(frame, MLVM_F32, 1, NULL); return 0;
    case 16: frame->new_tensor(frame, MLVM_F64, 1, huge); return 0;
    case 17: frame->new_tensor(frame, MLVM_F64, 2, endless); return 0;
    case 20: return frame->push(frame, NULL);
    case 21: return frame->push(frame, &stray);
    case 22: return frame->push(frame, &frame->params[frame->nparams].tensor);
    case 23:
        return frame->push(frame,
                           (const mlvm_tensor *)(const void *)((const char *)&frame->params[0].tensor + 1));
    case 24: return frame->push(frame, &frame->params[frame->nparams - 1].tensor);
    case 25: return frame->push_str(frame, NULL);
    case 26: return frame->push_str(frame, "\xff");
    case 30: return frame->number(frame, NULL, &(double){0});
    case 31: return frame->number(frame, "value", NULL);
    default: return 0;
    }
}

/* Makes two tensors and pushes one of them, twice. */
static int one_of_two(mlvm_frame *frame)
{
    const int64_t shape[] = {1 << 18};
    mlvm_tensor *x = frame->new_tensor(frame, MLVM_F32, 1, shape);
    frame->new_tensor(frame, MLVM_F32, 1, shape);
    return frame->push(frame, x) || frame->push(frame, x);
}

/* Spins until the i64 it is given is no longer 0. */
static int wait_for(mlvm_frame *frame)
{
    const volatile int64_t *flag = (const volatile int64_t *)frame->params[0].tensor.data;
    for (int64_t i = 0; i < 20000000000LL && *flag == 0; i++) {
    }
    return *flag == 0;
}

/* A frame after its call. */
static mlvm_frame *kept;
static int keep(mlvm_frame *frame)
{
    kept = frame;
    return 0;
}
static int call_kept(void)
{
    return kept->error(kept, "late") + kept->push_int(kept, 1) +
           (kept->new_tensor(kept, MLVM_F32, 0, NULL) == NULL);
}
MLVM_EXPORT int use_kept(void);
int use_kept(void)
{
    return call_kept();
}

MLVM_FUNCTIONS({"echo", echo, MLVM_ANY, MLVM_ANY}, {"describe", describe, 1, 1},
               {"attributes", attributes, 0, 1}, {"number", number, 0, 1},
               {"wrong", wrong, MLVM_ANY, MLVM_ANY}, {"one_of_two", one_of_two, 0, 2},
               {"wait_for", wait_for, 1, 0}, {"keep", keep, 0, 0}, {"liar", keep, 0, 1});
