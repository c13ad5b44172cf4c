/*
 * halves_cpu.h: conversions of 16-bit elements for which a processor has better instructions than
 * those that compilers find: x86 converts f16 by one a vector, where the code of dtype.h takes eight
 * and more. So a loop that needs them takes the conversions as its last argument, and
 * CPU_HALVES_VARIANTS gives each variant those of its instruction set, as literals that are inlined.
 * Each gives the bits of hr_load() and hr_store(), but for NaNs.
 */
#ifndef HR_HALVES_CPU_H
#define HR_HALVES_CPU_H

#include "kernels/core/cpu.h"

#define F16_AT_ONCE 16

typedef struct half_conversions {
    /* F16_AT_ONCE elements. The payload of a NaN that is loaded is unspecified, and one that is
     * stored must be that which hr_store() writes. */
    void (*widen_f16)(float *restrict to, const uint16_t *restrict from);
    void (*narrow_f16)(uint16_t *restrict to, const float *restrict from);
    /* CPU_STEP elements from those at even and those at odd places, of which none must be a NaN. */
    void (*narrow_bf16)(uint16_t *restrict to, const float *restrict even,
                        const float *restrict odd);
    /* CPU_STEP elements in a row, of which none must be a NaN. */
    void (*narrow_bf16_row)(uint16_t *restrict to, const float *restrict from);
} half_conversions;

/* ---- Pairs of bf16 --------------------------------------------------------------------------- */

/* Whether the first of two bf16 is the low half of a word. */
#define BF16_FIRST_IS_LOW (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

/* Two bf16 that lie side by side are the halves of a word. Vectors of words need no instruction that
 * widens or packs, which is most of what a vector of bf16 costs. */
HR_INLINE uint32_t bf16_pair(const void *base, int64_t i)
{
    uint32_t pair;
    memcpy(&pair, (const uint16_t *)base + i, sizeof pair);
    return pair;
}

/* The bf16 are the high halves of `first` and `second`. */
HR_INLINE void bf16_put_pair(void *base, int64_t i, uint32_t first, uint32_t second)
{
    const uint32_t pair = first >> 16 | (second & 0xFFFF0000u);
    memcpy((uint16_t *)base + i, &pair, sizeof pair);
}

/* hr_to_bf16() of a number in the high half; the low half is not cleared. */
HR_INLINE uint32_t bf16_to_high(float x)
{
    const uint32_t bits = hr_bits(x);
    return bits + 0x7FFFu + ((bits >> 16) & 1u);
}

/* ---- Conversions ----------------------------------------------------------------------------- */

HR_INLINE void widen_f16_baseline(float *restrict to, const uint16_t *restrict from)
{
    for (int lane = 0; lane < F16_AT_ONCE; lane++)
        to[lane] = hr_from_f16(from[lane]);
}

HR_INLINE void narrow_f16_baseline(uint16_t *restrict to, const float *restrict from)
{
    for (int lane = 0; lane < F16_AT_ONCE; lane++)
        to[lane] = hr_to_f16(from[lane]);
}

HR_INLINE void narrow_bf16_baseline(uint16_t *restrict to, const float *restrict even,
                                    const float *restrict odd)
{
    for (int j = 0; j < CPU_STEP / 2; j++)
        bf16_put_pair(to, 2 * j, bf16_to_high(even[j]), bf16_to_high(odd[j]));
}

HR_INLINE void narrow_bf16_row_baseline(uint16_t *restrict to, const float *restrict from)
{
    for (int j = 0; j < CPU_STEP; j++)
        to[j] = (uint16_t)(bf16_to_high(from[j]) >> 16);
}

/* The half_conversions of a level. */
#define HALVES_OF(level)                                                                    \
    {                                                                                       \
        widen_f16_##level, narrow_f16_##level, narrow_bf16_##level, narrow_bf16_row_##level \
    }

#define HALVES_VARIANT_(target, loop, level)                                     \
    target static void loop##_##level(void *context, int64_t begin, int64_t end) \
    {                                                                            \
        const half_conversions halves = HALVES_OF(level);                        \
        loop(context, begin, end, halves);                                       \
    }

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

CPU_AVX2 HR_INLINE void widen_f16_avx2(float *restrict to, const uint16_t *restrict from)
{
    for (int half = 0; half < F16_AT_ONCE; half += 8)
        _mm256_storeu_ps(to + half,
                         _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + half))));
}

CPU_AVX2 HR_INLINE void narrow_f16_avx2(uint16_t *restrict to, const float *restrict from)
{
    for (int half = 0; half < F16_AT_ONCE; half += 8)
        _mm_storeu_si128((__m128i *)(to + half), _mm256_cvtps_ph(_mm256_loadu_ps(from + half), 0));
}

/* Rounds both halves of a word at once: 1 is added to the bits that are kept if those that are cut
 * are at least 0x8000, or where the kept ones are even, at least 0x8001. */
CPU_AVX2 HR_INLINE void narrow_bf16_avx2(uint16_t *restrict to, const float *restrict even,
                                         const float *restrict odd)
{
    const __m256i one = _mm256_set1_epi16(1);
    for (int j = 0; j < CPU_STEP / 2; j += 8) {
        const __m256i a = _mm256_loadu_si256((const __m256i *)(even + j));
        const __m256i b = _mm256_loadu_si256((const __m256i *)(odd + j));
        const __m256i kept = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA);
        const __m256i cut = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA);
        const __m256i even_kept = _mm256_andnot_si256(kept, one);
        const __m256i up = _mm256_srli_epi16(_mm256_subs_epu16(cut, even_kept), 15);
        _mm256_storeu_si256((__m256i *)(to + 2 * j), _mm256_add_epi16(kept, up));
    }
}

/* 16 numbers in a row, of which none must be a NaN, rounded as by narrow_bf16_avx2(). */
CPU_AVX2 HR_INLINE __m256i bf16_in_row_avx2(__m256 first, __m256 last)
{
    const __m256i a = _mm256_castps_si256(first), b = _mm256_castps_si256(last);
    const __m256i low = _mm256_set1_epi32(0xFFFF), one = _mm256_set1_epi16(1);
    const __m256i kept = _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
    const __m256i cut = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
    const __m256i even_kept = _mm256_andnot_si256(kept, one);
    const __m256i up = _mm256_srli_epi16(_mm256_subs_epu16(cut, even_kept), 15);
    return _mm256_permute4x64_epi64(_mm256_add_epi16(kept, up), 0xD8);
}

CPU_AVX2 HR_INLINE void narrow_bf16_row_avx2(uint16_t *restrict to, const float *restrict from)
{
    for (int j = 0; j < CPU_STEP; j += 16)
        _mm256_storeu_si256((__m256i *)(to + j), bf16_in_row_avx2(_mm256_loadu_ps(from + j),
                                                                  _mm256_loadu_ps(from + j + 8)));
}

CPU_AVX512 HR_INLINE void widen_f16_avx512(float *restrict to, const uint16_t *restrict from)
{
    _mm512_storeu_ps(to, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)));
}

CPU_AVX512 HR_INLINE void narrow_f16_avx512(uint16_t *restrict to, const float *restrict from)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(_mm512_loadu_ps(from), 0));
}

#define narrow_bf16_avx512     narrow_bf16_baseline
#define narrow_bf16_row_avx512 narrow_bf16_row_baseline

#define CPU_HALVES_VARIANTS(loop)                                                              \
    HALVES_VARIANT_(, loop, baseline)                                                          \
    HALVES_VARIANT_(CPU_AVX2, loop, avx2)                                                      \
    HALVES_VARIANT_(CPU_AVX512, loop, avx512)                                                  \
    static const hr_range_fn loop##_variants[] = {loop##_baseline, loop##_avx2, loop##_avx512, \
                                                  loop##_avx512};
#else
#define CPU_HALVES_VARIANTS(loop)     \
    HALVES_VARIANT_(, loop, baseline) \
    static const hr_range_fn loop##_variants[] = {loop##_baseline};
#endif

/* Convert `count` elements, at most a few hundred. */
HR_INLINE void f16_load(float *restrict to, const uint16_t *restrict from, int count,
                        half_conversions halves)
{
    int i = 0;
    for (; count - i >= F16_AT_ONCE; i += F16_AT_ONCE)
        halves.widen_f16(to + i, from + i);
    for (; i < count; i++)
        to[i] = hr_from_f16(from[i]);
}

HR_INLINE void f16_store(uint16_t *restrict to, const float *restrict from, int count,
                         half_conversions halves)
{
    int i = 0;
    for (; count - i >= F16_AT_ONCE; i += F16_AT_ONCE)
        halves.narrow_f16(to + i, from + i);
    for (; i < count; i++)
        to[i] = hr_to_f16(from[i]);
}

HR_INLINE void bf16_store(uint16_t *restrict to, const float *restrict from, int count,
                          half_conversions halves)
{
    int i = 0;
    for (; count - i >= CPU_STEP; i += CPU_STEP) {
        int nan = 0;
        for (int j = i; j < i + CPU_STEP; j++)
            nan |= from[j] != from[j];
        if (__builtin_expect(nan, 0))
            for (int j = i; j < i + CPU_STEP; j++)
                to[j] = hr_to_bf16(from[j]);
        else
            halves.narrow_bf16_row(to + i, from + i);
    }
    for (; i < count; i++)
        to[i] = hr_to_bf16(from[i]);
}

/* Convert the elements [i, i + count) of any float type to a tile of binary32, and back. */
HR_INLINE void halves_to_tile(const void *restrict base, int64_t i, int count, hr_dtype dtype,
                              float *restrict tile, half_conversions halves)
{
    if (dtype == HR_F16)
        f16_load(tile, (const uint16_t *)base + i, count, halves);
    else
        FOR_F32_OR_BF16(dtype, D, for (int j = 0; j < count; j++) tile[j] = hr_load(base, i + j, D))
}

HR_INLINE void halves_from_tile(void *restrict base, int64_t i, int count, hr_dtype dtype,
                                const float *restrict tile, half_conversions halves)
{
    if (dtype == HR_F16)
        f16_store((uint16_t *)base + i, tile, count, halves);
    else if (dtype == HR_BF16)
        bf16_store((uint16_t *)base + i, tile, count, halves);
    else
        for (int j = 0; j < count; j++)
            hr_store(base, i + j, tile[j], HR_F32);
}

/* Binary32 at element i of a run that ends at `end`: the tensor itself, or a tile that gets its
 * elements. */
HR_INLINE float *halves_floats(const void *base, int64_t i, int count, int64_t end, hr_dtype dtype,
                               float *tile, half_conversions halves)
{
    if (dtype == HR_F32)
        return (float *)base + i;
    cpu_prefetch(base, i, count, end, dtype);
    halves_to_tile(base, i, count, dtype, tile, halves);
    return tile;
}

#endif
