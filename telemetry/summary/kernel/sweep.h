/* The sweeps, as a template. A build includes this once, after it has set
 *
 *   SWEEP(name)              the name of a function of this build
 *   F64_LANES, F32_LANES     doubles in one vector, and float32 in one vector
 *   MIN_F32 … MAX_I32        what vector extensions lack; a if a < b (or a > b) else b, as the processors have it
 *   FMA(a, b, c)             a · b + c, used only where a · b needs no rounding, so that a fused one is the same
 *
 * Lane i of a sum takes elements i, i + 8, i + 16 …, and lanes are folded in one order: that is what makes builds agree.
 */
#include <math.h>
#include <string.h>

#include "kernel.h"

#define NUM_VECTORS (LANES / F64_LANES)

typedef float f32_vector __attribute__((vector_size(F32_LANES * 4)));
typedef int32_t i32_vector __attribute__((vector_size(F32_LANES * 4)));
typedef double f64_vector __attribute__((vector_size(F64_LANES * 8)));
typedef int64_t i64_vector __attribute__((vector_size(F64_LANES * 8)));
typedef float narrow_f32 __attribute__((vector_size(F64_LANES * 4)));
typedef int32_t narrow_i32 __attribute__((vector_size(F64_LANES * 4)));

#define MAGNITUDE_F64 INT64_C(0x7fffffffffffffff)
#define EXPONENT_F64 INT64_C(0x7ff0000000000000)
#define MANTISSA_F64 INT64_C(0x000fffffffffffff)

static inline f64_vector read_f32(const float *x) {
    narrow_f32 narrow;
    memcpy(&narrow, x, sizeof narrow);
    return __builtin_convertvector(narrow, f64_vector);
}

static inline f64_vector read_f64(const double *x) {
    f64_vector v;
    memcpy(&v, x, sizeof v);
    return v;
}

static inline int64_t bits_f64(double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline double from_bits_f64(int64_t bits) {
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* A true lane of a comparison is -1, so counts are kept below zero. */
#define COUNT(v, lanes, out)                             \
    do {                                                 \
        int64_t sum = 0;                                 \
        for (int l = 0; l < (lanes); l++) sum -= (v)[l]; \
        (out) = sum;                                     \
    } while (0)

static void SWEEP(widen_bf16)(const uint16_t *from, size_t n, float *to) {
    uint32_t *bits = (uint32_t *)(void *)to;
    for (size_t i = 0; i < n; i++) bits[i] = (uint32_t)from[i] << 16;
}

/* Shift the fields into place and let one exact multiplication re-bias the exponent, of subnormals too. */
static void SWEEP(widen_f16)(const uint16_t *from, size_t n, float *to) {
    for (size_t i = 0; i < n; i++) {
        uint32_t magnitude = (uint32_t)(from[i] & 0x7fff) << 13, bits;
        float value;
        memcpy(&value, &magnitude, sizeof value);
        value *= 0x1p112f;
        memcpy(&bits, &value, sizeof bits);
        bits |= magnitude >= (UINT32_C(0x7c00) << 13) ? UINT32_C(0x7f800000) : 0;
        bits |= (uint32_t)(from[i] & 0x8000) << 16;
        memcpy(to + i, &bits, sizeof bits);
    }
}

#define DEFINE_CENSUS(T, type, value_vector, int_vector, count, MAGNITUDE, MIN_OF, MAX_OF) \
    static int SWEEP(census_##T)(const type *x, size_t n, lanes *to) {                     \
        const value_vector none = {0}, infinity = none + (type)INFINITY;                   \
        int_vector zero, negative, finite = (int_vector){0} == 0;                          \
        value_vector min, max;                                                             \
        memcpy(&zero, to->zero.T, sizeof zero);                                            \
        memcpy(&negative, to->negative.T, sizeof negative);                                \
        memcpy(&min, to->min.T, sizeof min);                                               \
        memcpy(&max, to->max.T, sizeof max);                                               \
        size_t i = 0;                                                                      \
        for (; i + (count) <= n; i += (count)) {                                           \
            value_vector value;                                                            \
            memcpy(&value, x + i, sizeof value);                                           \
            finite &= (value_vector)((int_vector)value & (MAGNITUDE)) < infinity;          \
            zero -= value == none;                                                         \
            negative -= value < none;                                                      \
            min = MIN_OF(value, min);                                                      \
            max = MAX_OF(value, max);                                                      \
        }                                                                                  \
        int all_finite = 1;                                                                \
        for (int l = 0; l < (count); l++) all_finite &= finite[l] != 0;                    \
        for (size_t t = i; t < n; t++) all_finite &= x[t] - x[t] == 0;                     \
        if (!all_finite) return 0;                                                         \
        memcpy(to->zero.T, &zero, sizeof zero);                                            \
        memcpy(to->negative.T, &negative, sizeof negative);                                \
        memcpy(to->min.T, &min, sizeof min);                                               \
        memcpy(to->max.T, &max, sizeof max);                                               \
        for (; i < n; i++) {                                                               \
            to->zero.T[0] += x[i] == 0;                                                    \
            to->negative.T[0] += x[i] < 0;                                                 \
            if (x[i] < to->min.T[0]) to->min.T[0] = x[i];                                  \
            if (x[i] > to->max.T[0]) to->max.T[0] = x[i];                                  \
        }                                                                                  \
        return 1;                                                                          \
    }

DEFINE_CENSUS(f32, float, f32_vector, i32_vector, F32_LANES, 0x7fffffff, MIN_F32, MAX_F32)
DEFINE_CENSUS(f64, double, f64_vector, i64_vector, F64_LANES, MAGNITUDE_F64, MIN_F64, MAX_F64)

/* One vector of lanes at a time runs through the block, because with all lanes at once AVX2 would run out of registers.
 * The square of a float32 is exact in float64, so a fused multiply-add rounds as often as two operations do; that of a
 * float64 is not. */
#define ROUNDED(a, b, c) ((a) * (b) + (c))

#define DEFINE_POWERS(T, type, ADD_SQUARE)                                                        \
    static double SWEEP(sum_##T)(const type *x, size_t n) {                                       \
        f64_vector sum[NUM_VECTORS] = {{0}};                                                      \
        size_t i = 0;                                                                             \
        for (; i + LANES <= n; i += LANES)                                                        \
            for (int v = 0; v < NUM_VECTORS; v++) sum[v] += read_##T(x + i + v * F64_LANES);      \
        double lane[LANES];                                                                       \
        memcpy(lane, sum, sizeof sum);                                                            \
        for (int l = 0; i < n; i++, l++) lane[l] += (double)x[i];                                 \
        return fold(lane);                                                                        \
    }                                                                                             \
    static void SWEEP(powers_##T)(const type *x, size_t n, double pivot, lanes *to) {             \
        const size_t whole = n - n % LANES;                                                       \
        for (int first = 0; first < LANES; first += F64_LANES) {                                  \
            f64_vector sum = read_f64(to->sum + first), sq = read_f64(to->sum_sq + first);        \
            f64_vector abs = read_f64(to->sum_abs + first);                                       \
            f64_vector s1 = read_f64(to->s1 + first), s2 = read_f64(to->s2 + first);              \
            f64_vector s3 = read_f64(to->s3 + first), s4 = read_f64(to->s4 + first);              \
            for (size_t i = (size_t)first; i < whole; i += LANES) {                               \
                f64_vector value = read_##T(x + i), d = value - pivot, square = d * d;            \
                sum += value;                                                                     \
                sq = ADD_SQUARE(value, value, sq);                                                \
                abs += (f64_vector)((i64_vector)value & MAGNITUDE_F64);                           \
                s1 += d;                                                                          \
                s2 += square;                                                                     \
                s3 += square * d;                                                                 \
                s4 += square * square;                                                            \
            }                                                                                     \
            memcpy(to->sum + first, &sum, sizeof sum);                                            \
            memcpy(to->sum_sq + first, &sq, sizeof sq);                                           \
            memcpy(to->sum_abs + first, &abs, sizeof abs);                                        \
            memcpy(to->s1 + first, &s1, sizeof s1);                                               \
            memcpy(to->s2 + first, &s2, sizeof s2);                                               \
            memcpy(to->s3 + first, &s3, sizeof s3);                                               \
            memcpy(to->s4 + first, &s4, sizeof s4);                                               \
        }                                                                                         \
        for (size_t i = whole; i < n; i++) {                                                      \
            double value = (double)x[i], d = value - pivot, square = d * d;                       \
            to->sum[i - whole] += value;                                                          \
            to->sum_sq[i - whole] += value * value;                                               \
            to->sum_abs[i - whole] += fabs(value);                                                \
            to->s1[i - whole] += d;                                                               \
            to->s2[i - whole] += square;                                                          \
            to->s3[i - whole] += square * d;                                                      \
            to->s4[i - whole] += square * square;                                                 \
        }                                                                                         \
    }

DEFINE_POWERS(f32, float, FMA)
DEFINE_POWERS(f64, double, ROUNDED)

/* Bin k of one sign: 0 underflow, 1 … side the bins, side + 1 overflow; those of negative values follow. Zero lands in
 * the positive underflow and is taken out by its exact count. */
static inline int32_t bin_of(int64_t exponent, int64_t part, int negative, const grid *g) {
    int64_t k = (exponent - g->lo_exp) * g->bins_per_octave + part + 1;
    if (k < 0) k = 0;
    if (k > g->side + 1) k = g->side + 1;
    return (int32_t)(negative ? k + g->side + 2 : k);
}

/* num_thresholds is a constant in every call, so that the loop over them is unrolled and they sit in registers. */
static inline __attribute__((always_inline)) void SWEEP(bins_f32_with)(const float *x, size_t n, const grid *g,
                                                                       int32_t *out, const int num_thresholds) {
    const i32_vector none = {0}, last = none + (g->side + 1);
    const int32_t offset = (g->lo_exp + 127) * g->bins_per_octave - 1, other = g->side + 2;
    const int shift = g->octave_shift;
    size_t i = 0;
    for (; i + F32_LANES <= n; i += F32_LANES) {
        i32_vector bits;
        memcpy(&bits, x + i, sizeof bits);
        i32_vector mantissa = bits & 0x7fffff;
        i32_vector k = (((bits >> 23) & 0xff) << shift) - offset;
        for (int t = 0; t < num_thresholds; t++) k -= mantissa >= g->threshold32[t];
        k = MAX_I32(MIN_I32(k, last), none) + (((f32_vector)bits < 0.0f) & other);
        memcpy(out + i, &k, sizeof k);
    }
    for (; i < n; i++) {
        int32_t bits, part = 0;
        memcpy(&bits, x + i, sizeof bits);
        for (int t = 0; t < num_thresholds; t++) part += (bits & 0x7fffff) >= g->threshold32[t];
        out[i] = bin_of(((bits >> 23) & 0xff) - 127, part, x[i] < 0, g);
    }
}

static void SWEEP(bins_f32)(const float *x, size_t n, const grid *g, int32_t *out) {
    switch (g->num_thresholds) {
    case 0: SWEEP(bins_f32_with)(x, n, g, out, 0); break;
    case 1: SWEEP(bins_f32_with)(x, n, g, out, 1); break;
    case 3: SWEEP(bins_f32_with)(x, n, g, out, 3); break;
    default: SWEEP(bins_f32_with)(x, n, g, out, MAX_THRESHOLDS);
    }
}

/* First the unbounded bin with the sign above it, in 64 bits; then the bounds, in 32, where there are twice the lanes. */
static void SWEEP(bins_f64)(const double *x, size_t n, const grid *g, int32_t *out) {
    const int64_t negative_mark = INT64_C(1) << 20, zero_k = (1023 + g->lo_exp) * (int64_t)g->bins_per_octave - 1;
    const int shift = g->octave_shift;
    size_t i = 0;
    for (; i + F64_LANES <= n; i += F64_LANES) {
        i64_vector bits = (i64_vector)read_f64(x + i), mantissa = bits & MANTISSA_F64;
        i64_vector k = ((bits & EXPONENT_F64) >> 52) << shift;
        for (int t = 0; t < g->num_thresholds; t++) k -= mantissa >= g->threshold64[t];
        k += ((f64_vector)bits < 0.0) & negative_mark;
        narrow_i32 narrow = __builtin_convertvector(k, narrow_i32);
        memcpy(out + i, &narrow, sizeof narrow);
    }
    const size_t marked = i;
    for (; i < n; i++) {
        int64_t bits = bits_f64(x[i]), part = 0;
        for (int t = 0; t < g->num_thresholds; t++) part += (bits & MANTISSA_F64) >= g->threshold64[t];
        out[i] = bin_of(((bits & EXPONENT_F64) >> 52) - 1023, part, x[i] < 0, g);
    }
    const int32_t offset = (int32_t)zero_k, last = g->side + 1, other = g->side + 2;
    for (i = 0; i < marked; i++) {
        int32_t k = (out[i] & (int32_t)(negative_mark - 1)) - offset;
        k = k < 0 ? 0 : k;
        k = k > last ? last : k;
        out[i] = k + (out[i] >> 20) * other;
    }
}

/* Adding and taking away 2^52 quanta rounds to the quantum, ties to even, as the processor rounds every sum. */
static inline double round_to(double magnitude, const target *t) {
    double bounded = magnitude < 2 * t->max_finite ? magnitude : 2 * t->max_finite;
    double scale = bounded > t->min_normal ? bounded : t->min_normal;
    double shift = from_bits_f64((bits_f64(scale) & EXPONENT_F64) + t->shift);
    return (bounded + shift) - shift;
}

#define DEFINE_LOSS(T, type)                                                                                           \
    static void SWEEP(loss_##T)(const type *x, size_t n, const target *t, loss *out) {                                 \
        const f64_vector none = {0}, limit = none + t->max_finite, far = limit + limit, normal = none + t->min_normal; \
        i64_vector underflow = {0}, overflow = {0}, saturated = {0};                                                   \
        f64_vector error[NUM_VECTORS] = {{0}};                                                                         \
        size_t i = 0;                                                                                                  \
        for (; i + LANES <= n; i += LANES)                                                                             \
            for (int v = 0; v < NUM_VECTORS; v++) {                                                                    \
                f64_vector magnitude = (f64_vector)((i64_vector)read_##T(x + i + v * F64_LANES) & MAGNITUDE_F64);      \
                f64_vector bounded = MIN_F64(magnitude, far), scale = MAX_F64(bounded, normal);                        \
                f64_vector shift = (f64_vector)(((i64_vector)scale & EXPONENT_F64) + t->shift);                        \
                f64_vector rounded = (bounded + shift) - shift;                                                        \
                underflow += (rounded == none) & (magnitude != none);                                                  \
                overflow += rounded > limit;                                                                           \
                saturated += rounded >= limit;                                                                         \
                f64_vector lost = magnitude - MIN_F64(rounded, limit);                                                 \
                error[v] += lost * lost;                                                                               \
            }                                                                                                          \
        *out = (loss){0};                                                                                              \
        COUNT(underflow, F64_LANES, out->underflow);                                                                   \
        COUNT(overflow, F64_LANES, out->overflow);                                                                     \
        COUNT(saturated, F64_LANES, out->saturated);                                                                   \
        double lane[LANES];                                                                                            \
        memcpy(lane, error, sizeof error);                                                                             \
        for (int l = 0; i < n; i++, l++) {                                                                             \
            double magnitude = fabs((double)x[i]), rounded = round_to(magnitude, t);                                   \
            out->underflow += rounded == 0 && magnitude != 0;                                                          \
            out->overflow += rounded > t->max_finite;                                                                  \
            out->saturated += rounded >= t->max_finite;                                                                \
            double lost = magnitude - (rounded < t->max_finite ? rounded : t->max_finite);                             \
            lane[l] += lost * lost;                                                                                    \
        }                                                                                                              \
        out->sum_sq_error = fold(lane);                                                                                \
    }

DEFINE_LOSS(f32, float)
DEFINE_LOSS(f64, double)

const sweeps SWEEP(sweeps) = {
    SWEEP(widen_bf16), SWEEP(widen_f16),  SWEEP(census_f32), SWEEP(census_f64), SWEEP(sum_f32),  SWEEP(sum_f64),
    SWEEP(powers_f32), SWEEP(powers_f64), SWEEP(bins_f32),   SWEEP(bins_f64),   SWEEP(loss_f32), SWEEP(loss_f64),
};
