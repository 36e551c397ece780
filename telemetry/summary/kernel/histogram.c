/* From bin indices to the 64-bit counts of a histogram, by way of small tables that stay in the first-level cache. */
#include <string.h>

#include "kernel.h"

/* Below this many elements clearing and folding a table costs more than it saves. */
#define DIRECT_LIMIT 512
#define FOUR_TABLES_LIMIT 4096
#define PENDING_LIMIT (UINT32_C(1) << 31)

/* The smallest 52-bit mantissas on or above 2^(k/8), k = 1 … 7. Those of fewer bins and of float32 follow from them. */
static const int64_t EIGHTHS[MAX_THRESHOLDS] = {
    INT64_C(0x172b83c7d517b), INT64_C(0x306fe0a31b716), INT64_C(0x4bfdad5362a28), INT64_C(0x6a09e667f3bcd),
    INT64_C(0x8ace5422aa0dc), INT64_C(0xae89f995ad3ae), INT64_C(0xd5818dcfba488),
};

/* Returns 0, or -1 where HistogramDescriptor would refuse. */
int grid_init(grid *g, int bins_per_octave, int lo_exp, int hi_exp) {
    int b = bins_per_octave;
    if ((b != 1 && b != 2 && b != 4 && b != 8) || lo_exp < -126 || hi_exp > 127 || lo_exp >= hi_exp) return -1;
    *g = (grid){.bins_per_octave = b, .lo_exp = lo_exp, .side = b * (hi_exp - lo_exp), .num_thresholds = b - 1};
    while (1 << g->octave_shift < b) g->octave_shift++;
    for (int k = 1; k < b; k++) {
        int64_t eighth = EIGHTHS[k * 8 / b - 1];
        g->threshold64[k - 1] = eighth;
        g->threshold32[k - 1] = (int32_t)((eighth + (INT64_C(1) << 29) - 1) >> 29);
    }
    return 0;
}

void histogram_begin(histogram *h, const grid *g, int64_t *counts, uint32_t *room, size_t numel) {
    int size = 2 * (g->side + 2), num = numel < DIRECT_LIMIT ? 0 : 1;
    if (numel >= FOUR_TABLES_LIMIT)
        while (num < 4 && 2 * num * size <= TABLE_ROOM) num *= 2;
    *h = (histogram){.grid = g, .counts = counts, .num_tables = num, .table_size = size, .tables = room};
    memset(room, 0, (size_t)(num * size) * sizeof *room);
}

static inline int64_t *count_of(const histogram *h, int bin) {
    int zero = h->grid->side + 3, other = h->grid->side + 2;
    return h->counts + (bin < other ? zero + 1 + bin : zero - 1 - (bin - other));
}

static void flush(histogram *h) {
    for (int bin = 0; bin < h->table_size; bin++) {
        int64_t count = 0;
        for (int t = 0; t < h->num_tables; t++) count += h->tables[t * h->table_size + bin];
        *count_of(h, bin) += count;
    }
    h->pending = 0;
}

/* Neighbours go to different tables, so that a run of equal values does not wait for its own last store. */
static void count_in_tables(histogram *h, const int32_t *bins, size_t n) {
    uint32_t *t0 = h->tables, *t1 = t0, *t2 = t0, *t3 = t0;
    if (h->num_tables > 1) t1 = t0 + h->table_size, t3 = t1;
    if (h->num_tables > 2) t2 = t0 + 2 * h->table_size, t3 = t2 + h->table_size;
    size_t i = 0;
    for (; i + 4 <= n; i += 4) {
        t0[bins[i]]++;
        t1[bins[i + 1]]++;
        t2[bins[i + 2]]++;
        t3[bins[i + 3]]++;
    }
    for (; i < n; i++) t0[bins[i]]++;
}

void histogram_count(histogram *h, const int32_t *bins, size_t n) {
    if (h->num_tables == 0) {
        for (size_t i = 0; i < n; i++) ++*count_of(h, bins[i]);
        return;
    }
    count_in_tables(h, bins, n);
    h->pending += (uint32_t)n;
    if (h->pending >= PENDING_LIMIT) {
        flush(h);
        memset(h->tables, 0, (size_t)(h->num_tables * h->table_size) * sizeof *h->tables);
    }
}

/* Adds what is counted elsewhere; the zeros have been counted as underflow, too. */
void histogram_exact(histogram *h, int64_t zero, int64_t nan, int64_t pos_inf, int64_t neg_inf) {
    int middle = h->grid->side + 3, last = 2 * h->grid->side + 7;
    h->counts[middle] += zero;
    h->counts[middle + 1] -= zero;
    h->counts[0] += neg_inf;
    h->counts[last - 1] += pos_inf;
    h->counts[last] += nan;
}

void histogram_end(histogram *h) {
    if (h->pending) flush(h);
}
