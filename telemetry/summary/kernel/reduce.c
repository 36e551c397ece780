/* One tensor to one packed row: blocks through the sweeps, and their records into one. */
#include <math.h>
#include <string.h>

#include "kernel.h"

/* What is known of the elements so far. The mean is kept in two parts: what the first cannot hold of it would otherwise
 * reach m2 where the spread is an ulp of the mean. */
typedef struct {
    int64_t total, finite, zero, negative, nan, pos_inf, neg_inf;
    double min, max;
    double sum, sum_sq, sum_abs;
    double mean, mean_rest, m2, m3, m4;
    loss loss;
} state;

typedef struct { double mean, mean_rest, m2, m3, m4; } moments;

static moments about_mean(double pivot, double n, const lanes *a) {
    double s1 = fold(a->s1), s2 = fold(a->s2), s3 = fold(a->s3), s4 = fold(a->s4), h = s1 / n;
    moments m = {pivot, h, 0, 0, 0};
    m.m2 = s2 - h * s1;
    m.m3 = s3 - 3 * h * s2 + 2 * h * h * s1;
    m.m4 = s4 - 4 * h * s3 + 6 * h * h * s2 - 3 * h * h * h * s1;
    /* Cancellation may leave a constant segment a hair below zero. */
    if (m.m2 < 0) m.m2 = 0;
    if (m.m4 < 0) m.m4 = 0;
    return m;
}

/* Pébay (2008), eqs. 1.3 to 1.6, in the order of merge.py. */
static void merge_central(double na, double *m2a, double *m3a, double *m4a, double nb, double m2b, double m3b,
                          double m4b, double delta) {
    double fa = na / (na + nb), fb = nb / (na + nb);
    double spread = delta * delta * na * fb;
    double m2 = *m2a + m2b + spread;
    double m3 = *m3a + m3b + spread * delta * (fa - fb) + 3 * delta * (fa * m2b - fb * *m2a);
    double m4 = *m4a + m4b + spread * delta * delta * (fa * fa - fa * fb + fb * fb) +
                6 * delta * delta * (fa * fa * m2b + fb * fb * *m2a) + 4 * delta * (fa * m3b - fb * *m3a);
    *m2a = m2;
    *m3a = m3;
    *m4a = m4;
}

static void add_moments(state *s, double n, const moments *b) {
    if (s->finite == 0) {
        s->mean = b->mean;
        s->mean_rest = b->mean_rest;
        s->m2 = b->m2;
        s->m3 = b->m3;
        s->m4 = b->m4;
        return;
    }
    double na = (double)s->finite;
    double delta = (b->mean - s->mean) + (b->mean_rest - s->mean_rest);
    merge_central(na, &s->m2, &s->m3, &s->m4, n, b->m2, b->m3, b->m4, delta);
    double rest = s->mean_rest + delta * (n / (na + n)), mean = s->mean + rest;
    s->mean_rest = rest - (mean - s->mean);
    s->mean = mean;
}

static void add_loss(loss *a, const loss *b) {
    a->underflow += b->underflow;
    a->overflow += b->overflow;
    a->saturated += b->saturated;
    a->sum_sq_error += b->sum_sq_error;
}

/* Moves the elements under a true mask to the front of `to`; returns how many they are. */
#define DEFINE_KEEP(T, type)                                                                                \
    static size_t keep_masked_##T(const type *x, const uint8_t *mask, size_t n, type *to) {                 \
        size_t kept = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                    \
            to[kept] = x[i];                                                                                \
            kept += mask[i] != 0;                                                                           \
        }                                                                                                   \
        return kept;                                                                                        \
    }                                                                                                       \
    static size_t keep_finite_##T(const type *x, size_t n, type *to, state *s) {                            \
        size_t kept = 0;                                                                                    \
        for (size_t i = 0; i < n; i++) {                                                                    \
            type value = x[i];                                                                              \
            s->nan += value != value;                                                                       \
            s->pos_inf += value == (type)INFINITY;                                                          \
            s->neg_inf += value == (type)-INFINITY;                                                         \
            to[kept] = value;                                                                               \
            kept += value - value == 0;                                                                     \
        }                                                                                                   \
        return kept;                                                                                        \
    }

/* Bin indices are counted soon after they are made, before they crowd the cache. */
#define BIN_CHUNK 256

/* Room for one block; what is kept of a block never moves up, so values may be moved within it. */
typedef struct {
    double values[BLOCK];
    int32_t bins[BIN_CHUNK];
} workspace;

/* One segment: its lanes, the finite elements in them, and the pivot, which is the mean of its first block. A later
 * block may lie far from it. Then the spread of the whole is large too, and rounding is magnified by the segment's size
 * over that of the first block at most; so a first block of few elements makes a segment of its own. */
#define WORTHY_PIVOT (BLOCK / 2)
typedef struct {
    lanes lanes;
    size_t n;
    int num_blocks;
    double pivot;
} segment;

#define DEFINE_SEGMENT(T, type)                                                                             \
    static void begin_##T(segment *g) {                                                                     \
        memset(g, 0, sizeof *g);                                                                            \
        for (int l = 0; l < LANES; l++) {                                                                   \
            g->lanes.min.T[l] = (type)INFINITY;                                                             \
            g->lanes.max.T[l] = -(type)INFINITY;                                                            \
        }                                                                                                   \
    }                                                                                                       \
    static void block_##T(const sweeps *w, const job *j, state *s, segment *g, histogram *h, const type *x, \
                          size_t n, workspace *room) {                                                      \
        lanes *to = &g->lanes;                                                                              \
        s->total += (int64_t)n;                                                                             \
        if (!w->census_##T(x, n, to)) {                                                                     \
            n = keep_finite_##T(x, n, (type *)room->values, s);                                             \
            x = (const type *)room->values;                                                                 \
            w->census_##T(x, n, to);                                                                        \
        }                                                                                                   \
        if (n == 0) return;                                                                                 \
        if (g->n == 0) g->pivot = w->sum_##T(x, n) / (double)n;                                             \
        g->n += n;                                                                                          \
        w->powers_##T(x, n, g->pivot, to);                                                                  \
        for (size_t i = 0; h && i < n; i += BIN_CHUNK) {                                                    \
            size_t num = n - i < BIN_CHUNK ? n - i : BIN_CHUNK;                                             \
            w->bins_##T(x + i, num, j->grid, room->bins);                                                   \
            histogram_count(h, room->bins, num);                                                            \
        }                                                                                                   \
        if (j->quantization) {                                                                              \
            loss lost;                                                                                      \
            w->loss_##T(x, n, j->target, &lost);                                                            \
            add_loss(&s->loss, &lost);                                                                      \
        }                                                                                                   \
    }                                                                                                       \
    static void end_##T(const segment *g, state *s) {                                                       \
        const lanes *from = &g->lanes;                                                                      \
        if (g->n == 0) return;                                                                              \
        moments m = about_mean(g->pivot, (double)g->n, from);                                               \
        add_moments(s, (double)g->n, &m);                                                                   \
        s->finite += (int64_t)g->n;                                                                         \
        s->sum += fold(from->sum);                                                                          \
        s->sum_sq += fold(from->sum_sq);                                                                    \
        s->sum_abs += fold(from->sum_abs);                                                                  \
        for (int l = 0; l < LANES; l++) {                                                                   \
            s->zero += from->zero.T[l];                                                                     \
            s->negative += from->negative.T[l];                                                             \
            if ((double)from->min.T[l] < s->min) s->min = (double)from->min.T[l];                           \
            if ((double)from->max.T[l] > s->max) s->max = (double)from->max.T[l];                           \
        }                                                                                                   \
    }

DEFINE_KEEP(f32, float)
DEFINE_KEEP(f64, double)
DEFINE_SEGMENT(f32, float)
DEFINE_SEGMENT(f64, double)

static void write_row(const state *s, word *row) {
    const int64_t counts[NUM_INTS] = {s->total, s->finite, s->zero, s->negative, s->nan, s->pos_inf, s->neg_inf, 1};
    /* Adding zero makes an extreme of -0 a +0: which of the two was met first says nothing. */
    const double absmax = s->finite == 0 ? 0 : fmax(fabs(s->min), fabs(s->max));
    const double values[NUM_FLOATS] = {
        s->min + 0.0, s->max + 0.0, absmax, s->sum, s->sum_sq, s->sum_abs,
        s->finite ? s->sum / (double)s->finite : 0, s->m2, s->m3, s->m4,
    };
    for (int i = 0; i < NUM_INTS; i++) row[i].count = counts[i];
    for (int i = 0; i < NUM_FLOATS; i++) row[NUM_INTS + i].value = values[i];
}

/* merge_packed() of merge.py for one row, bit for bit: `row` is the earlier one. */
static void merge_row(word *row, const word *from) {
    double na = (double)row[FINITE].count, nb = (double)from[FINITE].count;
    word *a = row + NUM_INTS;
    const word *b = from + NUM_INTS;
    double delta = b[MEAN].value - a[MEAN].value;
    if (na > 0 && nb > 0)
        merge_central(na, &a[M2].value, &a[M3].value, &a[M4].value, nb, b[M2].value, b[M3].value, b[M4].value, delta);
    else if (nb > 0)
        for (int i = M2; i <= M4; i++) a[i] = b[i];
    if (b[MIN].value < a[MIN].value) a[MIN] = b[MIN];
    if (b[MAX].value > a[MAX].value) a[MAX] = b[MAX];
    if (b[ABSMAX].value > a[ABSMAX].value) a[ABSMAX] = b[ABSMAX];
    for (int i = SUM; i <= SUM_ABS; i++) a[i].value += b[i].value;
    a[MEAN].value = na + nb > 0 ? a[SUM].value / (na + nb) : a[SUM].value;
    for (int i = 0; i < NUM_INTS; i++) row[i].count += from[i].count;
}

static void write(const state *s, const job *j) {
    word fresh[ROW_WORDS];
    write_row(s, j->accumulate ? fresh : j->row);
    if (j->accumulate) merge_row(j->row, fresh);
    if (!j->quantization) return;
    word *q = j->quantization;
    if (!j->accumulate) memset(q, 0, QUANTIZATION_WORDS * sizeof *q);
    q[0].count += s->loss.underflow;
    q[1].count += s->loss.overflow;
    q[2].count += s->loss.saturated;
    q[3].value += s->loss.sum_sq_error;
}

void reduce(const sweeps *w, const job *j) {
    workspace room;
    segment g = {.num_blocks = 0};
    uint32_t tables[TABLE_ROOM];
    histogram store, *h = j->counts ? &store : NULL;
    state s = {.min = INFINITY, .max = -INFINITY};
    const int wide = widens_to_f64(j->dtype);
    if (h) histogram_begin(h, j->grid, j->counts, tables, j->numel);
    for (size_t start = 0; start < j->numel; start += BLOCK) {
        size_t n = j->numel - start < BLOCK ? j->numel - start : BLOCK;
        if (g.num_blocks == 0) wide ? begin_f64(&g) : begin_f32(&g);
        const void *x = load(w, j->dtype, j->data, start, n, room.values);
        if (j->mask) {
            n = wide ? keep_masked_f64(x, j->mask + start, n, room.values)
                     : keep_masked_f32(x, j->mask + start, n, (float *)room.values);
            x = room.values;
        }
        wide ? block_f64(w, j, &s, &g, h, x, n, &room) : block_f32(w, j, &s, &g, h, x, n, &room);
        if (++g.num_blocks == SEGMENT_BLOCKS || g.n < WORTHY_PIVOT || start + BLOCK >= j->numel) {
            wide ? end_f64(&g, &s) : end_f32(&g, &s);
            g.num_blocks = 0;
        }
    }
    if (h) {
        histogram_exact(h, s.zero, s.nan, s.pos_inf, s.neg_inf);
        histogram_end(h);
    }
    write(&s, j);
}
