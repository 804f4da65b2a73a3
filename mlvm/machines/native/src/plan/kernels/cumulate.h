/* Kernel of a cumulative sum or product. Define these macros before you include it:
 *
 *   CUMULATE(name)             a function's name for this operation
 *   COMBINE(a, b)              combine two results; a is the result of the earlier elements
 *   REPAIR(out, x, length, by) optional: correct the results of a column, whose elements are `by` apart
 */
/* A unit is a row, or a block of columns. */
static int CUMULATE(run)(const KernelCall *call, char *const *p, int64_t begin, int64_t end, char *scratch)
{
    const int64_t *n = call->ints, length = n[LENGTH], inner = n[INNER], width = n[WIDTH];
    const int64_t blocks = (inner + width - 1) / width;
    (void)scratch;
    for (int64_t u = begin; u < end; u++) {
        const int64_t block = u % blocks * width, at = u / blocks * length * inner + block;
        const int64_t columns = inner - block < width ? inner - block : width;
        const X *x = (const X *)p[1] + at;
        SUM *out = (SUM *)p[0] + at;
        if (inner == 1) {
            SUM one = LIFTED(x[0]);
            out[0] = one;
            for (int64_t i = 1; i < length; i++)
                out[i] = one = COMBINE(one, LIFTED(x[i]));
        } else {
            for (int64_t j = 0; j < columns; j++)
                out[j] = LIFTED(x[j]);
            for (int64_t i = 1; i < length; i++) {
                INDEPENDENT_FOR (int64_t j = 0; j < columns; j++)
                    out[i * inner + j] = COMBINE(out[(i - 1) * inner + j], LIFTED(x[i * inner + j]));
            }
        }
#ifdef REPAIR
        for (int64_t j = 0; j < columns; j++)
            REPAIR(out + j, x + j, length, inner);
#endif
    }
    return 0;
}

#undef CUMULATE
#undef COMBINE
#undef REPAIR
