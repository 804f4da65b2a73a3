/* Gather and scatter by indices and masks. Tensors are viewed as [before, length, behind]: the axes before and after
 * the axis of the indices. T is the dtype of the elements, or an unsigned integer of the same size for pure moves. I is
 * the dtype of the indices; negative indices count from the end. */

#ifdef I
/* `place`: the position of index i. An index out of range is reported, and gives -1. */
#define FIND(i, lowest) FIND_NOTED(i, lowest, i)
#define FIND_NOTED(i, lowest, noted)                                                               \
    i64 place = (i64)LOAD(I, indices, i);                                                          \
    if (SIGNED && place < 0 && place >= (lowest)) place += length;                                 \
    if (place < 0 || place >= length || (!SIGNED && LOAD(I, indices, i) >= (u64)length)) {         \
        REFUSE(noted, LOAD(I, indices, i));                                                        \
        place = -1;                                                                                \
    }

KERNEL void take(TENSOR(T, out), TENSOR(T, x), TENSOR(I, indices), REFUSALS, const i64 total, const i64 length,
                 const i64 behind, const i64 count)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 outer = at / behind / count;
    FIND(at / behind % count, -length)
    out[at] = place < 0 ? 0 : x[(outer * length + place) * behind + at % behind];
}

/* Combine positions in several axes; `out` has the positions in the axes before `axis`. */
KERNEL void flat_indices(TENSOR(i64, out), TENSOR(I, indices), REFUSALS, const i64 total, const i64 length,
                         const i64 axis)
{
    POINTER(i64, out);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    FIND_NOTED(at, -length, axis * total + at)
    out[at] = (axis ? out[at] * length : 0) + (place < 0 ? 0 : place);
}

KERNEL void take_along_axis(TENSOR(T, out), TENSOR(T, x), TENSOR(I, indices), REFUSALS, const i64 total,
                            const i64 length, const i64 behind, const i64 count, const i64 units)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 outer = at / behind / count;
    FIND(at / units, -length)
    out[at] = place < 0 ? 0 : x[(outer * length + place) * behind + at % behind];
}

/* Weighted sums of `many` rows of the two middle axes; rows with weight 0 are ignored. The indices
 * are [points, many] for each outer position, or the same for all. */
KERNEL void weighted_take(TENSOR(T, out), TENSOR(T, x), TENSOR(I, indices), TENSOR(T, weights), REFUSALS,
                          const i64 total, const i64 length, const i64 behind, const i64 points, const i64 many,
                          const i64 shared)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(I, indices);
    POINTER(T, weights);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 outer = at / behind / points, point = (shared ? 0 : outer * points) + at / behind % points;
    COMPUTED(T) sum = 0;
    for (i64 k = 0; k < many; k++) {
        FIND(point * many + k, 0)
        const COMPUTED(T) weight = LOAD(T, weights, point * many + k);
        if (place >= 0 && weight != 0) sum += weight * LOAD(T, x, (outer * length + place) * behind + at % behind);
    }
    STORE(T, out, at, sum);
}

KERNEL void one_hot(TENSOR(T, out), TENSOR(I, indices), REFUSALS, const i64 total, const i64 length)
{
    POINTER(T, out);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    FIND(at / length, 0)
    STORE(T, out, at, place == at % length ? 1 : 0);
}

/* Positions of indices, `length` for an index out of range; they are sorted before summation. */
KERNEL void places(TENSOR(i64, out), TENSOR(I, indices), REFUSALS, const i64 total, const i64 length)
{
    POINTER(i64, out);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    FIND(at, -length)
    out[at] = place < 0 ? length : place;
}

/* last[place]: the number of the last index for that position, counted from the end. */
KERNEL void last_index(TENSOR(i32, last), TENSOR(I, indices), REFUSALS, const i64 total, const i64 length)
{
    POINTER(i32, last);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    FIND(at, -length)
    if (place >= 0) ATOMIC_MIN(last + place, (i32)(total - 1 - at));
}

KERNEL void dynamic_update(TENSOR(T, out), TENSOR(T, x), TENSOR(T, update), TENSOR(I, start), REFUSALS,
                           const i64 total, const i64 length, const i64 behind, const i64 count)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, update);
    POINTER(I, start);
    const i64 at = ITEM(0);
    if (at >= total) return;
    i64 first = (i64)LOAD(I, start, 0);
    if (SIGNED && first < 0) first += length;
    const int fits = first >= 0 && first <= length - count && (SIGNED || LOAD(I, start, 0) <= (u64)length);
    if (!fits) REFUSE(0, LOAD(I, start, 0));
    const i64 outer = at / behind / length, row = at / behind % length - first;
    if (fits && row >= 0 && row < count) out[at] = update[(outer * count + row) * behind + at % behind];
    else if (out != x) out[at] = x[at];
}
#endif

KERNEL void fill_i32(TENSOR(i32, out), const i64 total, const i32 value)
{
    POINTER(i32, out);
    if (ITEM(0) < total) out[ITEM(0)] = value;
}

/* x, with the value of the last index for each indexed element. Values have strides for three
 * axes. */
KERNEL void index_set(TENSOR(T, out), TENSOR(T, x), TENSOR(T, values), TENSOR(i32, last), const i64 total,
                      const i64 length, const i64 behind, const i64 count, const i64 outer_step, const i64 step,
                      const i64 inner_step)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, values);
    POINTER(i32, last);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 from_end = last[at / behind % length];
    if (from_end < count)
        out[at] = values[at / behind / length * outer_step + (count - 1 - from_end) * step + at % behind * inner_step];
    else if (out != x) out[at] = x[at];
}

#ifdef MASKED
/* x, or 0, with the values in order where the mask is True; `ranks` are its running sums. */
KERNEL void mask_set(TENSOR(T, out), TENSOR(T, x), TENSOR(T, values), TENSOR(bool, mask), TENSOR(i64, ranks), REFUSALS,
                     const i64 total, const i64 places, const i64 behind, const i64 count, const i64 step,
                     const i64 inner_step)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, values);
    POINTER(bool, mask);
    POINTER(i64, ranks);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const int fits = ranks[places - 1] == count;
    if (!fits) REFUSE(-1, ranks[places - 1]); /* no position: report the number of True elements */
    const i64 place = at / behind;
    if (fits && mask[place]) out[at] = values[(ranks[place] - 1) * step + at % behind * inner_step];
    else if (MASKED) out[at] = 0;
    else if (out != x) out[at] = x[at];
}
#endif

#ifdef ADDS
#if BY == 0
#define TOGETHER(x, y) ((x) + (y))
#elif BY == 1
#define TOGETHER(x, y) ((x) * (y))
#elif BY == 2
#define TOGETHER(x, y) ((x) < (y) || (x) != (x) ? (x) : (y))
#else
#define TOGETHER(x, y) ((x) > (y) || (x) != (x) ? (x) : (y))
#endif
/* Sums by position: x, or 0, plus the updates for an element in their order. BY may select
 * another reduction. The sorted positions, with the numbers of their indices, are searched for
 * the first of each. */
KERNEL void add_sorted(TENSOR(T, out), TENSOR(T, x), TENSOR(T, updates), TENSOR(i64, sorted), TENSOR(i32, order),
                       const i64 total, const i64 length, const i64 behind, const i64 count, const i64 along)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, updates);
    POINTER(i64, sorted);
    POINTER(i32, order);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 inner = at % behind, place = at / behind % length, outer = at / behind / length;
    if (along) { /* each row along the axis has separate indices */
        sorted += (outer * behind + inner) / along * count;
        order += (outer * behind + inner) / along * count;
    }
    i64 first = 0, end = count;
    while (first < end) {
        const i64 middle = (first + end) / 2;
        if (sorted[middle] < place) first = middle + 1;
        else end = middle;
    }
    COMPUTED(T) sum = ADDS ? LOAD(T, x, at) : 0;
    for (; first < count && sorted[first] == place; first++)
        sum = TOGETHER(sum, LOAD(T, updates, (outer * count + order[first]) * behind + inner));
    STORE(T, out, at, sum);
}

#ifdef I
/* The same for few indices: each element scans all of them. */
KERNEL void add_few(TENSOR(T, out), TENSOR(T, x), TENSOR(T, updates), TENSOR(I, indices), REFUSALS, const i64 total,
                    const i64 length, const i64 behind, const i64 count, const i64 along)
{
    POINTER(T, out);
    POINTER(T, x);
    POINTER(T, updates);
    POINTER(I, indices);
    const i64 at = ITEM(0);
    if (at >= total) return;
    const i64 inner = at % behind, target = at / behind % length, outer = at / behind / length;
    COMPUTED(T) sum = ADDS ? LOAD(T, x, at) : 0;
    for (i64 i = 0; i < count; i++) {
        FIND(along ? (outer * count + i) * (behind / along) + inner / along : i, -length)
        if (place == target) sum = TOGETHER(sum, LOAD(T, updates, (outer * count + i) * behind + inner));
    }
    STORE(T, out, at, sum);
}
#endif
#endif
