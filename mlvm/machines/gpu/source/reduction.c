/* Reductions along the middle of three axes, x[before, length, behind], by trees of fixed shape.
 * An element of the result is computed from pieces of `piece` elements. Each piece leaves one
 * value in out[before, pieces, behind]; if there are several, the next launch reduces them. MAP
 * converts an element to an A, COMBINE combines two, and FINISH computes the result, optionally
 * with the `divisor`, a D. */

#ifdef CHOOSES /* index of the best element: AHEAD(a, b) is true if a is better than b */
typedef struct {
    COMPUTED(CHOOSES) value;
    i64 place;
} Choice;
typedef Choice stored_choice;
typedef Choice computed_choice;
DEVICE Choice load_choice(const GLOBAL Choice *x, i64 i) { return x[i]; }
#define store_choice(x, i, v) ((x)[i] = (v))
#define NOTHING choice(0, -1)
DEVICE Choice choice(COMPUTED(CHOOSES) value, i64 place) {
    Choice result;
    result.value = value;
    result.place = place;
    return result;
}
DEVICE Choice chosen(Choice a, Choice b) {
    if (a.place < 0 || b.place < 0) return a.place < 0 ? b : a;
    const int a_strange = a.value != a.value, b_strange = b.value != b.value;
    if (a_strange || b_strange) {
        if (a_strange && b_strange) return a.place < b.place ? a : b;
        return a_strange ? a : b;
    }
    if (AHEAD(a.value, b.value)) return a;
    if (AHEAD(b.value, a.value)) return b;
    return a.place < b.place ? a : b;
}
#endif

#ifdef CENTRED /* MAP and FINISH also get `middle`, an element of centre[before, behind] */
#define CENTRE TENSOR(A, centre),
#define CENTRE_POINTER POINTER(A, centre);
#define MIDDLE(place) const COMPUTED(A) middle = centre[place];
#else
#define CENTRE
#define CENTRE_POINTER
#define MIDDLE(place)
#endif

/* An item reduces a piece of WIDE adjacent columns. */
KERNEL void columns(TENSOR(T, out), TENSOR(X, x), CENTRE const i64 before, const i64 length, const i64 behind,
                    const i64 piece, const i64 pieces, const D divisor)
{
    POINTER(T, out);
    POINTER(X, x);
    CENTRE_POINTER
    const i64 across = (behind + WIDE - 1) / WIDE;
    i64 at = ITEM(0);
    if (at >= before * pieces * across) return;
    const i64 column = at % across * WIDE;
    at /= across;
    const i64 part = at % pieces, outer = at / pieces;
    const i64 first = part * piece, last = first + piece < length ? first + piece : length;
    const int wide = behind - column < WIDE ? (int)(behind - column) : WIDE;
    x += outer * length * behind + column;
    out += at * behind + column;
#if WIDE > 1
    if (wide == WIDE) {
        COMPUTED(A) all[WIDE];
        for (int j = 0; j < WIDE; j++) all[j] = INITIAL;
        for (i64 i = first; i < last; i++)
            for (int j = 0; j < WIDE; j++) {
                MIDDLE(outer * behind + column + j)
                all[j] = COMBINE(all[j], (MAP(LOAD(X, x, i * behind + j), i)));
            }
        for (int j = 0; j < WIDE; j++) {
            MIDDLE(outer * behind + column + j)
            STORE(T, out, j, FINISH(all[j]));
        }
        return;
    }
#endif
    for (int j = 0; j < wide; j++) {
        MIDDLE(outer * behind + column + j)
        COMPUTED(A) one = INITIAL;
        for (i64 i = first; i < last; i++) one = COMBINE(one, (MAP(LOAD(X, x, i * behind + j), i)));
        STORE(T, out, j, FINISH(one));
    }
}

/* A group reduces a piece of a row: item i reads elements i, i + 64, ..., then a tree combines
 * them. */
KERNEL void rows(TENSOR(T, out), TENSOR(X, x), CENTRE const i64 before, const i64 length, const i64 behind,
                 const i64 piece, const i64 pieces, const D divisor)
{
    POINTER(T, out);
    POINTER(X, x);
    CENTRE_POINTER
    LOCAL COMPUTED(A) tree[64];
    const i64 part = GROUP(0) % pieces, outer = GROUP(0) / pieces;
    const i64 first = part * piece, last = first + piece < length ? first + piece : length;
    const int lane = LOCAL_ITEM(0);
    MIDDLE(outer)
    x += outer * length;
    COMPUTED(A) one = INITIAL;
    const i64 even = first + (last - first) / 64 * 64;
    for (i64 i = first; i < even; i += 64) one = COMBINE(one, (MAP(LOAD(X, x, i + lane), i + lane)));
    if (even + lane < last) one = COMBINE(one, (MAP(LOAD(X, x, even + lane), even + lane)));
    tree[lane] = one;
    BARRIER;
    for (int span = 32; span; span >>= 1) {
        if (lane < span) tree[lane] = COMBINE(tree[lane], tree[lane + span]);
        BARRIER;
    }
    if (lane == 0) STORE(T, out, GROUP(0), FINISH(tree[0]));
}

#if !defined(CHOOSES) && !defined(CENTRED)
/* Running sums of each piece, starting from the sum of the previous pieces (if there are
 * several). */
KERNEL void scan(TENSOR(T, out), TENSOR(X, x), TENSOR(A, starts), const i64 before, const i64 length, const i64 behind,
                 const i64 piece, const i64 pieces)
{
    POINTER(T, out);
    POINTER(X, x);
    POINTER(A, starts);
    i64 at = ITEM(0);
    if (at >= before * pieces * behind) return;
    const i64 column = at % behind, part = at / behind % pieces, outer = at / behind / pieces;
    const i64 first = part * piece, last = first + piece < length ? first + piece : length;
    COMPUTED(A) sum = part ? starts[(outer * pieces + part - 1) * behind + column] : INITIAL;
    for (i64 i = first; i < last; i++) {
        const i64 place = (outer * length + i) * behind + column;
        sum = COMBINE(sum, (MAP(LOAD(X, x, place), i)));
        STORE(T, out, place, sum);
    }
}
#endif
