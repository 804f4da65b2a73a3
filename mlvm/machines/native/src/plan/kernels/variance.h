/* Variance: for each part, the mean and then the sum of squared deviations. Parts are combined as in
 * Chan, Golub and LeVeque (Updating formulae, 1979). * floats: the number of elements, and that number
 * minus `correction`, at least 0. */
static int NAMED(run, var)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                           char *scratch)
{
    const int64_t *n = call->ints, inner = n[INNER], length = n[LENGTH];
    X *out = (X *)p[0];
    if (n[CONTIGUOUS] && inner == 1) {
        const X count = (X)call->floats[0], divisor = (X)call->floats[1];
        for (int64_t u = begin; u < end; u++) {
            const X *x = (const X *)p[1] + u * length;
            const X mean = NAMED(row, sum)(x, length, 0) / count;
            out[u] = NAMED(row, squares)(x, length, mean) / divisor;
        }
        return 0;
    }
    X *mean = (X *)scratch;
    for (int64_t u = begin; u < end; u++) {
        const Part part = part_of(n, u);
        const X *x = (const X *)p[1] + part.from;
        const X count = (X)(part.rows * part.length);
        X *to = (n[PARTS] > 1 ? (X *)p[2] : out) + part.to;
        if (inner == 1) {
            mean[0] = NAMED(rows, sum)(x, part.rows, n[STRIDE], part.length, 0) / count;
            to[0] = NAMED(rows, squares)(x, part.rows, n[STRIDE], part.length, mean[0]);
        } else {
            NAMED(groups, sum)(mean, x, part.rows, n[STRIDE], part.length, inner, part.width, NULL);
            for (int64_t j = 0; j < part.width; j++)
                mean[j] /= count;
            NAMED(groups, squares)(to, x, part.rows, n[STRIDE], part.length, inner, part.width, mean);
        }
        X *means = (X *)p[2] + n[OUTPUTS] * n[PARTS] * inner + part.to;
        for (int64_t j = 0; j < part.width; j++)
            if (n[PARTS] > 1)
                means[j] = mean[j];
            else
                to[j] /= (X)call->floats[1];
    }
    return 0;
}

static int NAMED(finish, var)(const KernelCall *call, char *const *p, int64_t begin, int64_t end,
                              char *scratch)
{
    enum { W = 64 };
    const int64_t *n = call->ints, inner = n[INNER], blocks = n[BLOCKS];
    (void)begin, (void)end, (void)scratch;
    for (int64_t output = 0; n[PARTS] > 1 && output < n[OUTPUTS]; output++)
        for (int64_t column = 0; column < inner; column += W) {
            const int width = inner - column < W ? (int)(inner - column) : W;
            const X *squares = (const X *)p[2] + output * n[PARTS] * inner + column;
            const X *means = squares + n[OUTPUTS] * n[PARTS] * inner;
            X *out = (X *)p[0] + output * inner + column;
            double mean[W] = {0}, sum[W] = {0};
            for (int64_t i = 0; i < n[PARTS]; i++) {
                const double count = (double)elements_of(n, i * blocks);
                for (int j = 0; j < width; j++)
                    mean[j] += count / call->floats[0] * (double)means[i * inner + j];
            }
            for (int64_t i = 0; i < n[PARTS]; i++) {
                const double count = (double)elements_of(n, i * blocks);
                for (int j = 0; j < width; j++) {
                    const double distance = (double)means[i * inner + j] - mean[j];
                    sum[j] += (double)squares[i * inner + j] + count * (distance * distance);
                }
            }
            for (int j = 0; j < width; j++)
                out[j] = (X)(sum[j] / call->floats[1]);
        }
    return 0;
}
