/* More functions for tests of the loop in C; `mlvm.h` is included before them. */

#include <pthread.h>
#include <string.h>

/* Calls a function without parameters that lies at the Int. */
static int come_back(mlvm_frame *frame)
{
    ((void (*)(void))(intptr_t)frame->params[0].integer)();
    return 0;
}

/* Zeros of the dtype and shape that the Ints say. */
static int zeros(mlvm_frame *frame)
{
    int64_t shape[64];
    mlvm_tensor *x;
    for (int64_t i = 1; i < frame->nparams; i++)
        shape[i - 1] = frame->params[i].integer;
    x = frame->new_tensor(frame, (int32_t)frame->params[0].integer, (int32_t)frame->nparams - 1, shape);
    return x == NULL || frame->push(frame, x);
}

/* One i64 of each shape [1], [2] ... [n], filled with its length; then their number. */
static int many(mlvm_frame *frame)
{
    for (int64_t n = 1; n <= frame->params[0].integer; n++) {
        mlvm_tensor *x = frame->new_tensor(frame, MLVM_I64, 1, &n);
        for (int64_t i = 0; i < n; i++)
            ((int64_t *)x->data)[i] += n;
        if (frame->push(frame, x))
            return 1;
    }
    return frame->push_int(frame, frame->params[0].integer);
}

/* What follows a failure: what each callback returns then, as one number that nobody sees. */
static int first_of_two(mlvm_frame *frame)
{
    int64_t n = 2;
    mlvm_tensor *x;
    frame->error(frame, "the first");
    frame->error(frame, "the second");
    frame->push(frame, NULL);
    x = frame->new_tensor(frame, MLVM_I64, 1, &n);
    return x == NULL || frame->push(frame, x) || frame->push_int(frame, 1) ||
           frame->push_str(frame, "late");
}

/* A frame that the machine has never seen. */
static int forged(mlvm_frame *frame)
{
    mlvm_frame copy = *frame;
    double value = 0;
    int64_t n = 1;
    return frame->push_int(frame, copy.number(&copy, "x", &value) + copy.push_int(&copy, 1) +
                                      copy.push_str(&copy, "a") + copy.error(&copy, "b") +
                                      copy.push(NULL, &frame->params[0].tensor) +
                                      (copy.new_tensor(&copy, MLVM_I64, 1, &n) == NULL));
}

/* Whether a string among the attributes is no number, whatever else it says. */
static int numbers(mlvm_frame *frame)
{
    const char *names[] = {"a", "b", "caf\xc3\xa9", "none", "none\xc3\xa9"};
    for (int i = 0; i < 5; i++) {
        double value = -1;
        mlvm_tensor *x = frame->new_tensor(frame, MLVM_F64, 0, NULL);
        if (frame->number(frame, names[i], &value))
            return 1;
        *(double *)x->data = value;
        if (frame->push(frame, x))
            return 1;
    }
    return 0;
}
static int number_named(mlvm_frame *frame)
{
    double value = 0;
    return frame->number(frame, frame->params[0].string, &value);
}
static int no_name(mlvm_frame *frame)
{
    double value = 0;
    return frame->number(frame, "\xff", &value);
}

/* Callbacks from eight threads: each makes 50 tensors and pushes them, and as many of the rest. */
static void *work(void *given)
{
    mlvm_frame *frame = (mlvm_frame *)given;
    for (int64_t n = 1; n <= 50; n++) {
        double value = 0;
        mlvm_tensor *x = frame->new_tensor(frame, MLVM_I64, 1, &n);
        if (x == NULL)
            break;
        frame->number(frame, "value", &value);
        ((int64_t *)x->data)[n - 1] = n + (int64_t)value;
        frame->push(frame, x);
        frame->push_int(frame, n);
        frame->push_str(frame, "s");
        frame->push(frame, &frame->params[0].tensor);
    }
    return NULL;
}
static int threads(mlvm_frame *frame)
{
    pthread_t all[8];
    for (int i = 0; i < 8; i++)
        pthread_create(&all[i], NULL, work, frame);
    work(frame);
    for (int i = 0; i < 8; i++)
        pthread_join(all[i], NULL);
    return 0;
}
static void *err(void *given)
{
    mlvm_frame *frame = (mlvm_frame *)given;
    frame->error(frame, "from a thread");
    return NULL;
}
static int thread_fails(mlvm_frame *frame)
{
    pthread_t other;
    pthread_create(&other, NULL, err, frame);
    pthread_join(other, NULL);
    return 0;
}

MLVM_FUNCTIONS({"come_back", come_back, 1, 0}, {"zeros", zeros, MLVM_ANY, 1}, {"many", many, 1, MLVM_ANY},
               {"first_of_two", first_of_two, 0, 0}, {"forged", forged, MLVM_ANY, 1},
               {"numbers", numbers, 0, 5}, {"number_named", number_named, 1, 0}, {"no_name", no_name, 0, 0},
               {"threads", threads, 1, MLVM_ANY}, {"thread_fails", thread_fails, 0, 0});
