/* The hash of telemetry/fingerprint.py, to the bit: sum of mix(bits) * (2 * position + 1) in wrapping 64-bit integers. */
#include "kernel.h"

#define MULTIPLIER UINT64_C(0x9E3779B97F4A7C15)

/* The shift is arithmetic, as torch shifts int64. Elements narrower than 64 bits are widened as torch views them. */
static inline uint64_t mix(int64_t bits) {
    uint64_t product = (uint64_t)bits * MULTIPLIER;
    return product ^ (uint64_t)((int64_t)product >> 32);
}

#define HASH(type)                                                                  \
    do {                                                                            \
        const type *x = data;                                                       \
        for (size_t i = 0; i < numel; i++) sum += mix((int64_t)x[i]) * (2 * i + 1); \
    } while (0)

int64_t fingerprint(const void *data, size_t numel, int item_size) {
    uint64_t sum = 0;
    switch (item_size) {
        case 1: HASH(uint8_t); break;
        case 2: HASH(int16_t); break;
        case 4: HASH(int32_t); break;
        default: HASH(int64_t); break;
    }
    return (int64_t)sum;
}
