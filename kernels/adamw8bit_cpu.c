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
    const float *m, *v;
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

/* Stores the absmaxes of a block. */
HR_INLINE adamw8bit_pending adamw8bit_close(const adamw8bit_tensor *t, int64_t begin, int count,
                                            int64_t block, const float *m, const float *v,
                                            const uint32_t *largest_m, const uint32_t *largest_v)
{
    const int bnb = t->call->rule == ADAMW8BIT_BNB;
    uint32_t magnitude_m = 0, magnitude_v = 0;
    for (int lane = 0; lane < LANES; lane++) {
        magnitude_m = largest_m[lane] > magnitude_m ? largest_m[lane] : magnitude_m;
        magnitude_v = largest_v[lane] > magnitude_v ? largest_v[lane] : magnitude_v;
    }
    adamw8bit_pending pending;
    pending.begin = begin;
    pending.count = count;
    pending.m = m;
    pending.v = v;
    pending.absmax_m = adamw8bit_absmax(magnitude_m, bnb);
    pending.absmax_v = adamw8bit_absmax(magnitude_v, bnb);
    pending.scale_m = dynamic_scale_of(pending.absmax_m);
    pending.scale_v = dynamic_scale_of(pending.absmax_v);
    pending.vectors = !bnb && !t->call->args->config->seeds && pending.scale_m.first == 1.0f &&
                      pending.scale_v.first == 1.0f;
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
    for (int is_signed = 0; is_signed < 2; is_signed++)
        dynamic_vectors_fill(&call.vectors[is_signed], &call.maps.map[is_signed], is_signed);
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, CPU_BEST(adamw8bit_range), &call);
    for (int64_t k = 0; args->steps && k < args->steps->count; k++) {
        void *const step = args->steps->data[k];
        const hr_dtype dtype = args->steps->dtype[k];
        hr_store_scalar(step, hr_load_scalar(step, dtype) + 1.0, dtype);
    }
    return HR_OK;
}
