/* Tensors of a description. */

#ifdef FILL
KERNEL void fill(TENSOR(DT, out), const i64 n, const DT value) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) out[i] = value;
}
#endif

#ifdef ARANGE_INTEGERS
KERNEL void arange(TENSOR(DT, out), const i64 n, const u64 start, const u64 step) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) out[i] = (DT)(start + (u64)i * step); /* modulo 2^64, which is exact */
}
#endif

#ifdef TRIANGLE /* keeps what is not above the k-th diagonal, or with UPPER what is not below it */
KERNEL void triangle(TENSOR(DT, out), TENSOR(DT, x), const i64 n, const i64 rows, const i64 columns,
                     const i64 k, const i64 parts) {
    const i64 i = ITEM(0);
    if (i >= n) return;
    POINTER(DT, out);
    POINTER(DT, x);
    const i64 e = i / parts, column = e % columns, row = e / columns % rows;
#ifdef UPPER
    out[i] = column - row >= k ? x[i] : 0;
#else
    out[i] = column - row <= k ? x[i] : 0;
#endif
}
#endif

#ifdef DIAGONAL
KERNEL void eye(TENSOR(DT, out), const i64 n, const i64 columns, const i64 k) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) STORE(DT, out, i, i % columns - i / columns == k);
}
#endif
