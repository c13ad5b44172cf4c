/*
 * cpu_vbmi.h: 64 elements in four AVX-512 vectors of binary32: how they are ordered, and how they
 * are read from and written to memory as f32 or bf16. For loops at HR_CPU_AVX512_VBMI.
 *
 * The conversions give the bits of hr_load() and hr_store() in dtype.h.
 */
#ifndef HR_CPU_VBMI_H
#define HR_CPU_VBMI_H

#include "kernels/core/cpu.h"

/* The order of 64 elements in four vectors. IN_ROW: 16 after 16. EVEN_ODD: the even elements of the
 * first 32, then the odd ones, then likewise for the last 32; these are the halves of 32-bit
 * words. */
typedef enum cpu_order { CPU_IN_ROW, CPU_EVEN_ODD } cpu_order;

/* The element in lane `lane` of vector k. */
HR_INLINE int cpu_element(cpu_order order, int k, int lane)
{
    return order == CPU_IN_ROW ? 16 * k + lane : 32 * (k / 2) + 2 * lane + k % 2;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

/* Loads vectors k and k + 1 of 64 elements, k even. */
CPU_AVX512_VBMI_BF16 HR_INLINE void cpu_load_vbmi(const void *base, int k, hr_dtype dtype,
                                                  cpu_order order, __m512 x[2])
{
    if (dtype == HR_F32) {
        x[0] = _mm512_loadu_ps((const float *)base + 16 * k);
        x[1] = _mm512_loadu_ps((const float *)base + 16 * k + 16);
    } else if (order == CPU_EVEN_ODD) {
        const __m512i halves = _mm512_loadu_si512((const uint16_t *)base + 16 * k);
        x[0] = _mm512_castsi512_ps(_mm512_slli_epi32(halves, 16));
        x[1] = _mm512_castsi512_ps(_mm512_and_si512(halves, _mm512_set1_epi32((int)0xFFFF0000u)));
    } else {
        for (int j = 0; j < 2; j++) {
            const __m256i halves = _mm256_loadu_si256((const __m256i *)base + k + j);
            x[j] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
    }
}

/* hr_to_bf16(), with the result in the low half of each word. */
CPU_AVX512_VBMI_BF16 HR_INLINE __m512i cpu_to_bf16_vbmi(__m512 x)
{
    const __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    return _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q),
                                 _mm512_set1_epi32(0x7FFF));
}

/* hr_store() of vectors k and k + 1. Returns 0 if they may hold a NaN, else 3. The rare path is not
 * a function call, because no vector stays in a register across a call. */
CPU_AVX512_VBMI_BF16 HR_INLINE int cpu_store_vbmi(void *base, int k, const __m512 x[2],
                                                  hr_dtype dtype, cpu_order order)
{
    if (dtype == HR_F32) {
        float *const to = (float *)base + 16 * k;
        const __mmask16 nan = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q);
        const int no_nan = _kortestz_mask16_u8(nan, nan) ? 3 : 0;
        _mm512_storeu_ps(to, x[0]);
        _mm512_storeu_ps(to + 16, x[1]);
        for (int j = 0; __builtin_expect(!no_nan, 0) && j < 2; j++)
            _mm512_mask_storeu_ps(to + 16 * j, _mm512_cmp_ps_mask(x[j], x[j], _CMP_UNORD_Q),
                                  _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF)));
        return no_nan;
    }
    /* Interleaves the even and the odd elements. */
    const __m512i turns =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
    if (order == CPU_EVEN_ODD)
        halves = _mm512_permutexvar_epi16(turns, halves);
    /* NaNs, and denormals, which the conversion turns into 0. */
    const __mmask16 special0 = _mm512_fpclass_ps_mask(x[0], 0x01 | 0x80 | 0x20);
    const __mmask16 special1 = _mm512_fpclass_ps_mask(x[1], 0x01 | 0x80 | 0x20);
    const int usual = _kortestz_mask16_u8(special0, special1) ? 3 : 0;
    if (__builtin_expect(!usual, 0)) {
        const __m512i words[2] = {cpu_to_bf16_vbmi(x[0]), cpu_to_bf16_vbmi(x[1])};
        halves = _mm512_or_si512(words[0], _mm512_slli_epi32(words[1], 16));
        if (order == CPU_IN_ROW)
            halves = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(words[0])),
                                        _mm512_cvtepi32_epi16(words[1]), 1);
    }
    _mm512_storeu_si512((uint16_t *)base + 16 * k, halves);
    return usual;
}

#endif

#endif
