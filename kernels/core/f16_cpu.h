/*
 * f16_cpu.h: f16 to binary32 and back, F16_AT_ONCE elements at a time. Each conversion gives the bits
 * of hr_load() and hr_store() in dtype.h, but for the payload of a NaN that is loaded. Compilers turn
 * those into eight instructions and more a vector, where x86 has one. So a loop that meets f16 takes
 * the conversions as its last argument, and CPU_F16_VARIANTS gives each variant those of its
 * instruction set, as literals that are inlined.
 */
#ifndef HR_F16_CPU_H
#define HR_F16_CPU_H

#include "kernels/core/cpu.h"

#define F16_AT_ONCE 16

typedef struct f16_conversions {
    void (*widen)(float *restrict to, const uint16_t *restrict from);
    /* Every NaN must be the one that hr_store() writes. */
    void (*narrow)(uint16_t *restrict to, const float *restrict from);
} f16_conversions;

HR_INLINE void f16_widen_baseline(float *restrict to, const uint16_t *restrict from)
{
    for (int lane = 0; lane < F16_AT_ONCE; lane++)
        to[lane] = hr_from_f16(from[lane]);
}

HR_INLINE void f16_narrow_baseline(uint16_t *restrict to, const float *restrict from)
{
    for (int lane = 0; lane < F16_AT_ONCE; lane++)
        to[lane] = hr_to_f16(from[lane]);
}

#define F16_VARIANT_(target, loop, level)                                        \
    target static void loop##_##level(void *context, int64_t begin, int64_t end) \
    {                                                                            \
        const f16_conversions f16 = {f16_widen_##level, f16_narrow_##level};     \
        loop(context, begin, end, f16);                                          \
    }

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

CPU_AVX2 HR_INLINE void f16_widen_avx2(float *restrict to, const uint16_t *restrict from)
{
    for (int half = 0; half < F16_AT_ONCE; half += 8)
        _mm256_storeu_ps(to + half,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + half))));
}

CPU_AVX2 HR_INLINE void f16_narrow_avx2(uint16_t *restrict to, const float *restrict from)
{
    for (int half = 0; half < F16_AT_ONCE; half += 8)
        _mm_storeu_si128((__m128i *)(to + half), _mm256_cvtps_ph(_mm256_loadu_ps(from + half), 0));
}

CPU_AVX512 HR_INLINE void f16_widen_avx512(float *restrict to, const uint16_t *restrict from)
{
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)));
}

CPU_AVX512 HR_INLINE void f16_narrow_avx512(uint16_t *restrict to, const float *restrict from)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(_mm512_loadu_ps(from), 0));
}

#define CPU_F16_VARIANTS(loop)                                                                 \
    F16_VARIANT_(, loop, baseline)                                                             \
    F16_VARIANT_(CPU_AVX2, loop, avx2)                                                         \
    F16_VARIANT_(CPU_AVX512, loop, avx512)                                                     \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_avx2, loop##_avx512, \
                                                  loop##_avx512};
#else
#define CPU_F16_VARIANTS(loop)     \
    F16_VARIANT_(, loop, baseline) \
    static const hr_range_fn loop##_variants[] = {loop##_baseline};
#endif

/* Convert `count` elements, at most a few hundred. */
HR_INLINE void f16_load(float *restrict to, const uint16_t *restrict from, int count,
                        f16_conversions f16)
{
    int i = 0;
    for (; count - i >= F16_AT_ONCE; i += F16_AT_ONCE)
        f16.widen(to + i, from + i);
    for (; i < count; i++)
        to[i] = hr_from_f16(from[i]);
}

HR_INLINE void f16_store(uint16_t *restrict to, const float *restrict from, int count,
                         f16_conversions f16)
{
    int i = 0;
    for (; count - i >= F16_AT_ONCE; i += F16_AT_ONCE)
        f16.narrow(to + i, from + i);
    for (; i < count; i++)
        to[i] = hr_to_f16(from[i]);
}

#endif
