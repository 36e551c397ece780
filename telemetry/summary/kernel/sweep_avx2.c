/* The sweeps for x86-64 processors with AVX2 and FMA. */
#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif

#define SWEEP(name) name##_avx2
#define F64_LANES 4
#define F32_LANES 8

#define MIN_F32(a, b) _mm256_min_ps(a, b)
#define MAX_F32(a, b) _mm256_max_ps(a, b)
#define MIN_F64(a, b) _mm256_min_pd(a, b)
#define MAX_F64(a, b) _mm256_max_pd(a, b)
#define MIN_I32(a, b) ((i32_vector)_mm256_min_epi32((__m256i)(a), (__m256i)(b)))
#define MAX_I32(a, b) ((i32_vector)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define FMA(a, b, c) _mm256_fmadd_pd(a, b, c)

#include "sweep.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
