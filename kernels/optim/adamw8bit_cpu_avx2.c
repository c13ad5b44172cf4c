/* adamw8bit_cpu_avx2.c: the loop of adamw8bit_loop.h with AVX2, which encodes 8 moments at a
 * time. */
#include "kernels/optim/adamw8bit_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX2 HR_INLINE void adamw8bit_decode_avx2(const adamw8bit_call *call, const uint8_t *codes,
                                              float absmax, int is_signed, float *x)
{
    const float *const values = call->tables->maps.map[is_signed].values;
    for (int lane = 0; lane < LANES; lane++) /* loads, which vectors leave time for */
        x[lane] = values[codes[lane]] * absmax;
}

/* Encodes LANES moments. Writes words that are 0 where a code is not sure, and returns 0 in lanes of
 * which one is. */
CPU_AVX2 HR_INLINE __m256i adamw8bit_encode_moment_avx2(const adamw8bit_tensor *t, const float *x,
                                                        float scale, int is_signed, uint8_t *codes,
                                                        uint32_t *sure)
{
    const dynamic_decades *const decades = &t->call->tables->decades[is_signed];
    __m256i least = _mm256_set1_epi32(-1);
    for (int i = 0; i < LANES; i += 32) {
        __m256i words[4];
        for (int k = 0; k < 4; k++) {
            const __m256 moment = _mm256_loadu_ps(x + i + 8 * k);
            const __m256 y = _mm256_mul_ps(moment, _mm256_set1_ps(scale));
            __m256i lanes;
            words[k] = dynamic_codes_avx2(decades, y, moment, is_signed, &lanes);
            _mm256_storeu_si256((__m256i *)(sure + i + 8 * k), lanes);
            least = _mm256_min_epu32(least, lanes);
        }
        const __m256i byte = _mm256_set1_epi16(255);
        const __m256i low = _mm256_and_si256(_mm256_packus_epi32(words[0], words[1]), byte);
        const __m256i high = _mm256_and_si256(_mm256_packus_epi32(words[2], words[3]), byte);
        /* The packs take 4 words of each half in turn. */
        const __m256i in_row = _mm256_permutevar8x32_epi32(
            _mm256_packus_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(codes + i), in_row);
    }
    return least;
}

/* Encodes those of LANES elements whose codes are not sure. */
static __attribute__((noinline)) void adamw8bit_encode_unsure(const adamw8bit_tensor *t,
                                                              const adamw8bit_pending *p, int i,
                                                              const uint32_t *sure_m,
                                                              const uint32_t *sure_v)
{
    for (int lane = 0; lane < LANES; lane++)
        if (sure_m[lane] == 0 || sure_v[lane] == 0)
            adamw8bit_encode_each(t, p, i + lane, 1);
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_avx2(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                              int i, int count)
{
    if (__builtin_expect(!p->vectors || count < LANES, 0)) {
        adamw8bit_encode_each(t, p, i, count);
        return;
    }
    uint32_t sure_m[LANES], sure_v[LANES];
    const __m256i least_m = adamw8bit_encode_moment_avx2(t, p->m + i, p->scale_m.second, 1,
                                                         t->exp_avg + p->begin + i, sure_m);
    const __m256i least_v = adamw8bit_encode_moment_avx2(t, p->v + i, p->scale_v.second, 0,
                                                         t->exp_avg_sq + p->begin + i, sure_v);
    const __m256i unsure =
        _mm256_cmpeq_epi32(_mm256_min_epu32(least_m, least_v), _mm256_setzero_si256());
    if (__builtin_expect(!_mm256_testz_si256(unsure, unsure), 0))
        adamw8bit_encode_unsure(t, p, i, sure_m, sure_v);
}

#define LOOP_TARGET     CPU_AVX2
#define LOOP_NAME(name) adamw8bit_##name##_avx2
#include "kernels/optim/adamw8bit_loop.h"
#endif
