/*
 * adamw8bit_cpu_avx2.c: a loop of 8-bit Adam of its own for AVX2. It takes the rule ADAMW8BIT_PLAIN
 * with f32 and bf16; everything else goes to the loop of adamw8bit_loop.h, whose moments it encodes
 * too.
 *
 * What bounds it is the number of instructions. So an element stays in registers from its codes to
 * its new moments, and what holds of one vector in a thousand is looked for in many at once.
 */
#include "kernels/optim/adamw8bit_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
/* ---- Encoding -------------------------------------------------------------------------------- */

/* The magnitudes of the quotients of 8 moments, and in *opposite, if the map is signed, the quotients
 * with the other sign. */
CPU_AVX2 HR_INLINE __m256i adamw8bit_quotients_avx2(const float *x, float scale, int is_signed,
                                                    __m256i *opposite)
{
    const __m256 moment = _mm256_loadu_ps(x);
    if (is_signed) {
        *opposite = _mm256_castps_si256(moment * -scale);
        return _mm256_and_si256(*opposite, _mm256_set1_epi32(0x7FFFFFFF));
    }
    /* At least DYNAMIC_LEAST_POSITIVE where x is positive, even if the quotient is 0; else 0. */
    const __m256i least = _mm256_castps_si256(_mm256_set1_ps(DYNAMIC_LEAST_POSITIVE));
    const __m256i positive =
        _mm256_cmpgt_epi32(_mm256_castps_si256(moment), _mm256_setzero_si256());
    return _mm256_and_si256(_mm256_max_epi32(_mm256_castps_si256(moment * scale), least), positive);
}

/* Encodes LANES moments. Returns words of which one is 0 if a code is not sure. */
CPU_AVX2 HR_INLINE __m256i adamw8bit_encode_moment_avx2(const dynamic_decades *decades,
                                                        const float *x, float scale, int is_signed,
                                                        uint8_t *codes)
{
    __m256i least = _mm256_set1_epi32(-1);
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 32) {
        __m256i distances[2]; /* of 16 codes each, with the opposite sign */
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            __m256i opposite[2], words[2];
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                __m256i sure;
                const __m256i magnitude = adamw8bit_quotients_avx2(x + i + 16 * half + 8 * k, scale,
                                                                   is_signed, &opposite[k]);
                words[k] =
                    _mm256_srli_epi32(dynamic_distances_avx2(decades, magnitude, is_signed, &sure),
                                      DYNAMIC_FRACTION_BITS);
                least = _mm256_min_epu32(least, sure);
            }
            distances[half] =
                _mm256_and_si256(_mm256_packus_epi32(words[0], words[1]), _mm256_set1_epi16(255));
            if (is_signed)
                distances[half] = _mm256_sign_epi16(distances[half],
                                                    _mm256_packs_epi32(opposite[0], opposite[1]));
        }
        /* The packs take 4 words of each half in turn. The signed one makes 128 127, because -1 is
         * not in the map. */
        const __m256i in_turns = is_signed ? _mm256_packs_epi16(distances[0], distances[1])
                                           : _mm256_packus_epi16(distances[0], distances[1]);
        const __m256i in_row =
            _mm256_permutevar8x32_epi32(in_turns, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i *)(codes + i),
                            is_signed ? _mm256_sub_epi8(_mm256_set1_epi8(127), in_row) : in_row);
    }
    return least;
}

/* Encodes those of LANES elements whose codes are not sure, which it finds again: to note them for all
 * elements would cost more. */
static __attribute__((noinline)) CPU_AVX2 void
adamw8bit_encode_unsure(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i)
{
    const dynamic_decades *const decades = t->call->tables->decades;
    for (const int end = i + LANES; i < end; i += 8) {
        __m256i sure_m, sure_v, opposite;
        const __m256i m = adamw8bit_quotients_avx2(p->m + i, p->scale_m.second, 1, &opposite);
        const __m256i v = adamw8bit_quotients_avx2(p->v + i, p->scale_v.second, 0, &opposite);
        dynamic_distances_avx2(&decades[1], m, 1, &sure_m);
        dynamic_distances_avx2(&decades[0], v, 0, &sure_v);
        const __m256i unsure =
            _mm256_cmpeq_epi32(_mm256_min_epu32(sure_m, sure_v), _mm256_setzero_si256());
        unsigned lanes = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(unsure));
        for (; lanes; lanes &= lanes - 1)
            adamw8bit_encode_each(t, p, i + __builtin_ctz(lanes), 1);
    }
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_avx2(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                              int i, int count)
{
    if (__builtin_expect(!p->vectors || count < LANES, 0)) {
        adamw8bit_encode_each(t, p, i, count);
        return;
    }
    const dynamic_decades *const decades = t->call->tables->decades;
    const __m256i least_m = adamw8bit_encode_moment_avx2(&decades[1], p->m + i, p->scale_m.second,
                                                         1, t->exp_avg + p->begin + i);
    const __m256i least_v = adamw8bit_encode_moment_avx2(&decades[0], p->v + i, p->scale_v.second,
                                                         0, t->exp_avg_sq + p->begin + i);
    const __m256i unsure =
        _mm256_cmpeq_epi32(_mm256_min_epu32(least_m, least_v), _mm256_setzero_si256());
    if (__builtin_expect(!_mm256_testz_si256(unsure, unsure), 0))
        adamw8bit_encode_unsure(t, p, i);
}

/* ---- Decoding and updating ------------------------------------------------------------------- */

CPU_AVX2 HR_INLINE void adamw8bit_decode_avx2(const adamw8bit_call *call, const uint8_t *codes,
                                              float absmax, int is_signed, float *x)
{
    const float *const values = call->tables->maps.map[is_signed].values;
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = values[codes[lane]] * absmax;
}

/* Decodes 8 codes, without their scale, by loads: a value takes two instructions, which compute
 * nothing. Those that insert an integer take it from memory. */
CPU_AVX2 HR_INLINE __m256 adamw8bit_decode8_avx2(const float *values, const uint8_t *codes)
{
    const int32_t *const bits = (const int32_t *)(const void *)values;
    __m128i half[2];
    for (int k = 0; k < 2; k++) {
        half[k] = _mm_cvtsi32_si128(bits[codes[4 * k]]);
        half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 1]], 1);
        half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 2]], 2);
        half[k] = _mm_insert_epi32(half[k], bits[codes[4 * k + 3]], 3);
    }
    return _mm256_castsi256_ps(_mm256_set_m128i(half[1], half[0]));
}

CPU_AVX2 HR_INLINE __m256 adamw8bit_load_avx2(const void *base, int i, hr_dtype dtype)
{
    if (dtype == HR_F32)
        return _mm256_loadu_ps((const float *)base + i);
    const __m128i halves = _mm_loadu_si128((const __m128i *)((const uint16_t *)base + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* hr_store() of 16 elements, NaNs among them. */
static __attribute__((noinline, cold)) CPU_AVX2 void
adamw8bit_store_any(void *base, int i, __m256 first, __m256 last, hr_dtype dtype)
{
    float x[16];
    _mm256_storeu_ps(x, first);
    _mm256_storeu_ps(x + 8, last);
    FOR_DTYPE(dtype, D, for (int k = 0; k < 16; k++) hr_store(base, i + k, x[k], D))
}

/* hr_store() of 16 elements. */
CPU_AVX2 HR_INLINE void adamw8bit_store_avx2(void *base, int i, const __m256 x[2], hr_dtype dtype)
{
    const __m256 nan = _mm256_cmp_ps(x[0], x[1], _CMP_UNORD_Q);
    if (__builtin_expect(!_mm256_testz_ps(nan, nan), 0)) {
        adamw8bit_store_any(base, i, x[0], x[1], dtype);
    } else if (dtype == HR_F32) {
        _mm256_storeu_ps((float *)base + i, x[0]);
        _mm256_storeu_ps((float *)base + i + 8, x[1]);
    } else {
        /* As narrow_bf16_avx2(): 1 is added if the bits that are cut are at least 0x8000, or where
         * the kept ones are even, at least 0x8001. */
        const __m256i a = _mm256_castps_si256(x[0]), b = _mm256_castps_si256(x[1]);
        const __m256i low = _mm256_set1_epi32(0xFFFF), one = _mm256_set1_epi16(1);
        const __m256i kept =
            _mm256_packus_epi32(_mm256_srli_epi32(a, 16), _mm256_srli_epi32(b, 16));
        const __m256i cut = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
        const __m256i even = _mm256_andnot_si256(kept, one);
        const __m256i up = _mm256_srli_epi16(_mm256_subs_epu16(cut, even), 15);
        const __m256i rounded = _mm256_add_epi16(kept, up);
        _mm256_storeu_si256((__m256i *)((uint16_t *)base + i),
                            _mm256_permute4x64_epi64(rounded, 0xD8));
    }
}

/* The constants of a step, and the scales of a block. */
typedef struct adamw8bit_repeated {
    __m256 grad_factor, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias2, eps, keep, step_size;
    __m256 absmax_m, absmax_v;
} adamw8bit_repeated;

/* Updates LANES elements and raises the largest magnitudes. */
CPU_AVX2 HR_INLINE void adamw8bit_update_plain(const quant_maps *maps, const adamw8bit_repeated *c,
                                               void *param, const void *grad,
                                               const uint8_t *exp_avg, const uint8_t *exp_avg_sq,
                                               float *m, float *v, __m256i *largest_m,
                                               __m256i *largest_v, hr_dtype param_dtype,
                                               hr_dtype grad_dtype)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    for (int i = 0; i < LANES; i += 16) {
        __m256 params[2];
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            const int at = i + 8 * k;
            const __m256 g = adamw8bit_load_avx2(grad, at, grad_dtype) * c->grad_factor;
            const __m256 old_m =
                adamw8bit_decode8_avx2(maps->map[1].values, exp_avg + at) * c->absmax_m;
            const __m256 old_v =
                adamw8bit_decode8_avx2(maps->map[0].values, exp_avg_sq + at) * c->absmax_v;
            const __m256 new_v = c->beta2 * old_v + c->one_minus_beta2 * (g * g);
            const __m256 new_m = old_m + c->one_minus_beta1 * (g - old_m);
            const __m256 denominator = _mm256_sqrt_ps(new_v) * c->rsqrt_bias2 + c->eps;
            params[k] = c->keep * adamw8bit_load_avx2(param, at, param_dtype) -
                        c->step_size * (new_m / denominator);
            _mm256_storeu_ps(m + at, new_m);
            _mm256_storeu_ps(v + at, new_v);
            *largest_m = _mm256_max_epu32(*largest_m,
                                          _mm256_and_si256(_mm256_castps_si256(new_m), magnitude));
            *largest_v = _mm256_max_epu32(*largest_v,
                                          _mm256_and_si256(_mm256_castps_si256(new_v), magnitude));
        }
        adamw8bit_store_avx2(param, i, params, param_dtype);
    }
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

CPU_AVX2 HR_INLINE uint32_t adamw8bit_largest_avx2(__m256i magnitudes)
{
    __m128i most =
        _mm_max_epu32(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4E));
    most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(most);
}

/* Prefetches LANES elements AHEAD bytes ahead, as cpu_prefetch() does. */
#define AHEAD 2048
HR_INLINE void adamw8bit_prefetch(const void *base, int size)
{
    for (int byte = 0; byte < LANES * size; byte += 64)
        __builtin_prefetch((const char *)base + AHEAD + byte, 1);
}

CPU_AVX2 HR_INLINE void adamw8bit_blocks_plain(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                               hr_dtype param_dtype, hr_dtype grad_dtype)
{
    const int block_size = t->call->args->config->block_size;
    const int param_size = hr_element_size(param_dtype), grad_size = hr_element_size(grad_dtype);
    const quant_maps *const maps = &t->call->tables->maps;
    adamw8bit_repeated c;
    c.grad_factor = _mm256_set1_ps(t->constants.grad_factor);
    c.one_minus_beta1 = _mm256_set1_ps(t->constants.one_minus_beta1);
    c.beta2 = _mm256_set1_ps(t->constants.beta2);
    c.one_minus_beta2 = _mm256_set1_ps(t->constants.one_minus_beta2);
    c.rsqrt_bias2 = _mm256_set1_ps(t->constants.rsqrt_bias2);
    c.eps = _mm256_set1_ps(t->constants.eps);
    c.keep = _mm256_set1_ps(t->constants.keep);
    c.step_size = _mm256_set1_ps(t->constants.step_size);
    adamw8bit_moments moments;    /* of this block and of the previous one */
    adamw8bit_pending last = {0}; /* the previous block */
    int64_t block = from / block_size;
    for (int64_t begin = from; begin < to; begin += block_size, block++) {
        const int count = to - begin < block_size ? (int)(to - begin) : block_size;
        float *const m = block % 2 ? moments.m1 : moments.m0;
        float *const v = block % 2 ? moments.v1 : moments.v0;
        /* The bound of cpu_prefetch(), checked once per block. */
        const int ahead = to - begin > block_size + AHEAD;
        __m256i largest_m = _mm256_setzero_si256(), largest_v = _mm256_setzero_si256();
        c.absmax_m = _mm256_set1_ps(t->exp_avg_absmax[block]);
        c.absmax_v = _mm256_set1_ps(t->exp_avg_sq_absmax[block]);
        int encoded = 0;
        for (int i = 0; i < count; i += LANES) {
            char *const param = (char *)t->param + (begin + i) * param_size;
            const char *const grad = (const char *)t->grad + (begin + i) * grad_size;
            const uint8_t *const exp_avg = t->exp_avg + begin + i;
            const uint8_t *const exp_avg_sq = t->exp_avg_sq + begin + i;
            if (ahead) {
                adamw8bit_prefetch(param, param_size);
                adamw8bit_prefetch(grad, grad_size);
                adamw8bit_prefetch(exp_avg, 1);
                adamw8bit_prefetch(exp_avg_sq, 1);
            }
            if (__builtin_expect(count - i < LANES, 0)) {
                adamw8bit_few few;
                adamw8bit_pad(&few, t, begin + i, count - i, param_size, grad_size);
                adamw8bit_update_plain(maps, &c, few.param, few.grad, few.exp_avg, few.exp_avg_sq,
                                       m + i, v + i, &largest_m, &largest_v, param_dtype,
                                       grad_dtype);
                memcpy(param, few.param, (size_t)((count - i) * param_size));
            } else {
                adamw8bit_update_plain(maps, &c, param, grad, exp_avg, exp_avg_sq, m + i, v + i,
                                       &largest_m, &largest_v, param_dtype, grad_dtype);
            }
            if (encoded < last.count) {
                adamw8bit_encode_avx2(t, &last, encoded, LANES);
                encoded += LANES;
            }
        }
        for (; encoded < last.count; encoded += LANES)
            adamw8bit_encode_avx2(t, &last, encoded, LANES);
        last = adamw8bit_close(t, begin, count, block, m, v, adamw8bit_largest_avx2(largest_m),
                               adamw8bit_largest_avx2(largest_v));
    }
    for (int i = 0; i < last.count; i += LANES)
        adamw8bit_encode_avx2(t, &last, i, last.count - i < LANES ? last.count - i : LANES);
}

#define LOOP_TARGET     CPU_AVX2
#define LOOP_NAME(name) adamw8bit_##name##_avx2
#define LOOP_LITERAL    0
#include "kernels/optim/adamw8bit_loop.h"

CPU_AVX2 void adamw8bit_run_plain_avx2(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                       hr_dtype param_dtype, hr_dtype grad_dtype)
{
    if (t->call->rule != ADAMW8BIT_PLAIN || !adamw_is_slow(t->constants) || param_dtype == HR_F16 ||
        grad_dtype == HR_F16) {
        adamw8bit_run_avx2(t, from, to, param_dtype, grad_dtype);
        return;
    }
    FOR_F32_OR_BF16(param_dtype, P,
                    FOR_F32_OR_BF16(grad_dtype, G, adamw8bit_blocks_plain(t, from, to, P, G)))
}
#endif
