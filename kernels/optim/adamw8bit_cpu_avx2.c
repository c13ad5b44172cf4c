/*
 * adamw8bit_cpu_avx2.c: a loop of 8-bit Adam of its own for AVX2. It takes the rule ADAMW8BIT_PLAIN
 * with f32 and bf16; everything else goes to the loop of adamw8bit_loop.h, whose moments it encodes
 * too.
 *
 * What bounds it is the number of instructions, and next to that the loads and stores, of which a core
 * starts four per cycle, or two of vectors. So values are decoded by instructions on integers while
 * others compute on vectors, the next block is updated while one is encoded, and what holds of one
 * vector in a thousand is looked for in many at once.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/adamw8bit_cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
/* ---- Encoding -------------------------------------------------------------------------------- */

/* Encodes those of LANES elements whose codes are not sure, which it finds again: to note them for all
 * elements would cost more. */
static __attribute__((noinline)) CPU_AVX2 void
adamw8bit_encode_unsure(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i)
{
    const dynamic_lines *const lines = t->call->tables->lines;
    const float factor_m = p->scale_m.second * dynamic_factor(1);
    const float factor_v = p->scale_v.second * dynamic_factor(0);
    for (const int end = i + LANES; i < end; i += 8) {
        const __m256 m = _mm256_loadu_ps(p->m + i) * _mm256_set1_ps(factor_m);
        const __m256 v = _mm256_loadu_ps(p->v + i) * _mm256_set1_ps(factor_v);
        const __m256i least = _mm256_min_epu16(dynamic_distances_avx2(&lines[1], m, 1),
                                               dynamic_distances_avx2(&lines[0], v, 0));
        const __m256i unsure = dynamic_unsure_avx2(least);
        unsigned lanes = (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(unsure));
        for (; lanes; lanes &= lanes - 1)
            adamw8bit_encode_each(t, p, i + __builtin_ctz(lanes), 1);
    }
}

/* What is encoded while the next block is updated. */
typedef struct adamw8bit_encoding {
    const adamw8bit_tensor *t;
    const adamw8bit_pending *p;
    const dynamic_lines *lines;
    const float *m, *v;
    uint8_t *exp_avg, *exp_avg_sq;
    __m256 factor_m, factor_v;
} adamw8bit_encoding;

CPU_AVX2 HR_INLINE adamw8bit_encoding adamw8bit_encoding_of(const adamw8bit_tensor *t,
                                                            const adamw8bit_pending *p)
{
    return (adamw8bit_encoding){t,
                                p,
                                t->call->tables->lines,
                                p->m,
                                p->v,
                                t->exp_avg + p->begin,
                                t->exp_avg_sq + p->begin,
                                _mm256_set1_ps(p->scale_m.second * dynamic_factor(1)),
                                _mm256_set1_ps(p->scale_v.second * dynamic_factor(0))};
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_m(const adamw8bit_encoding *e, int i, __m256i *least)
{
    dynamic_encode32_avx2(&e->lines[1], e->m + i, e->factor_m, 1, e->exp_avg + i, least);
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_v(const adamw8bit_encoding *e, int i, __m256i *least)
{
    dynamic_encode32_avx2(&e->lines[0], e->v + i, e->factor_v, 0, e->exp_avg_sq + i, least);
}

/* Ends the encoding of LANES elements from i on. */
CPU_AVX2 HR_INLINE void adamw8bit_make_sure(const adamw8bit_encoding *e, int i, __m256i least)
{
    const __m256i unsure = dynamic_unsure_avx2(least);
    if (__builtin_expect(!_mm256_testz_si256(unsure, unsure), 0))
        adamw8bit_encode_unsure(e->t, e->p, i);
}

CPU_AVX2 HR_INLINE void adamw8bit_encode_avx2(const adamw8bit_tensor *t, const adamw8bit_pending *p,
                                              int i, int count)
{
    if (__builtin_expect(!p->vectors || count < LANES, 0)) {
        adamw8bit_encode_each(t, p, i, count);
        return;
    }
    const adamw8bit_encoding e = adamw8bit_encoding_of(t, p);
    __m256i least = _mm256_set1_epi32(-1);
    for (int k = i; k < i + LANES; k += 32) {
        adamw8bit_encode_m(&e, k, &least);
        adamw8bit_encode_v(&e, k, &least);
    }
    adamw8bit_make_sure(&e, i, least);
}

/* ---- Decoding and updating ------------------------------------------------------------------- */

CPU_AVX2 HR_INLINE void adamw8bit_decode_avx2(const adamw8bit_call *call, const uint8_t *codes,
                                              float absmax, int is_signed, float *x)
{
    const float *const values = call->tables->maps.map[is_signed].values;
    for (int lane = 0; lane < LANES; lane++)
        x[lane] = values[codes[lane]] * absmax;
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
        _mm256_storeu_si256((__m256i *)((uint16_t *)base + i), bf16_in_row_avx2(x[0], x[1]));
    }
}

/* The constants of a step, and the scales of a block. */
typedef struct adamw8bit_repeated {
    const dynamic_lines *lines;
    __m256 grad_factor, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias2, eps, keep, step_size;
    __m256 absmax_m, absmax_v;
} adamw8bit_repeated;

/* The decoded moments of LANES elements, without their scales. */
typedef struct adamw8bit_decoded {
    _Alignas(32) float m[LANES], v[LANES];
} adamw8bit_decoded;

/* Where LANES elements lie. */
typedef struct adamw8bit_elements {
    void *param;
    const void *grad;
    float *m, *v;                   /* new moments */
    adamw8bit_decoded *decoded;     /* their old ones, and then those of the next elements, */
    const uint8_t *next_m, *next_v; /* which have these codes */
} adamw8bit_elements;

/* Updates the elements [i, i + 16) of `at`, decodes the next ones, and raises the largest magnitudes. */
CPU_AVX2 HR_INLINE void adamw8bit_update16(const adamw8bit_repeated *c, adamw8bit_elements at,
                                           int i, __m256i *largest_m, __m256i *largest_v,
                                           hr_dtype param_dtype, hr_dtype grad_dtype)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256 params[2];
#pragma GCC unroll 2
    for (int k = 0; k < 2; k++) {
        const int j = i + 8 * k;
        const __m256 g = adamw8bit_load_avx2(at.grad, j, grad_dtype) * c->grad_factor;
        const __m256 old_m = _mm256_load_ps(at.decoded->m + j) * c->absmax_m;
        const __m256 old_v = _mm256_load_ps(at.decoded->v + j) * c->absmax_v;
        const __m256 new_v = c->beta2 * old_v + c->one_minus_beta2 * (g * g);
        const __m256 new_m = old_m + c->one_minus_beta1 * (g - old_m);
        const __m256 denominator = _mm256_sqrt_ps(new_v) * c->rsqrt_bias2 + c->eps;
        /* Here the instructions on integers run while the roots do. */
        dynamic_decode_pairs(&c->lines[1], at.next_m + j, 8, at.decoded->m + j);
        dynamic_decode_pairs(&c->lines[0], at.next_v + j, 8, at.decoded->v + j);
        params[k] = c->keep * adamw8bit_load_avx2(at.param, j, param_dtype) -
                    c->step_size * (new_m / denominator);
        _mm256_storeu_ps(at.m + j, new_m);
        _mm256_storeu_ps(at.v + j, new_v);
        *largest_m =
            _mm256_max_epu32(*largest_m, _mm256_and_si256(_mm256_castps_si256(new_m), magnitude));
        *largest_v =
            _mm256_max_epu32(*largest_v, _mm256_and_si256(_mm256_castps_si256(new_v), magnitude));
    }
    adamw8bit_store_avx2(at.param, i, params, param_dtype);
}

/* Updates LANES elements. Between them, encodes those of e from `encoded` on, if it is not NULL. */
CPU_AVX2 HR_INLINE void adamw8bit_update_plain(const adamw8bit_repeated *c, adamw8bit_elements at,
                                               const adamw8bit_encoding *e, int encoded,
                                               __m256i *largest_m, __m256i *largest_v,
                                               hr_dtype param_dtype, hr_dtype grad_dtype)
{
    __m256i least = _mm256_set1_epi32(-1);
#pragma GCC unroll 2
    for (int i = 0; i < LANES; i += 32) {
        adamw8bit_update16(c, at, i, largest_m, largest_v, param_dtype, grad_dtype);
        if (e)
            adamw8bit_encode_m(e, encoded + i, &least);
        adamw8bit_update16(c, at, i + 16, largest_m, largest_v, param_dtype, grad_dtype);
        if (e)
            adamw8bit_encode_v(e, encoded + i, &least);
    }
    if (e)
        adamw8bit_make_sure(e, encoded, least);
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

/* The elements from i on of a run that ends at `to`, but for their new moments. */
HR_INLINE adamw8bit_elements adamw8bit_elements_at(const adamw8bit_tensor *t, int64_t i, int64_t to,
                                                   adamw8bit_decoded *decoded, int ahead,
                                                   hr_dtype param_dtype, hr_dtype grad_dtype)
{
    const int param_size = hr_element_size(param_dtype), grad_size = hr_element_size(grad_dtype);
    const int64_t next = to - i >= 2 * LANES ? i + LANES : i;
    adamw8bit_elements at;
    at.param = (char *)t->param + i * param_size;
    at.grad = (const char *)t->grad + i * grad_size;
    at.decoded = decoded;
    at.next_m = t->exp_avg + next;
    at.next_v = t->exp_avg_sq + next;
    if (ahead) {
        adamw8bit_prefetch(at.param, param_size);
        adamw8bit_prefetch(at.grad, grad_size);
        adamw8bit_prefetch(at.next_m, 1);
        adamw8bit_prefetch(at.next_v, 1);
    }
    return at;
}

CPU_AVX2 HR_INLINE void adamw8bit_blocks_plain(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                               hr_dtype param_dtype, hr_dtype grad_dtype)
{
    const int block_size = t->call->args->config->block_size;
    const int param_size = hr_element_size(param_dtype), grad_size = hr_element_size(grad_dtype);
    adamw8bit_repeated c;
    c.lines = t->call->tables->lines;
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
    adamw8bit_decoded decoded;
    if (to - from >= LANES) {
        dynamic_decode_pairs(&c.lines[1], t->exp_avg + from, LANES, decoded.m);
        dynamic_decode_pairs(&c.lines[0], t->exp_avg_sq + from, LANES, decoded.v);
    }
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
        const adamw8bit_encoding encoding = adamw8bit_encoding_of(t, &last);
        const int both = last.vectors ? (count < last.count ? count : last.count) / LANES : 0;
        int i = 0;
        for (; i < both * LANES; i += LANES) {
            adamw8bit_elements at =
                adamw8bit_elements_at(t, begin + i, to, &decoded, ahead, param_dtype, grad_dtype);
            at.m = m + i;
            at.v = v + i;
            adamw8bit_update_plain(&c, at, &encoding, i, &largest_m, &largest_v, param_dtype,
                                   grad_dtype);
        }
        for (int rest = i; rest < last.count; rest += LANES)
            adamw8bit_encode_avx2(t, &last, rest, LANES);
        for (; i < count; i += LANES) {
            adamw8bit_elements at =
                adamw8bit_elements_at(t, begin + i, to, &decoded, ahead, param_dtype, grad_dtype);
            at.m = m + i;
            at.v = v + i;
            adamw8bit_few few;
            void *const param = at.param;
            if (__builtin_expect(count - i < LANES, 0)) {
                adamw8bit_pad(&few, t, begin + i, count - i, param_size, grad_size);
                dynamic_decode_pairs(&c.lines[1], few.exp_avg, LANES, decoded.m);
                dynamic_decode_pairs(&c.lines[0], few.exp_avg_sq, LANES, decoded.v);
                at.param = few.param;
                at.grad = few.grad;
                at.next_m = few.exp_avg;
                at.next_v = few.exp_avg_sq;
            }
            adamw8bit_update_plain(&c, at, NULL, 0, &largest_m, &largest_v, param_dtype,
                                   grad_dtype);
            if (__builtin_expect(count - i < LANES, 0))
                memcpy(param, few.param, (size_t)((count - i) * param_size));
        }
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
