/* The sweeps for any processor: vector extensions alone, which the compiler lowers to what the platform has. */
#define SWEEP(name) name##_baseline
#define F64_LANES 2
#define F32_LANES 4

#define SELECT(test, a, b, vector, ints) ((vector)(((test) & (ints)(a)) | (~(test) & (ints)(b))))
#define MIN_F32(a, b) SELECT((a) < (b), a, b, f32_vector, i32_vector)
#define MAX_F32(a, b) SELECT((a) > (b), a, b, f32_vector, i32_vector)
#define MIN_F64(a, b) SELECT((a) < (b), a, b, f64_vector, i64_vector)
#define MAX_F64(a, b) SELECT((a) > (b), a, b, f64_vector, i64_vector)
#define MIN_I32(a, b) SELECT((a) < (b), a, b, i32_vector, i32_vector)
#define MAX_I32(a, b) SELECT((a) > (b), a, b, i32_vector, i32_vector)
#define FMA(a, b, c) ((a) * (b) + (c))

#include "sweep.h"
