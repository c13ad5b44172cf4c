/*
 * adamw8bit_cpu_vbmi.c: a loop of 8-bit Adam of its own for AVX-512 with byte permutes. It takes
 * the rule ADAMW8BIT_PLAIN with f32 and bf16, and bf16 weights of the modes that do not round at
 * random. Everything else goes to the AVX-512 loop.
 *
 * The divider is busy for half of the time, so all other work overlaps with it: while 64 elements
 * are updated, the moments of the next 64 are decoded, and 64 elements of the block before the
 * previous one are encoded. Not of the previous one, because its scale is not known in time.
 */
#include "kernels/optim/adamw8bit_cpu.h"
#include "kernels/weights/weights_cpu_vbmi.h"

#if defined(__x86_64__) && defined(__GNUC__)
/* The order of the elements in vectors. bf16 is read and written faster by even and odd
 * elements. */
HR_INLINE cpu_order adamw8bit_order(hr_dtype param_dtype, hr_dtype grad_dtype, hr_weights_mode mode)
{
    const int halves = param_dtype == HR_BF16 && grad_dtype == HR_BF16;
    return halves && mode != HR_WEIGHTS_MASTER ? CPU_EVEN_ODD : CPU_IN_ROW;
}

/* ---- 64 elements ----------------------------------------------------------------------------- */

/* Constants, broadcast once instead of for each vector. */
typedef struct adamw8bit_repeated {
    __m512 grad_factor, one_minus_beta1, beta2, one_minus_beta2, rsqrt_bias2, eps, keep, step_size;
    __m512 absmax_m, absmax_v; /* of the block */
    __m512 scale_m, scale_v;   /* of the block that is encoded */
} adamw8bit_repeated;

/* The addresses of 64 elements: weights and gradients, where the new moments go, and the codes of
 * the next elements, which are decoded meanwhile. */
typedef struct adamw8bit_elements {
    weights_address weights;
    const void *grad;
    float *m, *v;
    const uint8_t *exp_avg, *exp_avg_sq;
} adamw8bit_elements;

/* 64 decoded values of each moment, without their scales. */
typedef struct adamw8bit_values {
    __m512 m[4], v[4];
} adamw8bit_values;

/* Which codes of a block are not sure: for each 64 elements a bit by vector and lane. */
typedef struct adamw8bit_unsure {
    uint64_t m[ADAMW8BIT_MAX_BLOCK / LANES], v[ADAMW8BIT_MAX_BLOCK / LANES], any;
} adamw8bit_unsure;

/* Decodes 64 codes of each moment. */
CPU_AVX512_VBMI_BF16 HR_INLINE void adamw8bit_decode_vbmi(const adamw8bit_tables *tables,
                                                          const uint8_t *exp_avg,
                                                          const uint8_t *exp_avg_sq,
                                                          cpu_order order, adamw8bit_values *values)
{
    dynamic_decoding m, v;
    dynamic_decode_vbmi(&m, &tables->bytes[1], exp_avg, 1, order);
    dynamic_decode_vbmi(&v, &tables->bytes[0], exp_avg_sq, 0, order);
    for (int k = 0; k < 4; k++) {
        dynamic_decode_byte_vbmi(&m, &tables->bytes[1], k, 1);
        dynamic_decode_byte_vbmi(&v, &tables->bytes[0], k, 0);
    }
    dynamic_decoded_vbmi(&m, values->m);
    dynamic_decoded_vbmi(&v, values->v);
}

/* Updates 64 elements, whose decoded moments are in `values`. Meanwhile, a part for each vector,
 * decodes the codes at exp_avg and exp_avg_sq, of the elements that come next, to `values`, and
 * encodes 64 elements of the block `before` from i on, unless that is NULL, and notes which of
 * these codes are not sure.
 *
 * The largest magnitudes leave out NaNs. Returns 0 if a moment may be NaN, else 3: where a moment
 * is NaN, so is the parameter, and its store sees that. */
CPU_AVX512_VBMI_BF16 HR_INLINE int
adamw8bit_update_vbmi(const adamw8bit_tensor *t, const adamw8bit_repeated *c, adamw8bit_elements at,
                      hr_dtype param_dtype, hr_dtype grad_dtype, hr_weights_mode mode,
                      adamw8bit_values *values, const adamw8bit_pending *before, int i,
                      adamw8bit_unsure *unsure, __m512 *largest_m, __m512 *largest_v)
{
    const adamw8bit_tables *const tables = t->call->tables;
    const cpu_order order = adamw8bit_order(param_dtype, grad_dtype, mode);
    __m512 grads[2], old[2], params[2], exp_avgs[4], roots[4];
    __m512i codes_m = _mm512_setzero_si512(), codes_v = _mm512_setzero_si512();
    uint64_t unsure_m = 0, unsure_v = 0;
    dynamic_decoding next_m, next_v;
    int no_nan = 3;
    dynamic_decode_vbmi(&next_m, &tables->bytes[1], at.exp_avg, 1, order);
    dynamic_decode_vbmi(&next_v, &tables->bytes[0], at.exp_avg_sq, 0, order);
#pragma GCC unroll 5
    for (int k = 0; k < 5; k++) {
        if (k < 4) {
            if (k % 2 == 0)
                cpu_load_vbmi(at.grad, k, grad_dtype, order, grads);
            const __m512 g = grads[k % 2] * c->grad_factor;
            const __m512 m = values->m[k] * c->absmax_m, v = values->v[k] * c->absmax_v;
            const __m512 exp_avg_sq = c->beta2 * v + c->one_minus_beta2 * (g * g);
            roots[k] = _mm512_sqrt_ps(exp_avg_sq);
            exp_avgs[k] = m + c->one_minus_beta1 * (g - m);
            _mm512_storeu_ps(at.m + 16 * k, exp_avgs[k]);
            _mm512_storeu_ps(at.v + 16 * k, exp_avg_sq);
            *largest_m = _mm512_range_ps(*largest_m, exp_avgs[k], 0xB); /* of the magnitudes */
            *largest_v = _mm512_max_ps(*largest_v, exp_avg_sq);
        }
        if (k > 0) { /* one vector later, when the square root is ready */
            const __m512 denominator = roots[k - 1] * c->rsqrt_bias2 + c->eps;
            if (k % 2 == 1)
                weights_join_vbmi(at.weights, k - 1, param_dtype, mode, order, old);
            params[(k - 1) % 2] =
                c->keep * old[(k - 1) % 2] - c->step_size * (exp_avgs[k - 1] / denominator);
            if (k % 2 == 0)
                no_nan &= weights_split_vbmi(at.weights, k - 2, params, param_dtype, mode, order);
        }
        if (k < 4) {
            dynamic_decode_byte_vbmi(&next_m, &tables->bytes[1], k, 1);
            dynamic_decode_byte_vbmi(&next_v, &tables->bytes[0], k, 0);
        }
        if (before && k < 4) {
            codes_m =
                dynamic_encode_vbmi(codes_m, &unsure_m, &tables->bytes[1], &tables->vectors[1], k,
                                    _mm512_loadu_ps(before->m + i + 16 * k), c->scale_m, 1, order);
            codes_v =
                dynamic_encode_vbmi(codes_v, &unsure_v, &tables->bytes[0], &tables->vectors[0], k,
                                    _mm512_loadu_ps(before->v + i + 16 * k), c->scale_v, 0, order);
        }
    }
    dynamic_decoded_vbmi(&next_m, values->m);
    dynamic_decoded_vbmi(&next_v, values->v);
    if (before) {
        const int64_t first = before->begin + i;
        _mm512_storeu_si512(t->exp_avg + first, codes_m);
        _mm512_storeu_si512(t->exp_avg_sq + first, codes_v);
        unsure->m[i / LANES] = unsure_m;
        unsure->v[i / LANES] = unsure_v;
        unsure->any |= unsure_m | unsure_v;
    }
    return no_nan;
}

/* ---- Blocks ---------------------------------------------------------------------------------- */

/* The largest magnitude, where a NaN counts as larger than any number. */
static __attribute__((noinline)) uint32_t adamw8bit_largest_of(const float *x, int count)
{
    uint32_t largest = 0;
    for (int i = 0; i < count; i++) {
        const uint32_t magnitude = quant_magnitude(x[i], 0);
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* Moves 64 elements from `order` to the order in memory. */
static void adamw8bit_order_in_row(float *x, cpu_order order)
{
    float in_row[64];
    for (int k = 0; k < 4; k++)
        for (int lane = 0; lane < 16; lane++)
            in_row[cpu_element(order, k, lane)] = x[16 * k + lane];
    memcpy(x, in_row, sizeof in_row);
}

/* Encodes those of 64 elements of a block, from i on, whose codes are not sure. */
static void adamw8bit_encode_unsure(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i,
                                    uint64_t unsure_m, uint64_t unsure_v, cpu_order order)
{
    const quant_maps *const maps = &t->call->tables->maps;
    for (int is_signed = 0; is_signed < 2; is_signed++) {
        const float *const x = (is_signed ? p->m : p->v) + i;
        uint8_t *const codes = (is_signed ? t->exp_avg : t->exp_avg_sq) + p->begin + i;
        for (uint64_t rest = is_signed ? unsure_m : unsure_v; rest; rest &= rest - 1) {
            const int at = __builtin_ctzll(rest), element = cpu_element(order, at / 16, at % 16);
            if (i + element < p->count)
                codes[element] =
                    quant_encode(maps, x[at], is_signed ? p->scale_m : p->scale_v, is_signed);
        }
    }
}

static __attribute__((noinline)) void
adamw8bit_encode_all_unsure(const adamw8bit_tensor *t, const adamw8bit_pending *p, int count,
                            const adamw8bit_unsure *unsure, cpu_order order)
{
    for (int i = 0; i < count; i += LANES)
        adamw8bit_encode_unsure(t, p, i, unsure->m[i / LANES], unsure->v[i / LANES], order);
}

/* Encodes the elements of a block from i on, without an update to overlap with. */
static __attribute__((noinline)) CPU_AVX512_VBMI_BF16 void
adamw8bit_encode_rest(const adamw8bit_tensor *t, const adamw8bit_pending *p, int i, cpu_order order)
{
    const adamw8bit_tables *const tables = t->call->tables;
    for (; i < p->count; i += LANES) {
        if (!p->vectors) {
            adamw8bit_order_in_row(p->m + i, order);
            adamw8bit_order_in_row(p->v + i, order);
            adamw8bit_encode_each(t, p, i, p->count - i < LANES ? p->count - i : LANES);
            continue;
        }
        __m512i codes_m = _mm512_setzero_si512(), codes_v = _mm512_setzero_si512();
        uint64_t unsure_m = 0, unsure_v = 0;
        for (int k = 0; k < 4; k++) {
            codes_m = dynamic_encode_vbmi(
                codes_m, &unsure_m, &tables->bytes[1], &tables->vectors[1], k,
                _mm512_loadu_ps(p->m + i + 16 * k), _mm512_set1_ps(p->scale_m.second), 1, order);
            codes_v = dynamic_encode_vbmi(
                codes_v, &unsure_v, &tables->bytes[0], &tables->vectors[0], k,
                _mm512_loadu_ps(p->v + i + 16 * k), _mm512_set1_ps(p->scale_v.second), 0, order);
        }
        uint8_t few[2][LANES];
        const int whole = p->count - i >= LANES;
        uint8_t *const exp_avg = t->exp_avg + p->begin + i;
        uint8_t *const exp_avg_sq = t->exp_avg_sq + p->begin + i;
        _mm512_storeu_si512(whole ? exp_avg : few[1], codes_m);
        _mm512_storeu_si512(whole ? exp_avg_sq : few[0], codes_v);
        if (!whole) {
            memcpy(exp_avg, few[1], (size_t)(p->count - i));
            memcpy(exp_avg_sq, few[0], (size_t)(p->count - i));
        }
        adamw8bit_encode_unsure(t, p, i, unsure_m, unsure_v, order);
    }
}

/* Prefetches 64 elements ADAMW8BIT_AHEAD bytes ahead, as cpu_prefetch() does. */
#define ADAMW8BIT_AHEAD 2048
HR_INLINE void adamw8bit_prefetch(const void *base, int64_t i, int size)
{
    for (int byte = 0; byte < 64 * size; byte += 64)
        __builtin_prefetch((const char *)base + i * size + ADAMW8BIT_AHEAD + byte, 1);
}

/* The moments of three blocks: one that is updated, one that waits, and one that is encoded. A load
 * waits for an earlier store to an address that is equal modulo 4096. With the gap `apart`, the
 * moments that are encoded lie 1344 or 1408 bytes before those that are stored, modulo 2048. */
typedef struct adamw8bit_ring {
    _Alignas(64) struct {
        float m[ADAMW8BIT_MAX_BLOCK], v[ADAMW8BIT_MAX_BLOCK], apart[704 / 4];
    } blocks[3];
} adamw8bit_ring;

/* adamw8bit_close() for a block with a NaN, or with scales that are large, small or infinite. */
static __attribute__((noinline)) void adamw8bit_close_unusual(const adamw8bit_tensor *t,
                                                              adamw8bit_pending *p, int64_t block,
                                                              const float largest[2], int no_nan)
{
    const int count = (int)cpu_round_up(p->count, LANES);
    *p = adamw8bit_close(t, p->begin, p->count, block, p->m, p->v,
                         no_nan ? hr_bits(largest[1]) : adamw8bit_largest_of(p->m, count),
                         no_nan ? hr_bits(largest[0]) : adamw8bit_largest_of(p->v, count));
}

/* Ends the update of a block: stores its absmaxes and fills *p for encoding. */
CPU_AVX512_VBMI_BF16 HR_INLINE void adamw8bit_close_vbmi(const adamw8bit_tensor *t,
                                                         adamw8bit_pending *p, int64_t block,
                                                         __m512 largest_m, __m512 largest_v,
                                                         int no_nan)
{
    /* Lane 0 holds the absmax of exp_avg_sq, lane 1 that of exp_avg. */
    const __m256 m8 =
        _mm256_max_ps(_mm512_castps512_ps256(largest_m), _mm512_extractf32x8_ps(largest_m, 1));
    const __m256 v8 =
        _mm256_max_ps(_mm512_castps512_ps256(largest_v), _mm512_extractf32x8_ps(largest_v, 1));
    const __m256 both8 = _mm256_max_ps(_mm256_unpacklo_ps(v8, m8), _mm256_unpackhi_ps(v8, m8));
    const __m128 both4 = _mm_max_ps(_mm256_castps256_ps128(both8), _mm256_extractf128_ps(both8, 1));
    const __m128 largest = _mm_max_ps(both4, _mm_movehl_ps(both4, both4));
    /* The first factor of dynamic_scale_of() is then 1. */
    const __mmask8 usual =
        _mm_mask_cmp_ps_mask(_mm_cmp_ps_mask(largest, _mm_set1_ps(0x1p-64f), _CMP_GE_OQ), largest,
                             _mm_set1_ps(0x1p64f), _CMP_LE_OQ);
    if (__builtin_expect((usual & no_nan) != 3, 0)) {
        float lanes[4];
        _mm_storeu_ps(lanes, largest);
        adamw8bit_close_unusual(t, p, block, lanes, no_nan);
        return;
    }
    const __m128 scale = _mm_div_ps(_mm_set1_ps(1.0f), largest);
    p->scale_v.first = p->scale_m.first = 1.0f;
    p->scale_v.second = _mm_cvtss_f32(scale);
    p->scale_m.second = _mm_cvtss_f32(_mm_movehdup_ps(scale));
    p->absmax_v = t->exp_avg_sq_absmax[block] = _mm_cvtss_f32(largest);
    p->absmax_m = t->exp_avg_absmax[block] = _mm_cvtss_f32(_mm_movehdup_ps(largest));
    p->vectors = p->overlaps = 1;
}

CPU_AVX512_VBMI_BF16 HR_INLINE void adamw8bit_blocks_vbmi(const adamw8bit_tensor *t, void *residual,
                                                          int64_t from, int64_t to,
                                                          hr_dtype param_dtype, hr_dtype grad_dtype,
                                                          hr_weights_mode mode)
{
    const int block_size = t->call->args->config->block_size;
    const int param_size = hr_element_size(param_dtype), grad_size = hr_element_size(grad_dtype);
    const int residual_size = weights_residual_size(mode, param_dtype);
    const adamw8bit_tables *const tables = t->call->tables;
    const cpu_order order = adamw8bit_order(param_dtype, grad_dtype, mode);
    adamw8bit_repeated c;
    c.grad_factor = _mm512_set1_ps(t->constants.grad_factor);
    c.one_minus_beta1 = _mm512_set1_ps(t->constants.one_minus_beta1);
    c.beta2 = _mm512_set1_ps(t->constants.beta2);
    c.one_minus_beta2 = _mm512_set1_ps(t->constants.one_minus_beta2);
    c.rsqrt_bias2 = _mm512_set1_ps(t->constants.rsqrt_bias2);
    c.eps = _mm512_set1_ps(t->constants.eps);
    c.keep = _mm512_set1_ps(t->constants.keep);
    c.step_size = _mm512_set1_ps(t->constants.step_size);
    adamw8bit_ring ring;
    adamw8bit_values values = {0};
    if (to - from >= LANES)
        adamw8bit_decode_vbmi(tables, t->exp_avg + from, t->exp_avg_sq + from, order, &values);
    adamw8bit_pending pending[3] = {{0}, {0}, {0}};
    int turn = 0; /* the place of this block in the ring; the previous block has turn - 1 */
    int64_t block = from / block_size;
    for (int64_t begin = from; begin < to; begin += block_size, block++) {
        const int count = to - begin < block_size ? (int)(to - begin) : block_size;
        adamw8bit_pending *const before = &pending[turn == 2 ? 0 : turn + 1];
        float *const m = ring.blocks[turn].m, *const v = ring.blocks[turn].v;
        const float absmax_m = t->exp_avg_absmax[block], absmax_v = t->exp_avg_sq_absmax[block];
        __m512 largest_m = _mm512_setzero_ps(), largest_v = _mm512_setzero_ps();
        c.absmax_m = _mm512_set1_ps(absmax_m);
        c.absmax_v = _mm512_set1_ps(absmax_v);
        c.scale_m = _mm512_set1_ps(before->scale_m.second);
        c.scale_v = _mm512_set1_ps(before->scale_v.second);
        const int overlaps = before->overlaps;
        /* The bound of cpu_prefetch(), checked once per block. */
        const int ahead = to - begin > block_size + ADAMW8BIT_AHEAD;
        adamw8bit_unsure unsure;
        unsure.any = 0;
        int no_nan = 3, i = 0;
        for (; count - i >= LANES; i += LANES) {
            if (ahead) {
                adamw8bit_prefetch(t->param, begin + i, param_size);
                adamw8bit_prefetch(residual, begin + i, residual_size);
                adamw8bit_prefetch(t->grad, begin + i, grad_size);
                adamw8bit_prefetch(t->exp_avg, begin + i, 1);
                adamw8bit_prefetch(t->exp_avg_sq, begin + i, 1);
            }
            const int64_t next = to - begin - i >= 2 * LANES ? begin + i + LANES : begin + i;
            const adamw8bit_elements at = {{(char *)t->param + (begin + i) * param_size,
                                            (char *)residual + (begin + i) * residual_size},
                                           (const char *)t->grad + (begin + i) * grad_size,
                                           m + i,
                                           v + i,
                                           t->exp_avg + next,
                                           t->exp_avg_sq + next};
            if (__builtin_expect(overlaps, 1)) /* `before` is then a full block */
                no_nan &= adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, mode, &values,
                                                before, i, &unsure, &largest_m, &largest_v);
            else
                no_nan &= adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, mode, &values,
                                                NULL, 0, NULL, &largest_m, &largest_v);
        }
        if (__builtin_expect(unsure.any != 0, 0))
            adamw8bit_encode_all_unsure(t, before, i, &unsure, order);
        if (!overlaps || i < before->count)
            adamw8bit_encode_rest(t, before, overlaps ? i : 0, order);
        if (i < count) {
            adamw8bit_few few;
            adamw8bit_pad(&few, t, begin + i, count - i, param_size, grad_size);
            adamw8bit_decode_vbmi(tables, few.exp_avg, few.exp_avg_sq, order, &values);
            float residuals[LANES] = {0};
            memcpy(residuals, (const char *)residual + (begin + i) * residual_size,
                   (size_t)((count - i) * residual_size));
            const adamw8bit_elements at = {
                {few.param, residuals}, few.grad, m + i, v + i, few.exp_avg, few.exp_avg_sq};
            no_nan &= adamw8bit_update_vbmi(t, &c, at, param_dtype, grad_dtype, mode, &values, NULL,
                                            0, NULL, &largest_m, &largest_v);
            memcpy((char *)t->param + (begin + i) * param_size, few.param,
                   (size_t)((count - i) * param_size));
            memcpy((char *)residual + (begin + i) * residual_size, residuals,
                   (size_t)((count - i) * residual_size));
        }
        pending[turn].begin = begin;
        pending[turn].count = count;
        pending[turn].m = m;
        pending[turn].v = v;
        /* A negative absmax makes exp_avg_sq negative, and its largest magnitude wrong. */
        adamw8bit_close_vbmi(t, &pending[turn], block, largest_m, largest_v,
                             absmax_v >= 0.0f ? no_nan : 0);
        turn = turn == 2 ? 0 : turn + 1;
    }
    adamw8bit_encode_rest(t, &pending[turn == 2 ? 0 : turn + 1], 0, order);
    adamw8bit_encode_rest(t, &pending[turn == 0 ? 2 : turn - 1], 0, order);
}

static int adamw8bit_is_for_vbmi(const adamw8bit_tensor *t, hr_dtype param_dtype,
                                 hr_dtype grad_dtype)
{
    return t->call->rule == ADAMW8BIT_PLAIN && !t->call->args->config->seeds &&
           t->constants.one_minus_beta1 < 0.5f && param_dtype != HR_F16 && grad_dtype != HR_F16;
}

CPU_AVX512_VBMI_BF16 void adamw8bit_run_vbmi(const adamw8bit_tensor *t, int64_t from, int64_t to,
                                             hr_dtype param_dtype, hr_dtype grad_dtype)
{
    const hr_weights_mode M = HR_WEIGHTS_NEAREST;
    char none;
    if (!adamw8bit_is_for_vbmi(t, param_dtype, grad_dtype)) {
        adamw8bit_run_avx512(t, from, to, param_dtype, grad_dtype);
        return;
    }
    FOR_F32_OR_BF16(
        param_dtype, P,
        FOR_F32_OR_BF16(grad_dtype, G, adamw8bit_blocks_vbmi(t, &none, from, to, P, G, M)))
}

CPU_AVX512_VBMI_BF16 int adamw8bit_run_weights_vbmi(const adamw8bit_tensor *t,
                                                    const weights_tensor *weights, int64_t from,
                                                    int64_t to, hr_dtype grad_dtype)
{
    if (!adamw8bit_is_for_vbmi(t, weights->dtype, grad_dtype) || weights->stalled ||
        weights->dtype != HR_BF16 || grad_dtype != HR_BF16)
        return 0;
    void *const residual = weights->residual;
#define RUN_MODE(mode)                                                        \
    case mode:                                                                \
        adamw8bit_blocks_vbmi(t, residual, from, to, HR_BF16, HR_BF16, mode); \
        return 1;
    switch (weights->mode) {
        RUN_MODE(HR_WEIGHTS_MASTER)
        RUN_MODE(HR_WEIGHTS_KAHAN)
        RUN_MODE(HR_WEIGHTS_REMAINDER16)
        RUN_MODE(HR_WEIGHTS_REMAINDER8)
    default: /* modes that round at random, and those without a form in weights_cpu_vbmi.h */
        return 0;
    }
#undef RUN_MODE
}
#endif
