/* Includes elementwise_ops.def for each dtype. */

#define KIND BOOL
#define DT bool
#define T uint8_t
#define W uint32_t
#define SIZE 1
#include "elementwise_ops.def"
#undef KIND

#define KIND UNSIGNED
#define DT u8
#define T uint8_t
#define W uint32_t
#define SIZE 1
#include "elementwise_ops.def"
#define DT u16
#define T uint16_t
#define W uint32_t
#define SIZE 2
#include "elementwise_ops.def"
#define DT u32
#define T uint32_t
#define W uint32_t
#define SIZE 4
#include "elementwise_ops.def"
#define DT u64
#define T uint64_t
#define W uint64_t
#define SIZE 8
#include "elementwise_ops.def"
#undef KIND

#define KIND SIGNED
#define DT i8
#define T int8_t
#define W uint32_t
#define SIZE 1
#include "elementwise_ops.def"
#define DT i16
#define T int16_t
#define W uint32_t
#define SIZE 2
#include "elementwise_ops.def"
#define DT i32
#define T int32_t
#define W uint32_t
#define SIZE 4
#include "elementwise_ops.def"
#define DT i64
#define T int64_t
#define W uint64_t
#define SIZE 8
#include "elementwise_ops.def"
#undef KIND

#define KIND FLOAT
#define SUFFIX f
#define DT f32
#define T float
#define W float
#define SIZE 4
#include "elementwise_ops.def"
#undef KIND
#undef SUFFIX

#define KIND FLOAT
#define SUFFIX
#define DT f64
#define T double
#define W double
#define SIZE 8
#include "elementwise_ops.def"
#undef KIND
#undef SUFFIX
