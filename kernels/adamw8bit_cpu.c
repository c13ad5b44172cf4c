/*
 * adamw8bit_cpu.c: the loop over the list. One parallel region covers the blocks of the whole list,
 * so ten thousand small tensors cost no more hand-overs than one large one.
 */
#include "adamw8bit.h"
#include "dynamic_map_cpu.h"

/* The rule of an element. PLAIN is ANY without what few ask for: skip_nonfinite, and decay that is
 * not decoupled. */
typedef enum adamw8bit_rule { ADAMW8BIT_PLAIN, ADAMW8BIT_ANY, ADAMW8BIT_BNB } adamw8bit_rule;

/* A call. */
typedef struct adamw8bit_call {
    const adamw8bit_args *args;
    adamw8bit_rule rule;
    adamw8bit_maps maps;
    dynamic_vectors vectors[2]; /* by is_signed */
    dynamic_bytes bytes[2];
    int fast; /* whether adamw8bit_run_vbmi() may run it */
} adamw8bit_call;

/* A tensor of the call. */
typedef struct adamw8bit_tensor {
    const adamw8bit_call *call;
    void *param;
    const void *grad;
    uint8_t *exp_avg, *exp_avg_sq;
    float *exp_avg_absmax, *exp_avg_sq_absmax;
    adamw_constants constants;
    adamw8bit_bnb_constants bnb;
    uint64_t seed;
    double step;
} adamw8bit_tensor;

/* A block that is updated and not encoded yet. */
typedef struct adamw8bit_pending {
    int64_t begin;
    int count;
    float *m, *v;
    float absmax_m, absmax_v;
    dynamic_scale scale_m, scale_v;
    int vectors; /* whether vector code may encode it */
} adamw8bit_pending;

#define LANES CPU_STEP /* elements at a time; a block size is a multiple of it */

/* The moments of two blocks. A load waits for an earlier store whose address is the same modulo
 * 4096, so the second block is not that far from the first. */
typedef struct adamw8bit_moments {
    _Alignas(64) float m0[ADAMW8BIT_MAX_BLOCK];
    float v0[ADAMW8BIT_MAX_BLOCK];
    float apart[ADAMW8BIT_MAX_BLOCK / 2];
    float m1[ADAMW8BIT_MAX_BLOCK];
    float v1[ADAMW8BIT_MAX_BLOCK];
} adamw8bit_moments;

/* Fewer elements than LANES, and zeros. */
typedef struct adamw8bit_few {
    float param[LANES], grad[LANES];
    uint8_t exp_avg[LANES], exp_avg_sq[LANES];
} adamw8bit_few;

static void adamw8bit_pad(adamw8bit_few *few, const adamw8bit_tensor *t, int64_t i, int count,
                          int param_size, int grad_size)
{
    memset(few, 0, sizeof *few);
    memset(few->exp_avg, dynamic_zero(1), sizeof few->exp_avg);
    memcpy(few->param, (const char *)t->param + i * param_size, (size_t)(count * param_size));
    memcpy(few->grad, (const char *)t->grad + i * grad_size, (size_t)(count * grad_size));
    memcpy(few->exp_avg, t->exp_avg + i, (size_t)count);
    memcpy(few->exp_avg_sq, t->exp_avg_sq + i, (size_t)count);
}

HR_INLINE adamw_values adamw8bit_apply(const adamw8bit_tensor *t, adamw_values x,
                                       hr_dtype param_dtype, adamw8bit_rule rule)
{
    if (rule == ADAMW8BIT_BNB)
        return adamw8bit_bnb_element(t->bnb, x, param_dtype);
    if (rule == ADAMW8BIT_ANY)
        return adamw_update(t->constants, x, 0, t->call->args->config->adamw.skip_nonfinite);
    adamw_constants c = t->constants;
    c.l2 = 0.0f;
    return adamw_element(c, x, 0);
}

HR_INLINE uint32_t adamw8bit_largest(const uint32_t *magnitudes)
{
    uint32_t largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = magnitudes[lane] > largest ? magnitudes[lane] : largest;
    return largest;
}

/* Multiplies a block by a first factor that is large, which loses nothing: vector code has none. */
HR_INLINE dynamic_scale adamw8bit_rescale(float *x, int count, dynamic_scale scale)
{
    if (__builtin_expect(scale.first > 1.0f, 0)) {
        for (int i = 0; i < count; i++)
            x[i] *= scale.first;
        scale.first = 1.0f;
    }
    return scale;
}

/* Stores the absmaxes of a block. */
HR_INLINE adamw8bit_pending adamw8bit_close(const adamw8bit_tensor *t, int64_t begin, int count,
                                            int64_t block, float *m, float *v, uint32_t magnitude_m,
                                            uint32_t magnitude_v)
{
    const int bnb = t->call->rule == ADAMW8BIT_BNB;
    adamw8bit_pending pending;
    pending.begin = begin;
    pending.count = count;
    pending.m = m;
    pending.v = v;
    pending.absmax_m = adamw8bit_absmax(magnitude_m, bnb);
    pending.absmax_v = adamw8bit_absmax(magnitude_v, bnb);
    pending.scale_m = dynamic_scale_of(pending.absmax_m);
    pending.scale_v = dynamic_scale_of(pending.absmax_v);
    pending.vectors = 0;
    if (!bnb && !t->call->args->config->seeds) {
        pending.scale_m = adamw8bit_rescale(m, count, pending.scale_m);
        pending.scale_v = adamw8bit_rescale(v, count, pending.scale_v);
        pending.vectors = pending.scale_m.first == 1.0f && pending.scale_v.first == 1.0f;
    }
    t->exp_avg_absmax[block] = pending.absmax_m;
    t->exp_avg_sq_absmax[block] = pending.absmax_v;
    return pending;
}

/* The codes of the elements [i, i + count) of a block, one by one. Not inlined: it is long. */
static __attribute__((noinline)) void
adamw8bit_encode_each(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i, int count)
{
    const adamw8bit_maps *const maps = &t->call->maps;
    uint8_t *const exp_avg = t->exp_avg + p->begin + i;
    uint8_t *const exp_avg_sq = t->exp_avg_sq + p->begin + i;
    const float *const m = p->m + i, *const v = p->v + i;
    if (t->call->rule == ADAMW8BIT_BNB) {
        for (int lane = 0; lane < count; lane++) {
            exp_avg[lane] = adamw8bit_bnb_encode(maps, m[lane], p->absmax_m, 1);
            exp_avg_sq[lane] = adamw8bit_bnb_encode(maps, v[lane], p->absmax_v, 0);
        }
    } else if (t->call->args->config->seeds) {
        hr_random4 random[LANES / 2];
        for (int pair = 0; pair < LANES / 2; pair++)
            random[pair] = adamw8bit_random(t->seed, t->step, p->begin + i + 2 * pair);
        for (int lane = 0; lane < count; lane++) {
            const uint32_t *const words = &random[lane / 2].word[lane % 2 * 2];
            exp_avg[lane] = adamw8bit_encode_randomly(maps, m[lane], p->scale_m, 1, words[0]);
            exp_avg_sq[lane] = adamw8bit_encode_randomly(maps, v[lane], p->scale_v, 0, words[1]);
        }
    } else {
        for (int lane = 0; lane < count; lane++) {
            exp_avg[lane] = adamw8bit_encode(maps, m[lane], p->scale_m, 1);
            exp_avg_sq[lane] = adamw8bit_encode(maps, v[lane], p->scale_v, 0);
        }
    }
}

HR_INLINE void adamw8bit_decode_baseline(const adamw8bit_call *call, const uint8_t *codes,
                                         float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = adamw8bit_decode(&call->maps, codes[lane], absmax, is_signed);
}

HR_INLINE void adamw8bit_encode_baseline(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                         int i, int count)
{
    adamw8bit_encode_each(t, p, i, count);
}

HR_INLINE int adamw8bit_run_fast_baseline(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                          hr_dtype param_dtype, hr_dtype grad_dtype)
{
    (void)t, (void)from, (void)to, (void)param_dtype, (void)grad_dtype;
    return 0;
}

#define LOOP_TARGET
#define LOOP_NAME(name) adamw8bit_##name##_baseline
#include "adamw8bit_loop.h"
#undef LOOP_TARGET
#undef LOOP_NAME

#if defined(__x86_64__) && defined(__GNUC__)
CPU_AVX2 HR_INLINE void adamw8bit_decode_avx2(const adamw8bit_call *call, const uint8_t *codes,
                                              float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane += 8) {
        const __m256 values =
            dynamic_values_avx2(&call->vectors[is_signed], codes + lane, is_signed);
        _mm256_storeu_ps(x + lane, _mm256_mul_ps(values, _mm256_set1_ps(absmax)));
    }
}

/* The codes of 8 moments. Gives the lanes that are not sure. */
CPU_AVX2 HR_INLINE int adamw8bit_encode_moment_avx2(const adamw8bit_tensor *t, const float *x,
                                                    float scale, int is_signed, uint8_t *codes)
{
    const __m256 moment = _mm256_loadu_ps(x);
    const __m256 y = _mm256_mul_ps(moment, _mm256_set1_ps(scale));
    int sure;
    const __m256i code =
        dynamic_codes_avx2(&t->call->maps.map[is_signed], y, moment, is_signed, &sure);
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

#define adamw8bit_run_fast_avx2 adamw8bit_run_fast_baseline

#define LOOP_TARGET     CPU_AVX2
#define LOOP_NAME(name) adamw8bit_##name##_avx2
#include "adamw8bit_loop.h"
#undef LOOP_TARGET
#undef LOOP_NAME

CPU_AVX512 HR_INLINE void adamw8bit_decode_avx512(const adamw8bit_call *call, const uint8_t *codes,
                                                  float absmax, int is_signed, float *x)
{
    for (int lane = 0; lane < LANES; lane += 16) {
        const __m128i code = _mm_loadu_si128((const __m128i *)(codes + lane));
        const __m512 values = dynamic_values_avx512(&call->vectors[is_signed], code, is_signed);
        _mm512_storeu_ps(x + lane, _mm512_mul_ps(values, _mm512_set1_ps(absmax)));
    }
}

/* Gives the lanes whose codes are not sure. */
CPU_AVX512 HR_INLINE uint32_t adamw8bit_encode_moment_avx512(const adamw8bit_tensor *t,
                                                             const float *x, __mmask16 there,
                                                             float scale, int is_signed,
                                                             uint8_t *codes)
{
    const __m512 moment = _mm512_loadu_ps(x);
    const __m512 y = _mm512_mul_ps(moment, _mm512_set1_ps(scale));
    __mmask16 sure;
    const __m512i code =
        dynamic_codes_avx512(&t->call->vectors[is_signed], y, moment, is_signed, &sure);
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

/* ---- AVX-512 with byte permutes: the plain rule, in float32 and bfloat16 ---------------------- */

/* The largest magnitude, of NaN too. */
static __attribute__((noinline)) uint32_t adamw8bit_largest_of(const float *x, int count)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t magnitude = adamw8bit_magnitude(x[i], 0);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

static __attribute__((noinline)) CPU_AVX512 void
adamw8bit_encode_again(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i, int count)
{
    adamw8bit_encode_avx512(t, p, i, count);
}

/* The fourth j of 64 elements. */
CPU_AVX512_VBMI_BF16 HR_INLINE __m512 adamw8bit_load_vbmi(const void *base, int j, hr_dtype dtype)
{
    if (dtype == HR_F32)
        return _mm512_loadu_ps((const float *)base + 16 * j);
    const __m256i halves = _mm256_loadu_si256((const __m256i *)base + j);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* hr_store() for 64 elements. Gives 0 if there may be NaN among them. What is rare is not a call:
 * across a call a compiler keeps no vector in a register. */
CPU_AVX512_VBMI_BF16 HR_INLINE int adamw8bit_store_vbmi(void *base, const __m512 x[4],
                                                        hr_dtype dtype)
{
    if (dtype == HR_F32) {
        const __mmask16 nan01 = _mm512_cmp_ps_mask(x[0], x[1], _CMP_UNORD_Q);
        const __mmask16 nan23 = _mm512_cmp_ps_mask(x[2], x[3], _CMP_UNORD_Q);
        for (int j = 0; j < 4; j++)
            _mm512_storeu_ps((float *)base + 16 * j, x[j]);
        if (__builtin_expect(_kortestz_mask16_u8(nan01, nan23), 1))
            return 1;
        for (int j = 0; j < 4; j++)
            _mm512_mask_storeu_ps((float *)base + 16 * j,
                                  _mm512_cmp_ps_mask(x[j], x[j], _CMP_UNORD_Q),
                                  _mm512_castsi512_ps(_mm512_set1_epi32(0x7FFFFFFF)));
        return 0;
    }
    __mmask16 special = 0; /* NaN of both kinds, and denormal, which the conversion takes for 0 */
    for (int j = 0; j < 4; j++)
        special = _kor_mask16(special, _mm512_fpclass_ps_mask(x[j], 0x01 | 0x80 | 0x20));
    for (int j = 0; j < 2; j++)
        _mm512_storeu_si512((__m512i *)base + j,
                            (__m512i)_mm512_cvtne2ps_pbh(x[2 * j + 1], x[2 * j]));
    if (__builtin_expect(_kortestz_mask16_u8(special, special), 1))
        return 1;
    for (int j = 0; j < 4; j++) { /* hr_to_bf16() */
        const __m512i bits = _mm512_castps_si512(x[j]), one = _mm512_set1_epi32(1);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
        const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        const __m512i number = _mm512_mask_mov_epi32(
            rounded, _mm512_cmp_ps_mask(x[j], x[j], _CMP_UNORD_Q), _mm512_set1_epi32(0x7FFF));
        _mm256_storeu_si256((__m256i *)base + j, _mm512_cvtepi32_epi16(number));
    }
    return 0;
}

/* What is the same for all elements, repeated once, and not for each vector. */
typedef struct adamw8bit_repeated {
    __m512 grad_factor, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias2, eps, keep, step_size;
    __m512 absmax_m, absmax_v; /* of the block */
    __m512 scale_m, scale_v;   /* of the block before */
} adamw8bit_repeated;

/* Elements to be updated, where their moments go, and the codes that are decoded beside. */
typedef struct adamw8bit_elements {
    void *param;
    const void *grad;
    float *m, *v;
    const uint8_t *exp_avg, *exp_avg_sq;
} adamw8bit_elements;

/* Ends what dynamic_encode_vbmi() began for 64 elements of a block. Gives whether it is sure. */
CPU_AVX512_VBMI_BF16 HR_INLINE int adamw8bit_encoded_vbmi(const adamw8bit_tensor *t,
                                                          const adamw8bit_pending *p, int i,
                                                          const dynamic_encoding *encoding_m,
                                                          const dynamic_encoding *encoding_v)
{
    const dynamic_bytes *const bytes = t->call->bytes;
    return dynamic_encoded_vbmi(encoding_m, &bytes[1], 1, t->exp_avg + p->begin + i) &
           dynamic_encoded_vbmi(encoding_v, &bytes[0], 0, t->exp_avg_sq + p->begin + i);
}

/* The values of 64 codes of both moments. */
typedef struct adamw8bit_values {
    __m512 m[4], v[4];
} adamw8bit_values;

CPU_AVX512_VBMI_BF16 HR_INLINE void adamw8bit_decode_vbmi(const adamw8bit_tensor *t,
                                                          const uint8_t *exp_avg,
                                                          const uint8_t *exp_avg_sq,
                                                          adamw8bit_values *values)
{
    const dynamic_bytes *const bytes = t->call->bytes;
    dynamic_decoding m, v;
    dynamic_decode_vbmi(&m, &bytes[1], exp_avg, 1);
    dynamic_decode_vbmi(&v, &bytes[0], exp_avg_sq, 0);
    for (int k = 0; k < 4; k++) {
        dynamic_decode_byte_vbmi(&m, &bytes[1], k, 1);
        dynamic_decode_byte_vbmi(&v, &bytes[0], k, 0);
    }
    dynamic_decoded_vbmi(&m, values->m);
    dynamic_decoded_vbmi(&v, values->v);
}

enum { ADAMW8BIT_NAN = 1, ADAMW8BIT_UNSURE = 2 };

/* Updates 64 elements as adamw8bit_update_avx512(), whose moments are decoded to `values`. The
 * divider is busy for a third of the time, so other work is put beside it, a piece for each vector:
 * the codes at exp_avg and exp_avg_sq, of elements that come next, are decoded to `values`, and
 * those of the block before are encoded from i on, unless that is NULL.
 *
 * The largest magnitudes pass over NaN. Gives ADAMW8BIT_NAN if there may be one, for where a moment
 * is NaN so is the parameter; and ADAMW8BIT_UNSURE if the codes may not be right. */

CPU_AVX512_VBMI_BF16 HR_INLINE int
adamw8bit_update_vbmi(const adamw8bit_tensor *t, const adamw8bit_repeated *c, adamw8bit_elements at,
                      hr_dtype param_dtype, hr_dtype grad_dtype, adamw8bit_values *values,
                      const adamw8bit_pending *before, int i, __m512 *largest_m, __m512 *largest_v)
{
    const dynamic_bytes *const bytes = t->call->bytes;
    __m512 params[4], exp_avgs[4], roots[4];
    dynamic_decoding next_m, next_v;
    dynamic_encoding encoding_m, encoding_v;
    dynamic_decode_vbmi(&next_m, &bytes[1], at.exp_avg, 1);
    dynamic_decode_vbmi(&next_v, &bytes[0], at.exp_avg_sq, 0);
    for (int j = 0; j < 5; j++) {
        if (j < 4) {
            const __m512 g = adamw8bit_load_vbmi(at.grad, j, grad_dtype) * c->grad_factor;
            const __m512 m = values->m[j] * c->absmax_m, v = values->v[j] * c->absmax_v;
            const __m512 exp_avg_sq = c->beta2 * v + c->one_minus_beta2 * (g * g);
            roots[j] = _mm512_sqrt_ps(exp_avg_sq);
            exp_avgs[j] = m + c->one_minus_beta1 * (g - m);
            _mm512_storeu_ps(at.m + 16 * j, exp_avgs[j]);
            _mm512_storeu_ps(at.v + 16 * j, exp_avg_sq);
            *largest_m = _mm512_range_ps(*largest_m, exp_avgs[j], 0xB); /* of the magnitudes */
            *largest_v = _mm512_max_ps(*largest_v, exp_avg_sq);
        }
        if (j > 0) { /* when the root is there */
            const __m512 denominator = roots[j - 1] * c->rsqrt_bias2 + c->eps;
            const __m512 x = adamw8bit_load_vbmi(at.param, j - 1, param_dtype);
            params[j - 1] = c->keep * x - c->step_size * (exp_avgs[j - 1] / denominator);
        }
        if (j < 4) {
            dynamic_decode_byte_vbmi(&next_m, &bytes[1], j, 1);
            dynamic_decode_byte_vbmi(&next_v, &bytes[0], j, 0);
        }
        if (before && j < 4) {
            dynamic_encode_vbmi(&encoding_m, &bytes[1], j, _mm512_loadu_ps(before->m + i + 16 * j),
                                c->scale_m, 1);
            dynamic_encode_vbmi(&encoding_v, &bytes[0], j, _mm512_loadu_ps(before->v + i + 16 * j),
                                c->scale_v, 0);
        }
    }
    dynamic_decoded_vbmi(&next_m, values->m);
    dynamic_decoded_vbmi(&next_v, values->v);
    int state = adamw8bit_store_vbmi(at.param, params, param_dtype) ? 0 : ADAMW8BIT_NAN;
    if (before && !adamw8bit_encoded_vbmi(t, before, i, &encoding_m, &encoding_v))
        state |= ADAMW8BIT_UNSURE;
    return state;
}

/* The elements of a block from i on, alone. */
static __attribute__((noinline)) CPU_AVX512_VBMI_BF16 void
adamw8bit_encode_rest(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i)
{
    const dynamic_bytes *const bytes = t->call->bytes;
    for (; p->vectors && p->count - i >= LANES; i += LANES) {
        dynamic_encoding encoding_m, encoding_v;
        for (int j = 0; j < 4; j++) {
            dynamic_encode_vbmi(&encoding_m, &bytes[1], j, _mm512_loadu_ps(p->m + i + 16 * j),
                                _mm512_set1_ps(p->scale_m.second), 1);
            dynamic_encode_vbmi(&encoding_v, &bytes[0], j, _mm512_loadu_ps(p->v + i + 16 * j),
                                _mm512_set1_ps(p->scale_v.second), 0);
        }
        if (!adamw8bit_encoded_vbmi(t, p, i, &encoding_m, &encoding_v))
            adamw8bit_encode_again(t, p, i, LANES);
    }
    for (; i < p->count; i += LANES)
        adamw8bit_encode_again(t, p, i, p->count - i < LANES ? p->count - i : LANES);
}

/* adamw8bit_run_avx512() for the plain rule. */
CPU_AVX512_VBMI_BF16 HR_INLINE void adamw8bit_run_vbmi(const adamw8bit_tensor *t, int64_t from,
                                                       int64_t to, hr_dtype param_dtype,
                                                       hr_dtype grad_dtype)
{
    const int block_size = t->call->args->config->block_size;
    const int param_size = param_dtype == HR_F32 ? 4 : 2, grad_size = grad_dtype == HR_F32 ? 4 : 2;
    adamw8bit_repeated c;
    c.grad_factor = _mm512_set1_ps(t->constants.grad_factor);
    c.one_minus_beta1 = _mm512_set1_ps(t->constants.one_minus_beta1);
    c.beta2 = _mm512_set1_ps(t->constants.beta2);
    c.one_minus_beta2 = _mm512_set1_ps(t->constants.one_minus_beta2);
    c.rsqrt_bias2 = _mm512_set1_ps(t->constants.rsqrt_bias2);
    c.eps = _mm512_set1_ps(t->constants.eps);
    c.keep = _mm512_set1_ps(t->constants.keep);
    c.step_size = _mm512_set1_ps(t->constants.step_size);
    adamw8bit_moments moments;
    adamw8bit_values values;
    if (to - from >= LANES)
        adamw8bit_decode_vbmi(t, t->exp_avg + from, t->exp_avg_sq + from, &values);
    adamw8bit_pending last = {0};
    int64_t block = from / block_size;
    for (int64_t begin = from; begin < to; begin += block_size, block++) {
        const int count = to - begin < block_size ? (int)(to - begin) : block_size;
        float *const m = block % 2 ? moments.m1 : moments.m0;
        float *const v = block % 2 ? moments.v1 : moments.v0;
        __m512 largest_m = _mm512_setzero_ps(), largest_v = _mm512_setzero_ps();
        c.absmax_m = _mm512_set1_ps(t->exp_avg_absmax[block]);
        c.absmax_v = _mm512_set1_ps(t->exp_avg_sq_absmax[block]);
        c.scale_m = _mm512_set1_ps(last.scale_m.second);
        c.scale_v = _mm512_set1_ps(last.scale_v.second);
        int state = 0, i = 0;
        uint32_t unsure = 0; /* a bit for each 64 elements of the block before */
        for (; count - i >= LANES; i += LANES) {
            cpu_prefetch(t->param, begin + i, LANES, to, param_dtype);
            cpu_prefetch(t->grad, begin + i, LANES, to, grad_dtype);
            cpu_prefetch(t->exp_avg, (begin + i) / 2, LANES / 2, to / 2, HR_BF16);
            cpu_prefetch(t->exp_avg_sq, (begin + i) / 2, LANES / 2, to / 2, HR_BF16);
            const int64_t next = to - begin - i >= 2 * LANES ? begin + i + LANES : begin + i;
            const adamw8bit_elements at = {(char *)t->param + (begin + i) * param_size,
                                           (const char *)t->grad + (begin + i) * grad_size,
                                           m + i,
                                           v + i,
                                           t->exp_avg + next,
                                           t->exp_avg_sq + next};
            int done;
            if (__builtin_expect(last.vectors, 1)) /* then it is whole */
                done = adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, &values, &last, i,
                                             &largest_m, &largest_v);
            else
                done = adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, &values, NULL, 0,
                                             &largest_m, &largest_v);
            state |= done;
            unsure |= (uint32_t)(done & ADAMW8BIT_UNSURE) << (i / LANES);
        }
        for (unsure /= ADAMW8BIT_UNSURE; __builtin_expect(unsure != 0, 0); unsure &= unsure - 1)
            adamw8bit_encode_again(t, &last, __builtin_ctz(unsure) * LANES, LANES);
        if (!last.vectors || i < last.count)
            adamw8bit_encode_rest(t, &last, last.vectors ? i : 0);
        if (i < count) {
            adamw8bit_few few;
            adamw8bit_pad(&few, t, begin + i, count - i, param_size, grad_size);
            adamw8bit_decode_vbmi(t, few.exp_avg, few.exp_avg_sq, &values);
            const adamw8bit_elements at = {few.param, few.grad,    m + i,
                                           v + i,     few.exp_avg, few.exp_avg_sq};
            state |= adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, &values, NULL, 0,
                                           &largest_m, &largest_v);
            memcpy((char *)t->param + (begin + i) * param_size, few.param,
                   (size_t)((count - i) * param_size));
        }
        const uint32_t magnitude_m = hr_bits(_mm512_reduce_max_ps(largest_m));
        const uint32_t magnitude_v = hr_bits(_mm512_reduce_max_ps(largest_v));
        last =
            adamw8bit_close(t, begin, count, block, m, v,
                            state & ADAMW8BIT_NAN ? adamw8bit_largest_of(m, count) : magnitude_m,
                            state & ADAMW8BIT_NAN ? adamw8bit_largest_of(v, count) : magnitude_v);
    }
    adamw8bit_encode_rest(t, &last, 0);
}

/* Gives whether it has run. */
CPU_AVX512_VBMI_BF16 static int adamw8bit_run_fast_avx512(const adamw8bit_tensor *t, int64_t from,
                                                          int64_t to, hr_dtype param_dtype,
                                                          hr_dtype grad_dtype)
{
    if (!t->call->fast || param_dtype == HR_F16 || grad_dtype == HR_F16)
        return 0;
    if (param_dtype == HR_F32 && grad_dtype == HR_F32)
        adamw8bit_run_vbmi(t, from, to, HR_F32, HR_F32);
    else if (param_dtype == HR_F32)
        adamw8bit_run_vbmi(t, from, to, HR_F32, HR_BF16);
    else if (grad_dtype == HR_F32)
        adamw8bit_run_vbmi(t, from, to, HR_BF16, HR_F32);
    else
        adamw8bit_run_vbmi(t, from, to, HR_BF16, HR_BF16);
    return 1;
}

#define LOOP_TARGET     CPU_AVX512
#define LOOP_NAME(name) adamw8bit_##name##_avx512
#include "adamw8bit_loop.h"
#undef LOOP_TARGET
#undef LOOP_NAME

static const hr_range_fn adamw8bit_range_variants[] = {
    adamw8bit_range_baseline, adamw8bit_range_avx2, adamw8bit_range_avx512};
#else
static const hr_range_fn adamw8bit_range_variants[] = {
    adamw8bit_range_baseline, adamw8bit_range_baseline, adamw8bit_range_baseline};
#endif

hr_status adamw8bit_cpu(const adamw8bit_args *args)
{
    const hr_adamw8bit_config *const config = args->config;
    if (config->adamw.found_inf && *config->adamw.found_inf != 0.0f)
        return HR_OK;
    adamw8bit_call call;
    call.args = args;
    const hr_adamw_config *const adamw = &config->adamw;
    const int plain = !adamw->skip_nonfinite && (adamw->decoupled || adamw->weight_decay == 0.0);
    call.rule = config->bnb_exact ? ADAMW8BIT_BNB : plain ? ADAMW8BIT_PLAIN : ADAMW8BIT_ANY;
    adamw8bit_maps_fill(&call.maps, config->bnb_exact);
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        dynamic_vectors_fill(&call.vectors[is_signed], &call.maps.map[is_signed], is_signed);
        dynamic_bytes_fill(&call.bytes[is_signed], &call.maps.map[is_signed], is_signed);
    }
    call.fast = call.rule == ADAMW8BIT_PLAIN && !config->seeds &&
                (float)(1.0 - adamw->beta1) < 0.5f && hr_cpu_has_vbmi_and_bf16();
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, CPU_BEST(adamw8bit_range), &call);
    for (int64_t k = 0; args->steps && k < args->steps->count; k++) {
        void *const step = args->steps->data[k];
        const hr_dtype dtype = args->steps->dtype[k];
        hr_store_scalar(step, hr_load_scalar(step, dtype) + 1.0, dtype);
    }
    return HR_OK;
}
