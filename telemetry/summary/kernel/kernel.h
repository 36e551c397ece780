/* The C kernel behind telemetry.summary: what its parts share.
 *
 * A job is one tensor. It is read in blocks that stay in the first-level cache, each block in several sweeps: a census of
 * what its elements are, the sums of powers about a pivot, and on request the histogram and the loss of a cast. Some
 * blocks make a segment, which has one pivot and carries its sums from block to block in lanes, unfolded.
 * Every sweep has a build for each instruction set. All builds add in the same eight lanes and in the same order, so
 * they agree to the last bit, of floats too. No Python in here; module.c binds it.
 */
#ifndef RANKFOLD_KERNEL_H
#define RANKFOLD_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* Elements in a block: as float32 or float64 it leaves room for the tables in a first-level cache of 32 KiB. */
#define BLOCK 1024
/* Blocks in a segment: enough that what is done once for it does not show. */
#define SEGMENT_BLOCKS 16
#define LANES 8

/* The order is that of DTYPE_CODES in backend.py. */
enum dtype {
    DT_F64, DT_F32, DT_F16, DT_BF16, DT_E4M3FN, DT_E4M3FNUZ, DT_E5M2, DT_E5M2FNUZ, DT_E8M0FNU,
    DT_BOOL, DT_U8, DT_I8, DT_U16, DT_I16, DT_U32, DT_I32, DT_U64, DT_I64, DT_COUNT
};

/* Layout of a packed row, as in fields.py. */
enum { TOTAL, FINITE, ZERO, NEGATIVE, NOT_A_NUMBER, POS_INF, NEG_INF, CALLS, NUM_INTS };
enum { MIN, MAX, ABSMAX, SUM, SUM_SQ, SUM_ABS, MEAN, M2, M3, M4, NUM_FLOATS };
typedef union { int64_t count; double value; } word;
#define ROW_WORDS (NUM_INTS + NUM_FLOATS)
#define QUANTIZATION_WORDS 4

/* What a segment knows so far, lane by lane; float32 or float64 members as the elements are. */
typedef struct {
    union { int32_t f32[LANES]; int64_t f64[LANES]; } zero, negative;
    union { float f32[LANES]; double f64[LANES]; } min, max;
    double sum[LANES], sum_sq[LANES], sum_abs[LANES];
    double s1[LANES], s2[LANES], s3[LANES], s4[LANES];
} lanes;

/* A format to cast to. `shift` takes the bits of 2^e to those of 2^52 quanta of the format at that exponent. */
typedef struct { double min_normal, max_finite; int64_t shift; } target;
typedef struct { int64_t underflow, overflow, saturated; double sum_sq_error; } loss;

#define MAX_THRESHOLDS 7
typedef struct {
    int bins_per_octave, lo_exp, side;
    int num_thresholds, octave_shift; /* log2 of bins_per_octave */
    int32_t threshold32[MAX_THRESHOLDS];
    int64_t threshold64[MAX_THRESHOLDS];
} grid;

/* Sweeps over n ≤ BLOCK values. All but the census take finite ones; the census returns 0 if there is another, and then
 * has added nothing. */
typedef struct {
    void (*widen_bf16)(const uint16_t *from, size_t n, float *to);
    void (*widen_f16)(const uint16_t *from, size_t n, float *to);
    int (*census_f32)(const float *x, size_t n, lanes *to);
    int (*census_f64)(const double *x, size_t n, lanes *to);
    double (*sum_f32)(const float *x, size_t n);
    double (*sum_f64)(const double *x, size_t n);
    void (*powers_f32)(const float *x, size_t n, double pivot, lanes *to);
    void (*powers_f64)(const double *x, size_t n, double pivot, lanes *to);
    void (*bins_f32)(const float *x, size_t n, const grid *g, int32_t *out);
    void (*bins_f64)(const double *x, size_t n, const grid *g, int32_t *out);
    void (*loss_f32)(const float *x, size_t n, const target *t, loss *out);
    void (*loss_f64)(const double *x, size_t n, const target *t, loss *out);
} sweeps;

extern const sweeps sweeps_baseline;
#if defined(__x86_64__)
extern const sweeps sweeps_avx2, sweeps_avx512;
#endif

typedef struct {
    const void *data;
    size_t numel;
    int dtype;
    const uint8_t *mask; /* one byte an element, or NULL */
    word *row;           /* ROW_WORDS, overwritten, or merged into */
    int accumulate;
    int64_t *counts; /* added to, or NULL */
    const grid *grid;
    word *quantization; /* QUANTIZATION_WORDS, or NULL */
    const target *target;
} job;

void reduce(const sweeps *s, const job *j);

static inline double fold(const double *lane) {
    return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

/* load.c */
void load_init(void);
size_t item_size(int dtype);
int widens_to_f64(int dtype);
const void *load(const sweeps *s, int dtype, const void *data, size_t start, size_t n, void *buffer);

/* histogram.c */
typedef struct {
    const grid *grid;
    int64_t *counts;
    int num_tables, table_size; /* no tables: each value goes to counts at once */
    uint32_t *tables;
    uint32_t pending;
} histogram;

/* Room for the tables on the stack of reduce(): 16 KiB hold the widest grid once, the usual one four times. */
#define TABLE_ROOM 4096

int grid_init(grid *g, int bins_per_octave, int lo_exp, int hi_exp);
void histogram_begin(histogram *h, const grid *g, int64_t *counts, uint32_t *room, size_t numel);
void histogram_count(histogram *h, const int32_t *bins, size_t n);
void histogram_exact(histogram *h, int64_t zero, int64_t nan, int64_t pos_inf, int64_t neg_inf);
void histogram_end(histogram *h);

/* fingerprint.c: item_size is 1, 2, 4 or 8, and the data is aligned to it. */
int64_t fingerprint(const void *data, size_t numel, int item_size);

#endif
