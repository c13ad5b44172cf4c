/*
 * weights_cpu_vbmi.h: bf16 weights of the modes that do not round at random, joined to and split
 * from vectors of binary32.
 *
 * These repeat weights_join() and weights_split() of weights.h on vectors, because the loop of
 * 8-bit Adam is faster with them. Change both together: tests/python/functional/test_cpu_levels.py
 * compares them for every param and every kind of residual.
 */
#ifndef HR_WEIGHTS_CPU_VBMI_H
#define HR_WEIGHTS_CPU_VBMI_H

#include "kernels/core/cpu_vbmi.h"
#include "kernels/weights/weights.h"

#if defined(__x86_64__) && defined(__GNUC__)
/* The addresses of 64 weights. */
typedef struct weights_address {
    void *param, *residual;
} weights_address;

/* 32 residuals as 16-bit integers. An 8-bit residual becomes the high byte. */
CPU_AVX512_VBMI_BF16 HR_INLINE __m512i weights_residuals_vbmi(const void *residual, int k,
                                                              hr_weights_mode mode)
{
    if (mode == HR_WEIGHTS_REMAINDER16)
        return _mm512_loadu_si512((const uint16_t *)residual + 16 * k);
    const __m256i bytes = _mm256_loadu_si256((const __m256i *)((const uint8_t *)residual + 16 * k));
    return _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);
}

/* Replaces the masters, in two vectors, that do not round to their params by the params. The fast
 * conversion turns denormals into 0, so vectors with denormals take the slow path, as those with a
 * difference do. */
CPU_AVX512_VBMI_BF16 HR_INLINE void weights_join_master_vbmi(const void *param, int k, __m512 x[2])
{
    const uint16_t *const from = (const uint16_t *)param + 16 * k;
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]);
    const __mmask32 differ = _mm512_cmpneq_epi16_mask(halves, _mm512_loadu_si512(from));
    const __mmask16 denormal =
        _kor_mask16(_mm512_fpclass_ps_mask(x[0], 0x20), _mm512_fpclass_ps_mask(x[1], 0x20));
    if (__builtin_expect(!_kortestz_mask32_u8(differ, denormal), 0))
        for (int j = 0; j < 2; j++) {
            const __m512i params =
                _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from + j));
            const __mmask16 written = _mm512_cmpneq_epi32_mask(cpu_to_bf16_vbmi(x[j]), params);
            x[j] = _mm512_castsi512_ps(
                _mm512_mask_slli_epi32(_mm512_castps_si512(x[j]), written, params, 16));
        }
}

/* weights_join() of vectors k and k + 1, k even. The order is CPU_EVEN_ODD, except for MASTER. */
CPU_AVX512_VBMI_BF16 HR_INLINE void weights_join_vbmi(weights_address w, int k, hr_dtype dtype,
                                                      hr_weights_mode mode, cpu_order order,
                                                      __m512 x[2])
{
    if (mode == HR_WEIGHTS_MASTER) {
        cpu_load_vbmi(w.residual, k, HR_F32, order, x);
        weights_join_master_vbmi(w.param, k, x);
    } else if (mode == HR_WEIGHTS_KAHAN) {
        __m512 residuals[2];
        cpu_load_vbmi(w.param, k, dtype, order, x);
        cpu_load_vbmi(w.residual, k, dtype, order, residuals);
        for (int j = 0; j < 2; j++) { /* weights_join_kahan() */
            const __m512 power =
                _mm512_and_ps(x[j], _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000)));
            const __m512 halves =
                _mm512_mul_ps(_mm512_abs_ps(residuals[j]), _mm512_set1_ps(0x1p8f));
            x[j] +=
                _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(halves, power, _CMP_LE_OQ), residuals[j]);
        }
    } else if (mode != HR_WEIGHTS_NEAREST) {
        /* The high halves of the sums are the params, less 1 where a residual is negative. */
        const __m512i residuals = weights_residuals_vbmi(w.residual, k, mode);
        const __m512i params = _mm512_loadu_si512((const uint16_t *)w.param + 16 * k);
        const __m512i high = _mm512_add_epi16(params, _mm512_srai_epi16(residuals, 15));
        const __m512i low = _mm512_set1_epi32(0xFFFF);
        const __m512i even =
            _mm512_ternarylogic_epi32(_mm512_slli_epi32(high, 16), residuals, low, 0xF8);
        const __m512i odd =
            _mm512_ternarylogic_epi32(high, _mm512_srli_epi32(residuals, 16), low, 0xDC);
        /* Where the sum is NaN, the param alone. */
        const __m512 sums[2] = {_mm512_castsi512_ps(even), _mm512_castsi512_ps(odd)};
        x[0] = _mm512_castsi512_ps(_mm512_mask_slli_epi32(
            even, _mm512_cmp_ps_mask(sums[0], sums[0], _CMP_UNORD_Q), params, 16));
        x[1] = _mm512_castsi512_ps(_mm512_mask_andnot_epi32(
            odd, _mm512_cmp_ps_mask(sums[1], sums[1], _CMP_UNORD_Q), low, params));
    } else {
        cpu_load_vbmi(w.param, k, dtype, order, x);
    }
}

/* weights_split() of vectors k and k + 1, and their stores. Returns 0 if they may hold a NaN, else
 * 3, as cpu_store_vbmi() does. */
CPU_AVX512_VBMI_BF16 HR_INLINE int weights_split_vbmi(weights_address w, int k, const __m512 x[2],
                                                      hr_dtype dtype, hr_weights_mode mode,
                                                      cpu_order order)
{
    if (mode == HR_WEIGHTS_MASTER)
        return cpu_store_vbmi(w.residual, k, x, HR_F32, order) &
               cpu_store_vbmi(w.param, k, x, dtype, order);
    if (mode == HR_WEIGHTS_NEAREST)
        return cpu_store_vbmi(w.param, k, x, dtype, order);
    if (mode == HR_WEIGHTS_KAHAN) {
        const int usual = cpu_store_vbmi(w.param, k, x, dtype, order);
        __m512 rounded[2];
        cpu_load_vbmi(w.param, k, dtype, order, rounded);
        for (int j = 0; j < 2; j++) /* 0 where the rounded param is infinite or NaN */
            rounded[j] = _mm512_maskz_sub_ps(
                _knot_mask16(_mm512_fpclass_ps_mask(rounded[j], 0x01 | 0x80 | 0x08 | 0x10)), x[j],
                rounded[j]);
        cpu_store_vbmi(w.residual, k, rounded, dtype, order);
        return usual;
    }
    const __mmask16 nan = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q);
    const int no_nan = _kortestz_mask16_u8(nan, nan) ? 3 : 0;
    __m512i even = _mm512_castps_si512(x[0]), odd = _mm512_castps_si512(x[1]);
    if (__builtin_expect(!no_nan, 0)) {
        const __m512i param = _mm512_set1_epi32(0x7FFF0000);
        even = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(x[0], x[0], _CMP_UNORD_Q), param);
        odd = _mm512_mask_mov_epi32(odd, _mm512_cmp_ps_mask(x[1], x[1], _CMP_UNORD_Q), param);
    }
    if (mode == HR_WEIGHTS_REMAINDER8) { /* round to 24 bits, ties to even; a NaN stays as it is */
        const __m512i one = _mm512_set1_epi32(1), below = _mm512_set1_epi32(0x7F);
        even = _mm512_add_epi32(_mm512_add_epi32(even, below),
                                _mm512_and_si512(_mm512_srli_epi32(even, 8), one));
        odd = _mm512_add_epi32(_mm512_add_epi32(odd, below),
                               _mm512_and_si512(_mm512_srli_epi32(odd, 8), one));
    }
    const __m512i half = _mm512_set1_epi32(0x8000), low = _mm512_set1_epi32(0xFFFF);
    const __m512i params =
        _mm512_ternarylogic_epi32(_mm512_add_epi32(odd, half),
                                  _mm512_srli_epi32(_mm512_add_epi32(even, half), 16), low, 0xDC);
    const __m512i residuals =
        _mm512_ternarylogic_epi32(_mm512_slli_epi32(odd, 16), even, low, 0xF8);
    _mm512_storeu_si512((uint16_t *)w.param + 16 * k, params);
    if (mode == HR_WEIGHTS_REMAINDER16)
        _mm512_storeu_si512((uint16_t *)w.residual + 16 * k, residuals);
    else
        _mm256_storeu_si256((__m256i *)((uint8_t *)w.residual + 16 * k),
                            _mm512_cvtepi16_epi8(_mm512_srli_epi16(residuals, 8)));
    return no_nan;
}

#endif

#endif
