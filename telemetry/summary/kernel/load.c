/* From the bytes of a dtype to float32 or float64 values, without a rounding but that of integers beyond 2^53. */
#include <math.h>
#include <string.h>

#include "kernel.h"

#define NUM_FLOAT8 (DT_E8M0FNU - DT_E4M3FN + 1)
static float FLOAT8[NUM_FLOAT8][256];

typedef struct {
    int dtype, mantissa_bits, bias;
    int nan_from, inf_at; /* magnitude codes at and above which a code is NaN, and that of infinity or -1 */
    int negative_zero_is_nan;
} float8_format;

static const float8_format FORMATS[] = {
    {DT_E4M3FN, 3, 7, 0x7f, -1, 0},
    {DT_E4M3FNUZ, 3, 8, 0x80, -1, 1},
    {DT_E5M2, 2, 15, 0x7d, 0x7c, 0},
    {DT_E5M2FNUZ, 2, 16, 0x80, -1, 1},
};

static float decode_float8(const float8_format *f, int code) {
    int magnitude = code & 0x7f, negative = code & 0x80;
    if (magnitude >= f->nan_from || (f->negative_zero_is_nan && code == 0x80)) return NAN;
    int exponent = magnitude >> f->mantissa_bits, mantissa = magnitude & ((1 << f->mantissa_bits) - 1);
    if (exponent > 0) mantissa |= 1 << f->mantissa_bits;
    else exponent = 1;
    float value = ldexpf((float)mantissa, exponent - f->bias - f->mantissa_bits);
    if (magnitude == f->inf_at) value = INFINITY;
    return negative ? -value : value;
}

/* Fills the tables of the 8-bit formats; called once, before any load. */
void load_init(void) {
    for (size_t i = 0; i < sizeof FORMATS / sizeof *FORMATS; i++)
        for (int code = 0; code < 256; code++)
            FLOAT8[FORMATS[i].dtype - DT_E4M3FN][code] = decode_float8(&FORMATS[i], code);
    for (int code = 0; code < 255; code++) FLOAT8[DT_E8M0FNU - DT_E4M3FN][code] = ldexpf(1.0f, code - 127);
    FLOAT8[DT_E8M0FNU - DT_E4M3FN][255] = NAN;
}

size_t item_size(int dtype) {
    static const unsigned char SIZES[DT_COUNT] = {8, 4, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4, 4, 8, 8};
    return SIZES[dtype];
}

int widens_to_f64(int dtype) { return dtype == DT_F64 || dtype >= DT_U32; }

#define WIDEN(from, to)                                                  \
    do {                                                                 \
        const from *source = (const from *)data + start;                 \
        to *values = (to *)buffer;                                       \
        for (size_t i = 0; i < n; i++) values[i] = (to)source[i];        \
    } while (0)

/* Returns n values from element `start` on: float64 where widens_to_f64(), else float32; in place or in the buffer. */
const void *load(const sweeps *s, int dtype, const void *data, size_t start, size_t n, void *buffer) {
    switch (dtype) {
    case DT_F64: return (const double *)data + start;
    case DT_F32: return (const float *)data + start;
    case DT_F16: s->widen_f16((const uint16_t *)data + start, n, buffer); break;
    case DT_BF16: s->widen_bf16((const uint16_t *)data + start, n, buffer); break;
    case DT_BOOL:
    case DT_U8: WIDEN(uint8_t, float); break;
    case DT_I8: WIDEN(int8_t, float); break;
    case DT_U16: WIDEN(uint16_t, float); break;
    case DT_I16: WIDEN(int16_t, float); break;
    case DT_U32: WIDEN(uint32_t, double); break;
    case DT_I32: WIDEN(int32_t, double); break;
    case DT_U64: WIDEN(uint64_t, double); break;
    case DT_I64: WIDEN(int64_t, double); break;
    default: {
        const float *table = FLOAT8[dtype - DT_E4M3FN];
        const uint8_t *source = (const uint8_t *)data + start;
        for (size_t i = 0; i < n; i++) ((float *)buffer)[i] = table[source[i]];
    }
    }
    return buffer;
}
