/* Names that differ between OpenCL C 1.2 and CUDA C, and dtypes. It is prepended to each source.
 *
 * A tensor is passed as two parameters: the memory, and the offset of the first byte. TENSOR(DT, x)
 * declares them, and POINTER(DT, x) combines them into a pointer x. LOAD(DT, x, i) reads element i in the
 * type in which the dtype is computed, and STORE(DT, x, i, v) rounds v to the dtype. COMPUTED(f16) and
 * COMPUTED(bf16) are float.
 *
 *     KERNEL void twice(TENSOR(f16, out), TENSOR(f16, x), const i64 n) {
 *         POINTER(f16, out); POINTER(f16, x);
 *         const i64 i = ITEM(0);
 *         if (i < n) STORE(f16, out, i, 2 * LOAD(f16, x, i));
 *     }
 */

#ifdef __OPENCL_VERSION__

#pragma OPENCL FP_CONTRACT OFF
#ifdef cl_khr_fp64
#pragma OPENCL EXTENSION cl_khr_fp64 : enable
#define HAVE_F64 1
#endif
#define KERNEL __kernel
#define GLOBAL __global
#define LOCAL __local
#define LOCAL_POINTER(T) __local T *
#define TABLE __constant
#define DEVICE static
#define BARRIER barrier(CLK_LOCAL_MEM_FENCE)
#define ITEM(d) ((i64)get_global_id(d))
#define ITEMS(d) ((i64)get_global_size(d))
#define LOCAL_ITEM(d) ((int)get_local_id(d))
#define LOCAL_SIZE(d) ((int)get_local_size(d))
#define GROUP(d) ((i64)get_group_id(d))
#define GROUPS(d) ((i64)get_num_groups(d))
#define ATOMIC_ADD(p, v) atomic_add(p, v)
#define ATOMIC_MIN(p, v) atomic_min(p, v)
#define ATOMIC_SWAP(p, old, v) atomic_cmpxchg(p, old, v)
#define HIGH_PRODUCT(x, y) mul_hi((u64)(x), (u64)(y))
typedef char i8;
typedef uchar u8;
typedef short i16;
typedef ushort u16;
typedef int i32;
typedef uint u32;
typedef long i64;
typedef ulong u64;
typedef float f32;
#define F32_OF_BITS(x) as_float((u32)(x))
#define BITS_OF_F32(x) as_uint((f32)(x))
#ifdef HAVE_F64
typedef double f64;
#define F64_OF_BITS(x) as_double((u64)(x))
#define BITS_OF_F64(x) as_ulong((f64)(x))
#endif
DEVICE f32 load_f16(const GLOBAL u16 *x, i64 i) { return vload_half(i, (const GLOBAL half *)x); }
DEVICE void store_f16(GLOBAL u16 *x, i64 i, f32 v) { vstore_half_rte(v, i, (GLOBAL half *)x); }

#else /* CUDA C, as NVRTC compiles it */

#define HAVE_F64 1
#define KERNEL extern "C" __global__
#define GLOBAL
#define LOCAL __shared__
#define LOCAL_POINTER(T) T *
#define TABLE __constant__
#define DEVICE static __device__
#define BARRIER __syncthreads()
#define ITEM(d) (GROUP(d) * LOCAL_SIZE(d) + LOCAL_ITEM(d))
#define ITEMS(d) (GROUPS(d) * LOCAL_SIZE(d))
#define LOCAL_ITEM(d) ((int)(d == 0 ? threadIdx.x : d == 1 ? threadIdx.y : threadIdx.z))
#define LOCAL_SIZE(d) ((int)(d == 0 ? blockDim.x : d == 1 ? blockDim.y : blockDim.z))
#define GROUP(d) ((i64)(d == 0 ? blockIdx.x : d == 1 ? blockIdx.y : blockIdx.z))
#define GROUPS(d) ((i64)(d == 0 ? gridDim.x : d == 1 ? gridDim.y : gridDim.z))
#define ATOMIC_ADD(p, v) atomicAdd(p, v)
#define ATOMIC_MIN(p, v) atomicMin(p, v)
#define ATOMIC_SWAP(p, old, v) atomicCAS(p, old, v)
#define HIGH_PRODUCT(x, y) __umul64hi(x, y)
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#define F32_OF_BITS(x) __uint_as_float(x)
#define BITS_OF_F32(x) __float_as_uint(x)
#define F64_OF_BITS(x) __longlong_as_double((i64)(x))
#define BITS_OF_F64(x) ((u64)__double_as_longlong(x))
DEVICE f32 load_f16(const u16 *x, i64 i) {
    f32 v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(x[i]));
    return v;
}
DEVICE void store_f16(u16 *x, i64 i, f32 v) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(x[i]) : "f"(v)); }

#endif

#define UNROLL _Pragma("unroll")

/* --- dtypes: how each is stored, in what it is computed, and the way between --- */

typedef u8 stored_bool;
typedef u8 computed_bool;
#define SAME_DTYPE(DT)                                                                             \
    typedef DT stored_##DT;                                                                        \
    typedef DT computed_##DT;                                                                      \
    DEVICE DT load_##DT(const GLOBAL DT *x, i64 i) { return x[i]; }                                \
    DEVICE void store_##DT(GLOBAL DT *x, i64 i, DT v) { x[i] = v; }
SAME_DTYPE(u8)
SAME_DTYPE(i8)
SAME_DTYPE(i16)
SAME_DTYPE(u16)
SAME_DTYPE(i32)
SAME_DTYPE(u32)
SAME_DTYPE(i64)
SAME_DTYPE(u64)
SAME_DTYPE(f32)
#ifdef HAVE_F64
SAME_DTYPE(f64)
#endif
DEVICE u8 load_bool(const GLOBAL u8 *x, i64 i) { return x[i]; }
DEVICE void store_bool(GLOBAL u8 *x, i64 i, u8 v) { x[i] = v; }
typedef u16 stored_f16;
typedef u16 stored_bf16;
typedef f32 computed_f16;
typedef f32 computed_bf16;
DEVICE f32 load_bf16(const GLOBAL u16 *x, i64 i) { return F32_OF_BITS((u32)x[i] << 16); }
DEVICE void store_bf16(GLOBAL u16 *x, i64 i, f32 v) { /* to nearest even; nan stays nan */
    const u32 bits = BITS_OF_F32(v), upper = bits >> 16;
    x[i] = (u16)(v != v ? upper | 0x40 : (bits + 0x7fff + (upper & 1)) >> 16);
}

/* Round a value to half precision; return it as f32. */
DEVICE f32 rounded_f16(f32 v) {
#ifdef __OPENCL_VERSION__
    u16 bits;
    vstore_half_rte(v, 0, (half *)&bits);
    return vload_half(0, (const half *)&bits);
#else
    u16 bits;
    store_f16(&bits, 0, v);
    return load_f16(&bits, 0);
#endif
}
DEVICE f32 rounded_bf16(f32 v) {
    const u32 bits = BITS_OF_F32(v), upper = bits >> 16;
    return F32_OF_BITS((v != v ? upper | 0x40 : (bits + 0x7fff + (upper & 1)) >> 16) << 16);
}
#ifdef HAVE_F64
/* Round an f64 to f32 with rounding to odd. A second rounding then gives the same result as a single
 * rounding of x (Boldo and Melquiond, IEEE Trans. Computers 57, 2008). */
DEVICE f32 odd_f32(f64 x) {
    const f32 nearest = (f32)x;
    u32 bits = BITS_OF_F32(nearest);
    if (x != x) return nearest;
    bits -= fabs((f64)nearest) > fabs(x);
    bits |= (f64)nearest != x;
    return F32_OF_BITS(bits);
}
#define BEFORE_HALF(x) odd_f32((f64)(x))
#else
#define BEFORE_HALF(x) ((f32)(x)) /* without f64, integers may be rounded twice */
#endif

#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)
#define STORED(DT) PASTE(stored_, DT)
#define COMPUTED(DT) PASTE(computed_, DT)
#define LOAD(DT, x, i) PASTE(load_, DT)(x, i)
#define STORE(DT, x, i, v) PASTE(store_, DT)(x, i, v)
#define TENSOR(DT, x) GLOBAL u8 *x##_memory, const i64 x##_at
#define POINTER(DT, x) GLOBAL STORED(DT) *x = (GLOBAL STORED(DT) *)(x##_memory + x##_at)

/* A kernel that rejects a value reports it here, and continues with a harmless value. The report consists
 * of a flag, the position of the value in the operand, and the value; floats are reported as the bits of an
 * f64. If several values are rejected, the first is reported. */
#define REFUSALS TENSOR(i64, refused)
DEVICE void refuse(GLOBAL i64 *report, i64 at, i64 value) {
    if (ATOMIC_SWAP((GLOBAL i32 *)report, 0, 1) == 0) {
        report[1] = at;
        report[2] = value;
    }
}
#define REFUSE(at, value) refuse((GLOBAL i64 *)(refused_memory + refused_at), at, (i64)(value))
