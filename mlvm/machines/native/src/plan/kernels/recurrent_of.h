/* Recurrences: a sequence in one call, in f32 or f64; included after the products.
 *
 * A unit is UNIT elements of the hidden state, with the columns of all its gates. A turn is a step: see
 * `take_turns`. */

/* Columns of x @ y for some elements of the state. `of` has the integers of the product; y may be bf16. */
static void OF(recur)(const int64_t *of, const T *x, const char *y, int half, T *sums, T *scratch,
                      int64_t column, int64_t columns)
{
    if (sizeof(T) == 4 && half) {
        for (int64_t i = 0; i < of[M]; i++) {
            float *total = (float *)sums + i * of[N] + column;
            memset(total, 0, (size_t)columns * sizeof *total);
            for (int64_t first = 0; first < of[K]; first += of[BLOCK])
                for (int64_t j = 0; j < columns; j += AT_ONCE_bf16)
                    add_block_bf16(total + j, (const float *)x + i * of[K] + first,
                                   (const uint16_t *)y + first * of[N] + column + j, of[N],
                                   least(columns - j, AT_ONCE_bf16), least(of[K] - first, of[BLOCK]));
        }
        return;
    }
    if (of[M] == 1) {
        memset(sums + column, 0, (size_t)columns * sizeof(T));
        for (int64_t j = 0; j < columns; j += OF(AT_ONCE)) {
            const T *kernel = (const T *)y + column + j;
            OF(row_product)(of, x, kernel, sums + column + j, least(columns - j, OF(AT_ONCE)));
        }
        return;
    }
    Part part = {.n = of, .x = x, .y = (const T *)y, .out = sums, .rows = of[M], .column = column};
    part.columns = columns;
    part.strip = scratch;
    part.panels = part.strip + of[STRIP_LENGTH];
    OF(product)(&part);
}

/* Steps of the cells: h and c are updated in place, and q becomes the sums of the gates (without p for n
 * of a gru). A gate's columns are `gate` after the columns of the previous gate. */
static void OF(step_tanh)(T *h, const T *p, const T *q, const T *b, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++)
        h[j] = TANH_(p[j] + b[j] + q[j]);
}

static void OF(step_relu)(T *h, const T *p, const T *q, const T *b, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        T x = p[j] + b[j] + q[j];
        h[j] = x < 0 ? 0 : x;
    }
}

static void OF(step_lstm)(T *h, T *c, const T *p, T *q, const T *b, int64_t gate, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        T i = SIGMOID(q[j] = p[j] + b[j] + q[j]);
        T f = SIGMOID(q[gate + j] = p[gate + j] + b[gate + j] + q[gate + j]);
        T g = TANH_(q[2 * gate + j] = p[2 * gate + j] + b[2 * gate + j] + q[2 * gate + j]);
        T o = SIGMOID(q[3 * gate + j] = p[3 * gate + j] + b[3 * gate + j] + q[3 * gate + j]);
        c[j] = f * c[j] + i * g;
        h[j] = o * TANH_(c[j]);
    }
}

static void OF(step_gru)(T *h, const T *p, T *q, const T *b, int64_t gate, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        T r = SIGMOID(q[j] = p[j] + b[j] + q[j]);
        T z = SIGMOID(q[gate + j] = p[gate + j] + b[gate + j] + q[gate + j]);
        T n = TANH_(p[2 * gate + j] + r * (q[2 * gate + j] = q[2 * gate + j] + b[2 * gate + j]));
        h[j] = n + z * (h[j] - n);
    }
}

/* Convert elements of an operand to the dtype of sums, and back: with HALF_STATES they are bf16. */
static void OF(get)(T *to, const char *from, int64_t at, int64_t count, int64_t half)
{
    if (half) {
        for (int64_t j = 0; j < count; j++)
            to[j] = widen_bf16(((const uint16_t *)from)[at + j]);
        return;
    }
    memcpy(to, (const T *)from + at, (size_t)count * sizeof(T));
}

static void OF(give)(char *to, const T *from, int64_t at, int64_t count, int64_t half)
{
    if (half) {
        for (int64_t j = 0; j < count; j++)
            ((uint16_t *)to)[at + j] = narrow_bf16((float)from[j]);
        return;
    }
    memcpy((T *)to + at, from, (size_t)count * sizeof(T));
}

/* One step, or first the initial state. Scratch: the state [PARTS][rows][hidden], sums of a step
 * [rows][columns], projected inputs of a row, the bias; then the product's scratch. With bf16 states,
 * unrounded copies are kept: two of h, because other units still read the previous one, and one of c. */
static void OF(recurrence_turn)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                char *scratch, int64_t number)
{
    const int64_t *n = call->ints, *of = call->children[0]->ints;
    const int64_t rows = n[M], hidden = n[K], width = n[N], steps = n[STEPS], all = rows * hidden;
    const int64_t half = n[HALF_STATES], gates = width / hidden, parts = n[PARTS], turn = number - 1;
    const int64_t first = begin * n[UNIT], count = least(end * n[UNIT], hidden) - first;
    const int64_t longest = longest_of(p[5], n[LENGTHS], rows, steps);
    const int64_t t = n[BACKWARD] ? steps - 1 - turn : turn;
    const int64_t from = n[BACKWARD] ? t + 1 : t, to = n[BACKWARD] ? t : t + 1;
    T *state = (T *)scratch, *sums = state + parts * all, *row = sums + rows * width;
    T *bias = row + width, *rest = (T *)(((uintptr_t)(bias + width) + 63) & ~(uintptr_t)63);
    T *wide = (T *)(void *)kept_in(call, p);
    for (int64_t part = 0; part < parts; part++)
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = i * hidden + first;
            T *now = state + part * all + at;
            if (turn < 0)
                OF(get)(now, p[2], part * all + at, count, half);
            else if (half)
                memcpy(now, wide + (part ? 2 : turn & 1) * all + at, (size_t)count * sizeof(T));
            else
                OF(get)(now, p[0], (part * (steps + 1) + from) * all + at, count, 0);
        }
    if (turn >= 0 && t < longest) {
        for (int64_t g = 0; g < gates; g++)
            OF(get)(bias + g * hidden + first, p[4], g * hidden + first, count, half);
        const T *x = half ? wide + (turn & 1) * all : (const T *)p[0] + from * all;
        for (int64_t g = 0; g < (count == hidden ? 1 : gates); g++) {
            const int64_t columns = count == hidden ? width : count;
            OF(recur)(of, x, p[3], (int)n[HALF_KERNEL], sums, rest, g * hidden + first, columns);
        }
        for (int64_t i = 0; i < rows; i++) {
            if (t >= integer_at(p[5], n[LENGTHS], i)) {
                for (int64_t g = 0; g < gates; g++)
                    memset(sums + i * width + g * hidden + first, 0, (size_t)count * sizeof(T));
                continue;
            }
            T *h = state + i * hidden + first, *q = sums + i * width + first, *b = bias + first;
            const T *in = row + first;
            for (int64_t g = 0, at = (t * rows + i) * width + first; g < gates; g++, at += hidden)
                OF(get)(row + g * hidden + first, p[1], at, count, half);
            switch (n[CELL]) {
            case TANH: OF(step_tanh)(h, in, q, b, count); break;
            case RELU: OF(step_relu)(h, in, q, b, count); break;
            case LSTM: OF(step_lstm)(h, h + all, in, q, b, hidden, count); break;
            default: OF(step_gru)(h, in, q, b, hidden, count);
            }
        }
    }
    for (int64_t part = 0; part < parts; part++)
        for (int64_t i = 0; i < rows; i++) {
            const T *now = state + part * all + i * hidden + first;
            OF(give)(p[0], now, (part * (steps + 1) + to) * all + i * hidden + first, count, half);
            if (half)
                memcpy(wide + (part ? 2 : number & 1) * all + i * hidden + first, now,
                       (size_t)count * sizeof(T));
        }
    if (turn < 0 || t >= longest)
        memset(sums, 0, n[KEPT] ? (size_t)(rows * width) * sizeof(T) : 0);
    for (int64_t g = 0; g < n[KEPT]; g++)
        for (int64_t i = 0; i < rows; i++) {
            const int64_t at = ((parts + g) * (steps + 1) + (turn < 0 ? steps : t)) * all + i * hidden;
            OF(give)(p[0], sums + i * width + g * hidden + first, at + first, count, half);
        }
}

static int OF(recurrence)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    take_turns(call, p, begin, end, scratch, call->ints[STEPS] + 1, OF(recurrence_turn));
    return 0;
}

/* Backward pass of each cell: the cotangents of its sums, from the cotangent of the state, which is
 * replaced by the part of the previous state's cotangent that bypasses the product. */
static void OF(pull_lstm)(T *cotangents, T *h, T *c, const T *sums, int64_t apart, const T *before,
                          const T *after, int64_t gate, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        T i = SIGMOID(sums[j]), f = SIGMOID(sums[apart + j]), g = TANH_(sums[2 * apart + j]);
        T o = SIGMOID(sums[3 * apart + j]), y = TANH_(after[j]);
        T d = c[j] + h[j] * o * (1 - y * y);
        cotangents[j] = d * g * i * (1 - i);
        cotangents[gate + j] = d * before[j] * f * (1 - f);
        cotangents[2 * gate + j] = d * i * (1 - g * g);
        cotangents[3 * gate + j] = h[j] * y * o * (1 - o);
        c[j] = d * f;
        h[j] = 0;
    }
}

static void OF(pull_gru)(T *cotangents, T *h, const T *sums, int64_t apart, const T *p, const T *before,
                         int64_t gate, int64_t count)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        T r = SIGMOID(sums[j]), z = SIGMOID(sums[apart + j]), q = sums[2 * apart + j];
        T n = TANH_(p[j] + r * q), d = h[j] * (1 - z) * (1 - n * n);
        cotangents[j] = d;
        cotangents[gate + j] = d * q * r * (1 - r);
        cotangents[2 * gate + j] = h[j] * (before[j] - n) * z * (1 - z);
        cotangents[3 * gate + j] = d * r;
        h[j] = h[j] * z;
    }
}

static void OF(pull_one)(T *cotangents, T *h, const T *after, int64_t count, int relu)
{
    INDEPENDENT_FOR (int64_t j = 0; j < count; j++) {
        cotangents[j] = relu ? (after[j] > 0 ? h[j] : 0) : h[j] * (1 - after[j] * after[j]);
        h[j] = 0;
    }
}

/* The product of the previous step, then this step, if any. The state's cotangent [PARTS][rows][hidden]
 * is kept. Scratch: the product [rows][hidden]; then the product's own scratch. */
static void OF(recurrence_vjp_turn)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                                    char *scratch, int64_t turn)
{
    const int64_t *n = call->ints, *of = call->children[0]->ints;
    const int64_t rows = n[M], hidden = n[N], steps = n[STEPS], all = rows * hidden;
    const int64_t width = n[MADE] * hidden, parts = n[PARTS], apart = (steps + 1) * all;
    const int64_t first = begin * n[UNIT], count = least(end * n[UNIT], hidden) - first;
    const int64_t t = n[BACKWARD] ? turn : steps - 1 - turn, done = n[BACKWARD] ? t - 1 : t + 1;
    T *const out = (T *)p[0], *carried = (T *)(void *)kept_in(call, p), *sums = (T *)scratch;
    T *rest = (T *)(((uintptr_t)(sums + all) + 63) & ~(uintptr_t)63);
    const T *g = (const T *)p[1], *states = (const T *)p[4];
    if (turn && done < longest_of(p[6], n[LENGTHS], rows, steps)) {
        OF(recur)(of, out + done * rows * width + width - of[K], p[5], 0, sums, rest, first, count);
        for (int64_t i = 0; i < rows; i++)
            if (done < integer_at(p[6], n[LENGTHS], i))
                for (int64_t j = i * hidden + first; j < i * hidden + first + count; j++)
                    carried[j] += sums[j];
    }
    for (int64_t i = 0; i < parts * rows; i++) {
        T *now = carried + i * hidden + first;
        if (!turn)
            OF(get)(now, p[2], i * hidden + first, count, 0);
        if (turn == steps)
            OF(give)((char *)(out + steps * rows * width), now, i * hidden + first, count, 0);
    }
    for (int64_t i = 0; i < rows && turn < steps; i++) {
        const int64_t at = i * hidden + first;
        T *h = carried + at, *to = out + (t * rows + i) * width + first;
        const T *x = states + (n[BACKWARD] ? t + 1 : t) * all + at;
        const T *y = states + (n[BACKWARD] ? t : t + 1) * all + at;
        const T *sums = states + parts * apart + t * all + at;
        for (int64_t j = 0; j < count; j++)
            h[j] += g[t * all + at + j];
        if (t >= integer_at(p[6], n[LENGTHS], i)) {
            for (int64_t gate = 0; gate < n[MADE]; gate++)
                memset(to + gate * hidden, 0, (size_t)count * sizeof(T));
            continue;
        }
        const T *in = (const T *)p[3] + (t * rows + i) * of[K] + first;
        switch (n[CELL]) {
        case LSTM: OF(pull_lstm)(to, h, h + all, sums, apart, x + apart, y + apart, hidden, count); break;
        case GRU: OF(pull_gru)(to, h, sums, apart, in + 2 * hidden, x, hidden, count); break;
        default: OF(pull_one)(to, h, y, count, n[CELL] == RELU);
        }
    }
}

static int OF(recurrence_vjp)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                              char *scratch)
{
    take_turns(call, p, begin, end, scratch, call->ints[STEPS] + 1, OF(recurrence_vjp_turn));
    return 0;
}
