/* Constant tensors, ranges and triangles. DT is the dtype in which elements are stored. */

KERNEL void fill(TENSOR(DT, out), const i64 n, const DT value) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) out[i] = value;
}

KERNEL void arange(TENSOR(DT, out), const i64 n, const u64 start, const u64 step) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) out[i] = (DT)(start + (u64)i * step); /* modulo 2^64, which is exact */
}

/* Ones of a dtype on the k-th diagonal, zeros elsewhere. */
KERNEL void eye(TENSOR(DT, out), const i64 n, const i64 columns, const i64 k, const DT one) {
    const i64 i = ITEM(0);
    POINTER(DT, out);
    if (i < n) out[i] = i % columns - i / columns == k ? one : (DT)0;
}

/* Keep elements on and below the k-th diagonal, or with sign -1 on and above the -k-th. */
KERNEL void triangle(TENSOR(DT, out), TENSOR(DT, x), const i64 n, const i64 rows, const i64 columns,
                     const i64 sign, const i64 k, const i64 parts) {
    const i64 i = ITEM(0);
    if (i >= n) return;
    POINTER(DT, out);
    POINTER(DT, x);
    const i64 e = i / parts, column = e % columns, row = e / columns % rows;
    out[i] = sign * (column - row) <= k ? x[i] : (DT)0;
}
