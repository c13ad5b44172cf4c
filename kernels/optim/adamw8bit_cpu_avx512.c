/* adamw8bit_cpu_avx512.c: the loop of adamw8bit_loop.h with AVX-512, which encodes 16 moments at a
 * time. */
#include "kernels/optim/adamw8bit_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX512 HR_INLINE void adamw8bit_decode_avx512(const adamw8bit_call *call, const uint8_t *codes,
                                                  float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane += 16) {
        const __m128i code = _mm_loadu_si128((const __m128i *)(codes + lane));
        const __m512 values =
            dynamic_values_avx512(&call->tables->vectors[is_signed], code, is_signed);
        _mm512_storeu_ps(x + lane, _mm512_mul_ps(values, _mm512_set1_ps(absmax)));
    }
}

/* Encodes the moments of the lanes `there`. Returns the lanes whose codes are not sure. */
CPU_AVX512 HR_INLINE uint32_t adamw8bit_encode_moment_avx512(const adamw8bit_tensor *t,
                                                             const float *x, __mmask16 there,
                                                             float scale, int is_signed,
                                                             uint8_t *codes)
{
    const __m512 moment = _mm512_loadu_ps(x);
    const __m512 y = _mm512_mul_ps(moment, _mm512_set1_ps(scale));
    __mmask16 sure;
    const __m512i code =
        dynamic_codes_avx512(&t->call->tables->vectors[is_signed], y, moment, is_signed, &sure);
    _mm512_mask_cvtepi32_storeu_epi8(codes, there, code);
    return there & ~(uint32_t)sure;
}

CPU_AVX512 HR_INLINE void adamw8bit_encode_avx512(const adamw8bit_tensor *t,
                                                  const adamw8bit_pending *p, int i, int count)
{
    if (__builtin_expect(!p->vectors, 0)) {
        adamw8bit_encode_each(t, p, i, count);
        return;
    }
    for (const int end = i + count; i < end; i += 16) {
        const __mmask16 there = (__mmask16)(end - i < 16 ? (1u << (end - i)) - 1u : 0xFFFFu);
        uint32_t unsure = adamw8bit_encode_moment_avx512(t, p->m + i, there, p->scale_m.second, 1,
                                                         t->exp_avg + p->begin + i);
        unsure |= adamw8bit_encode_moment_avx512(t, p->v + i, there, p->scale_v.second, 0,
                                                 t->exp_avg_sq + p->begin + i);
        for (; __builtin_expect(unsure != 0, 0); unsure &= unsure - 1)
            adamw8bit_encode_each(t, p, i + __builtin_ctz(unsure), 1);
    }
}

#define LOOP_TARGET     CPU_AVX512
#define LOOP_NAME(name) adamw8bit_##name##_avx512
#define LOOP_LITERAL    1
#include "kernels/optim/adamw8bit_loop.h"
#endif
