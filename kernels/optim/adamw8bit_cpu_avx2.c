/* adamw8bit_cpu_avx2.c: the loop of adamw8bit_loop.h with AVX2, which encodes 8 moments at a
 * time. */
#include "kernels/optim/adamw8bit_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX2 HR_INLINE void adamw8bit_decode_avx2(const adamw8bit_call *call, const uint8_t *codes,
                                              float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane += 8) {
        const __m256 values =
            dynamic_values_avx2(&call->tables->vectors[is_signed], codes + lane, is_signed);
        _mm256_storeu_ps(x + lane, _mm256_mul_ps(values, _mm256_set1_ps(absmax)));
    }
}

/* Encodes 8 moments. Returns the lanes whose codes are not sure. */
CPU_AVX2 HR_INLINE int adamw8bit_encode_moment_avx2(const adamw8bit_tensor *t, const float *x,
                                                    float scale, int is_signed, uint8_t *codes)
{
    const __m256 moment = _mm256_loadu_ps(x);
    const __m256 y = _mm256_mul_ps(moment, _mm256_set1_ps(scale));
    int sure;
    const __m256i code =
        dynamic_codes_avx2(&t->call->tables->maps.map[is_signed], y, moment, is_signed, &sure);
    const __m128i words =
        _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
    _mm_storel_epi64((__m128i *)codes, _mm_packus_epi16(words, words));
    return 0xFF & ~sure;
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_avx2(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                              int i, int count)
{
    if (__builtin_expect(!p->vectors, 0)) {
        adamw8bit_encode_each(t, p, i, count);
        return;
    }
    const int end = i + count;
    for (; end - i >= 8; i += 8) {
        int unsure = adamw8bit_encode_moment_avx2(t, p->m + i, p->scale_m.second, 1,
                                                  t->exp_avg + p->begin + i);
        unsure |= adamw8bit_encode_moment_avx2(t, p->v + i, p->scale_v.second, 0,
                                               t->exp_avg_sq + p->begin + i);
        for (; __builtin_expect(unsure != 0, 0); unsure &= unsure - 1)
            adamw8bit_encode_each(t, p, i + __builtin_ctz((unsigned)unsure), 1);
    }
    adamw8bit_encode_each(t, p, i, end - i);
}

#define LOOP_TARGET     CPU_AVX2
#define LOOP_NAME(name) adamw8bit_##name##_avx2
#include "kernels/optim/adamw8bit_loop.h"
#endif
