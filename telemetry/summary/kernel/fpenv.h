/* Round to nearest and keep subnormals while the kernel runs, whatever the thread has set, and put it back after. */
#ifndef RANKFOLD_FPENV_H
#define RANKFOLD_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)
#include <immintrin.h>

typedef unsigned int fp_environment;

static inline fp_environment fp_enter(void) {
    fp_environment saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* the default: all exceptions masked, no flush-to-zero, no denormals-are-zero */
    return saved;
}

static inline void fp_leave(fp_environment saved) { _mm_setcsr(saved); }

#elif defined(__aarch64__)

typedef uint64_t fp_environment;

static inline fp_environment fp_enter(void) {
    fp_environment saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(UINT64_C(0)) : "memory");
    return saved;
}

static inline void fp_leave(fp_environment saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }

#else
#include <fenv.h>

typedef fenv_t fp_environment;

static inline fp_environment fp_enter(void) {
    fenv_t saved;
    fegetenv(&saved);
    fesetenv(FE_DFL_ENV);
    return saved;
}

static inline void fp_leave(fp_environment saved) { fesetenv(&saved); }

#endif
#endif
