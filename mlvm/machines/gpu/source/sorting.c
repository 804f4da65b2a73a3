/* Stable merge sort of rows, with the index of each element: along the middle one of three axes of x. Keys are stored
 * in `rows` rows. BEFORE(a, b) is true if a precedes b. K is the dtype of keys. RUN elements are first sorted by
 * counting the elements before each. */

#define RUN 32

KERNEL void begin(TENSOR(K, keys), TENSOR(i32, order), TENSOR(X, x), const i64 total, const i64 length, const i64 behind)
{
    POINTER(K, keys);
    POINTER(i32, order);
    POINTER(X, x);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 row = at / length, i = at % length, first = i / RUN * RUN;
    const i64 end = first + RUN < length ? first + RUN : length;
    x += row / behind * length * behind + row % behind;
    const COMPUTED(K) key = LOAD(X, x, i * behind);
    i64 rank = first;
    for (i64 j = first; j < end; j++) {
        const COMPUTED(K) other = LOAD(X, x, j * behind);
        rank += BEFORE(other, key) || (j < i && !BEFORE(key, other));
    }
    keys[row * length + rank] = key;
    order[row * length + rank] = (i32)i;
}

/* Merge two runs of `run` elements: an element moves by the number of preceding elements in the
 * other run. */
KERNEL void merge(TENSOR(K, keys), TENSOR(i32, order), TENSOR(K, from_keys), TENSOR(i32, from_order), const i64 total,
                  const i64 length, const i64 run)
{
    POINTER(K, keys);
    POINTER(i32, order);
    POINTER(K, from_keys);
    POINTER(i32, from_order);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 row = at / length * length, i = at % length, pair = i / (2 * run) * (2 * run);
    const int in_second = i - pair >= run;
    const i64 other = in_second ? pair : pair + run;
    i64 first = other < length ? other : length, end = other + run < length ? other + run : length;
    const i64 start = first;
    const COMPUTED(K) key = from_keys[at];
    while (first < end) {
        const i64 middle = (first + end) / 2;
        const COMPUTED(K) value = from_keys[row + middle];
        if (in_second ? !BEFORE(key, value) : BEFORE(value, key)) first = middle + 1;
        else end = middle;
    }
    const i64 to = row + pair + (i - pair - (in_second ? run : 0)) + (first - start);
    keys[to] = key;
    order[to] = from_order[at];
}

/* Write the first `count` keys of each row to the result, or with NUMBERS their indices. */
KERNEL void put_back(TENSOR(T, out), TENSOR(K, keys), TENSOR(i32, order), const i64 total, const i64 length,
                     const i64 behind, const i64 count)
{
    POINTER(T, out);
    POINTER(K, keys);
    POINTER(i32, order);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 row = at / count, from = row * length + at % count;
    const i64 to = row / behind * count * behind + row % behind + at % count * behind;
#if NUMBERS
    out[to] = order[from];
#else
    STORE(T, out, to, keys[from]);
#endif
}
