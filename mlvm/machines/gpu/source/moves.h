/* Copies between strided tensors with up to six axes: out[sum of c * o] = x[sum of c * s].
 * Elements are read as DT and written as TO; with ADD they are added to the output. An item
 * copies RUN elements along the innermost axis, of `length`, whose blocks are axis 0. */

#define AXIS(d)                                                                                    \
    if (n##d != 1) {                                                                               \
        const INDEX c = rest % (INDEX)n##d;                                                        \
        rest /= (INDEX)n##d;                                                                       \
        to += (i64)c * o##d;                                                                       \
        from += (i64)c * s##d;                                                                     \
    }
#define OF_AXIS(d) const i64 n##d, const i64 o##d, const i64 s##d

#ifdef ADD
#define ONE(to, from) STORE(TO, out, to, LOAD(TO, out, to) + LOAD(DT, x, from));
#else
#define ONE(to, from) STORE(TO, out, to, (COMPUTED(TO))LOAD(DT, x, from));
#endif

KERNEL void move(TENSOR(TO, out), TENSOR(DT, x), const i64 n, const i64 o, const i64 s,
                 const i64 length, const i64 o_step, const i64 s_step,
                 OF_AXIS(0), OF_AXIS(1), OF_AXIS(2), OF_AXIS(3), OF_AXIS(4), OF_AXIS(5)) {
    const i64 i = ITEM(0);
    if (i >= n) return;
    POINTER(TO, out);
    POINTER(DT, x);
    i64 to = o, from = s;
    INDEX rest = (INDEX)i;
    AXIS(0) AXIS(1) AXIS(2) AXIS(3) AXIS(4) AXIS(5)
#if RUN > 1
    const i64 begin = i % n0 * RUN;
    const int count = length - begin < RUN ? (int)(length - begin) : RUN;
    for (int j = 0; j < count; j++) { ONE(to + j * o_step, from + j * s_step) }
#else
    ONE(to, from)
#endif
}
