/* Four host functions in C. `make example-c` compiles them to build/example_c.so. */
#include <math.h>
#include <mlvm.h>

/* ( x -- y ) y = limit tanh(x / limit), for f32 and f64: x within +-limit, and smooth.
 * Attribute: limit, a number > 0, by default 1. */
static int softclip(mlvm_frame *frame)
{
    const mlvm_value *param = &frame->params[0];
    const mlvm_tensor *x = &param->tensor;
    double limit = 1.0;
    mlvm_tensor *y;
    int64_t i;

    if (param->kind != MLVM_TENSOR || (x->dtype != MLVM_F32 && x->dtype != MLVM_F64))
        return frame->error(frame, "takes a tensor of f32 or f64");
    if (frame->number(frame, "limit", &limit))
        return 1;
    if (!(limit > 0))
        return frame->error(frame, "limit must be > 0");
    y = frame->new_tensor(frame, x->dtype, x->ndim, x->shape);
    if (y == NULL)
        return 1;
    if (x->dtype == MLVM_F32) {
        const float *from = (const float *)x->data;
        float *to = (float *)y->data;
        for (i = 0; i < x->size; i++)
            to[i] = (float)(limit * tanh(from[i] / limit));
    } else {
        const double *from = (const double *)x->data;
        double *to = (double *)y->data;
        for (i = 0; i < x->size; i++)
            to[i] = limit * tanh(from[i] / limit);
    }
    return frame->push(frame, y);
}

/* ( x -- least greatest ) The least and the greatest element of an i64 tensor. */
static int min_max(mlvm_frame *frame)
{
    const mlvm_value *param = &frame->params[0];
    const mlvm_tensor *x = &param->tensor;
    const int64_t *from = (const int64_t *)x->data;
    mlvm_tensor *least, *greatest;
    int64_t i, low, high;

    if (param->kind != MLVM_TENSOR || x->dtype != MLVM_I64 || x->size == 0)
        return frame->error(frame, "takes a tensor of i64 that is not empty");
    least = frame->new_tensor(frame, MLVM_I64, 0, NULL);
    greatest = frame->new_tensor(frame, MLVM_I64, 0, NULL);
    if (least == NULL || greatest == NULL)
        return 1;
    low = high = from[0];
    for (i = 1; i < x->size; i++) {
        low = from[i] < low ? from[i] : low;
        high = from[i] > high ? from[i] : high;
    }
    *(int64_t *)least->data = low;
    *(int64_t *)greatest->data = high;
    return frame->push(frame, least) || frame->push(frame, greatest);
}

/* ( x w b -- y ) y = relu(x w + b) of f32[n,k], f32[k,m] and f32[m], in one pass over y. */
static int dense(mlvm_frame *frame)
{
    const mlvm_tensor *x = &frame->params[0].tensor, *w = &frame->params[1].tensor;
    const mlvm_tensor *b = &frame->params[2].tensor;
    const float *from = (const float *)x->data;
    int64_t i, j, k, shape[2];
    mlvm_tensor *y;

    for (i = 0; i < 3; i++)
        if (frame->params[i].kind != MLVM_TENSOR || frame->params[i].tensor.dtype != MLVM_F32)
            return frame->error(frame, "takes three tensors of f32");
    if (x->ndim != 2 || w->ndim != 2 || b->ndim != 1 || x->shape[1] != w->shape[0] ||
        w->shape[1] != b->shape[0])
        return frame->error(frame, "takes f32[n,k], f32[k,m] and f32[m]");
    shape[0] = x->shape[0];
    shape[1] = w->shape[1];
    y = frame->new_tensor(frame, MLVM_F32, 2, shape);
    if (y == NULL)
        return 1;
    for (i = 0; i < shape[0]; i++, from += x->shape[1]) {
        float *row = (float *)y->data + i * shape[1];
        for (j = 0; j < shape[1]; j++)
            row[j] = ((const float *)b->data)[j];
        for (k = 0; k < x->shape[1]; k++)
            for (j = 0; j < shape[1]; j++)
                row[j] += from[k] * ((const float *)w->data)[k * shape[1] + j];
        for (j = 0; j < shape[1]; j++)
            row[j] = row[j] > 0 ? row[j] : 0;
    }
    return frame->push(frame, y);
}

/* ( -- ) Nothing: `python -m bench machine` times the call. */
static int nothing(mlvm_frame *frame)
{
    (void)frame;
    return 0;
}

MLVM_FUNCTIONS({"softclip", softclip, 1, 1}, {"min_max", min_max, 1, 2}, {"dense", dense, 3, 1},
               {"nothing", nothing, MLVM_ANY, 0});
