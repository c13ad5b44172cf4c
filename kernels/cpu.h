/*
 * cpu.h: how a plain C loop becomes a CPU kernel.
 *
 * CPU_VARIANTS(loop) compiles one always-inline function once per instruction set, and
 * CPU_BEST(loop) is the one to run now. This is what __attribute__((target_clones)) does, except
 * that a test can run every variant the CPU has, which a load-time choice would not allow.
 */
#ifndef HR_CPU_H
#define HR_CPU_H

#include "common.h"
#include "runtime.h"

/* Elements per task: large enough to hide the hand-over, small enough to balance a few threads. */
#define CPU_GRAIN 32768

#if defined(__x86_64__) && defined(__GNUC__)
#define CPU_AVX2 __attribute__((target("avx2,fma,f16c,bmi,bmi2")))
#if defined(__clang__)
#define CPU_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,bmi,bmi2")))
#else
#define CPU_AVX512                                                                \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c,bmi,bmi2," \
                          "prefer-vector-width=512")))
#endif
#define CPU_VARIANTS(loop)                                                          \
    static void loop##_baseline(void *context, int64_t begin, int64_t end)          \
    {                                                                               \
        loop(context, begin, end);                                                  \
    }                                                                               \
    CPU_AVX2 static void loop##_avx2(void *context, int64_t begin, int64_t end)     \
    {                                                                               \
        loop(context, begin, end);                                                  \
    }                                                                               \
    CPU_AVX512 static void loop##_avx512(void *context, int64_t begin, int64_t end) \
    {                                                                               \
        loop(context, begin, end);                                                  \
    }                                                                               \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_avx2, loop##_avx512};
#else
#define CPU_VARIANTS(loop)                                                          \
    static void loop##_baseline(void *context, int64_t begin, int64_t end)          \
    {                                                                               \
        loop(context, begin, end);                                                  \
    }                                                                               \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_baseline, \
                                                  loop##_baseline};
#endif

#define CPU_BEST(loop) (loop##_variants[hr_get_cpu_level()])

#endif
