/*
 * adamw_cpu.c: the CPU step of Adam and AdamW. One parallel region covers the elements of the whole
 * list, so ten thousand small tensors are handed to threads as often as one large tensor.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/adamw.h"
#include "kernels/weights/weights_cpu.h"

/* Updates the elements [begin, end). With constant types, mode, amsgrad and skip this is one vector
 * loop without branches. `random`: 16 bits for each element, if the mode rounds at random. */
HR_INLINE void adamw_few(adamw_constants c, void *restrict param, void *restrict residual,
                         const void *restrict grad, void *restrict exp_avg,
                         void *restrict exp_avg_sq, void *restrict max_exp_avg_sq, int64_t begin,
                         int64_t end, hr_dtype param_dtype, hr_weights_mode mode,
                         const uint16_t *restrict random, hr_dtype grad_dtype, hr_dtype state_dtype,
                         int amsgrad, int skip)
{
    for (int64_t i = begin; i < end; i++) {
        weights_bits bits = weights_bits_at(param, residual, i, param_dtype, mode);
        adamw_values x = {
            weights_join(bits, param_dtype, mode),
            hr_load(grad, i, grad_dtype),
            hr_load(exp_avg, i, state_dtype),
            hr_load(exp_avg_sq, i, state_dtype),
            amsgrad ? hr_load(max_exp_avg_sq, i, state_dtype) : 0.0f,
        };
        x = adamw_update(c, x, amsgrad, skip);
        bits = weights_split(x.param, param_dtype, mode,
                             weights_are_random(mode) ? random[i - begin] : 0);
        weights_put_bits(param, residual, i, bits, param_dtype, mode);
        hr_store(exp_avg, i, x.exp_avg, state_dtype);
        hr_store(exp_avg_sq, i, x.exp_avg_sq, state_dtype);
        if (amsgrad)
            hr_store(max_exp_avg_sq, i, x.max_exp_avg_sq, state_dtype);
    }
}

/* adamw_few() of CPU_STEP elements without amsgrad and skip. Two loops, because a core sees a few
 * vectors ahead: with one it would wait for each square root and then for a division. */
HR_INLINE void adamw_step(adamw_constants c, void *restrict param, void *restrict residual,
                          const void *restrict grad, void *restrict exp_avg,
                          void *restrict exp_avg_sq, int64_t i, hr_dtype param_dtype,
                          hr_weights_mode mode, const uint16_t *restrict random,
                          hr_dtype grad_dtype, hr_dtype state_dtype, int l2, int slow)
{
    float params[CPU_STEP], exp_avgs[CPU_STEP], roots[CPU_STEP];
    for (int j = 0; j < CPU_STEP; j++) {
        const weights_bits bits = weights_bits_at(param, residual, i + j, param_dtype, mode);
        adamw_values x = {weights_join(bits, param_dtype, mode), hr_load(grad, i + j, grad_dtype),
                          hr_load(exp_avg, i + j, state_dtype),
                          hr_load(exp_avg_sq, i + j, state_dtype), 0.0f};
        x = adamw_moments_of(c, x, 0, l2, slow);
        params[j] = x.param;
        exp_avgs[j] = x.exp_avg;
        roots[j] = sqrtf(x.exp_avg_sq);
        hr_store(exp_avg, i + j, x.exp_avg, state_dtype);
        hr_store(exp_avg_sq, i + j, x.exp_avg_sq, state_dtype);
    }
    for (int j = 0; j < CPU_STEP; j++) {
        const float x = adamw_param_of(c, params[j], exp_avgs[j], roots[j]);
        const uint32_t word = weights_are_random(mode) ? random[j] : 0;
        const weights_bits bits = weights_split(x, param_dtype, mode, word);
        weights_put_bits(param, residual, i + j, bits, param_dtype, mode);
    }
}

/* ---- Two bf16 at a time ---------------------------------------------------------------------- */

/* Where CPU_STEP elements wait between loops: those at even places, and those at odd places. */
typedef struct adamw_waiting {
    float param[2][CPU_STEP / 2], residual[2][CPU_STEP / 2], exp_avg[2][CPU_STEP / 2];
    float exp_avg_sq[2][CPU_STEP / 2], root[2][CPU_STEP / 2];
} adamw_waiting;

/* Updates the moments of element `which` of pair j. */
HR_INLINE void adamw_half_moments(adamw_constants c, adamw_waiting *w, int which, int j,
                                  uint32_t param, uint32_t residual, uint32_t grad,
                                  uint32_t exp_avg, uint32_t exp_avg_sq, hr_weights_mode mode,
                                  int l2, int slow)
{
    adamw_values x = {hr_float(param), hr_float(grad), hr_float(exp_avg), hr_float(exp_avg_sq),
                      0.0f};
    if (mode == HR_WEIGHTS_KAHAN)
        x.param = weights_join_kahan(x.param, hr_float(residual), HR_BF16);
    x = adamw_moments_of(c, x, 0, l2, slow);
    w->param[which][j] = x.param;
    w->exp_avg[which][j] = x.exp_avg;
    w->exp_avg_sq[which][j] = x.exp_avg_sq;
    w->root[which][j] = sqrtf(x.exp_avg_sq);
}

HR_INLINE float adamw_half_param(adamw_constants c, adamw_waiting *w, int which, int j)
{
    return w->param[which][j] =
               adamw_param_of(c, w->param[which][j], w->exp_avg[which][j], w->root[which][j]);
}

HR_INLINE void adamw_put_moments(const adamw_waiting *w, uint16_t *restrict exp_avg,
                                 uint16_t *restrict exp_avg_sq, int64_t i, half_conversions halves)
{
    halves.narrow_bf16(exp_avg + i, w->exp_avg[0], w->exp_avg[1]);
    halves.narrow_bf16(exp_avg_sq + i, w->exp_avg_sq[0], w->exp_avg_sq[1]);
}

/* Stores CPU_STEP elements that waited, NaNs and infinities among them. */
static __attribute__((noinline, cold)) void
adamw_put_any(const adamw_waiting *w, void *param, void *residual, void *exp_avg, void *exp_avg_sq,
              int64_t i, hr_weights_mode mode, const uint16_t *random)
{
    for (int j = 0; j < CPU_STEP; j++) {
        const weights_bits bits = weights_split(w->param[j % 2][j / 2], HR_BF16, mode,
                                                weights_are_random(mode) ? random[j] : 0);
        weights_put_bits(param, residual, i + j, bits, HR_BF16, mode);
        hr_store(exp_avg, i + j, w->exp_avg[j % 2][j / 2], HR_BF16);
        hr_store(exp_avg_sq, i + j, w->exp_avg_sq[j % 2][j / 2], HR_BF16);
    }
}

/* adamw_few() of CPU_STEP elements, where all is bf16, for the modes NEAREST, KAHAN and STOCHASTIC.
 * Rounds as if all were numbers; where a parameter or a moment is a NaN, and so the parameter, or
 * where Kahan's residual is none, adamw_put_any() puts it right. */
HR_INLINE void adamw_pairs(adamw_constants c, uint16_t *restrict param, uint16_t *restrict residual,
                           const uint16_t *restrict grad, uint16_t *restrict exp_avg,
                           uint16_t *restrict exp_avg_sq, int64_t i, hr_weights_mode mode,
                           const uint16_t *restrict random, int l2, int slow,
                           half_conversions halves)
{
    const uint32_t high = 0xFFFF0000u;
    adamw_waiting w;
    for (int j = 0; j < CPU_STEP / 2; j++) {
        const uint32_t p = bf16_pair(param, i + 2 * j), g = bf16_pair(grad, i + 2 * j);
        const uint32_t m = bf16_pair(exp_avg, i + 2 * j), v = bf16_pair(exp_avg_sq, i + 2 * j);
        const uint32_t r = mode == HR_WEIGHTS_KAHAN ? bf16_pair(residual, i + 2 * j) : 0;
        adamw_half_moments(c, &w, 0, j, p << 16, r << 16, g << 16, m << 16, v << 16, mode, l2,
                           slow);
        adamw_half_moments(c, &w, 1, j, p & high, r & high, g & high, m & high, v & high, mode, l2,
                           slow);
    }
    if (mode != HR_WEIGHTS_KAHAN)
        adamw_put_moments(&w, exp_avg, exp_avg_sq, i, halves);
    uint32_t largest = 0;
    for (int j = 0; j < CPU_STEP / 2; j++) {
        const float p0 = adamw_half_param(c, &w, 0, j), p1 = adamw_half_param(c, &w, 1, j);
        if (mode == HR_WEIGHTS_STOCHASTIC) {
            const uint32_t bits = bf16_pair(random, 2 * j);
            bf16_put_pair(param, i + 2 * j, hr_bits(p0) + (bits & 0xFFFFu),
                          hr_bits(p1) + (bits >> 16));
        }
        const uint32_t magnitude = hr_bits(p0 + p1) & 0x7FFFFFFFu;
        if (mode != HR_WEIGHTS_KAHAN)
            largest = magnitude > largest ? magnitude : largest;
    }
    if (mode == HR_WEIGHTS_KAHAN) /* while the divisions run that the residuals wait for */
        adamw_put_moments(&w, exp_avg, exp_avg_sq, i, halves);
    if (mode != HR_WEIGHTS_STOCHASTIC)
        halves.narrow_bf16(param + i, w.param[0], w.param[1]);
    if (mode == HR_WEIGHTS_KAHAN) {
        for (int j = 0; j < CPU_STEP / 2; j++) {
            const uint32_t p = bf16_pair(param, i + 2 * j);
            const float r0 = w.residual[0][j] = w.param[0][j] - hr_float(p << 16);
            const float r1 = w.residual[1][j] = w.param[1][j] - hr_float(p & high);
            const uint32_t magnitude = hr_bits(r0 + r1) & 0x7FFFFFFFu;
            largest = magnitude > largest ? magnitude : largest;
        }
        halves.narrow_bf16(residual + i, w.residual[0], w.residual[1]);
    }
    if (__builtin_expect(largest >= 0x7F800000u, 0))
        adamw_put_any(&w, param, residual, exp_avg, exp_avg_sq, i, mode,
                      weights_are_random(mode) ? random : NULL);
}

HR_INLINE int adamw_has_pairs(hr_dtype param, hr_dtype grad, hr_dtype state, hr_weights_mode mode)
{
    return BF16_FIRST_IS_LOW && param == HR_BF16 && grad == HR_BF16 && state == HR_BF16 &&
           (mode == HR_WEIGHTS_NEAREST || mode == HR_WEIGHTS_KAHAN ||
            mode == HR_WEIGHTS_STOCHASTIC);
}

/* ---- Runs ------------------------------------------------------------------------------------ */

/* Updates the elements [begin, end), without amsgrad, and prefetches up to `last`. */
HR_INLINE void adamw_run(adamw_constants c, void *restrict param, void *restrict residual,
                         const void *restrict grad, void *restrict exp_avg,
                         void *restrict exp_avg_sq, int64_t begin, int64_t end, int64_t last,
                         hr_dtype param_dtype, hr_weights_mode mode,
                         const uint16_t *restrict random, hr_dtype grad_dtype, hr_dtype state_dtype,
                         half_conversions halves)
{
    const int l2 = adamw_has_l2(c), slow = adamw_is_slow(c);
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        weights_prefetch(param, residual, i, CPU_STEP, last, param_dtype, mode);
        cpu_prefetch(grad, i, CPU_STEP, last, grad_dtype);
        cpu_prefetch(exp_avg, i, CPU_STEP, last, state_dtype);
        cpu_prefetch(exp_avg_sq, i, CPU_STEP, last, state_dtype);
        if (adamw_has_pairs(param_dtype, grad_dtype, state_dtype, mode))
            FOR_FLAG(l2 || !slow, GENERAL,
                     if (GENERAL) adamw_pairs(c, param, residual, grad, exp_avg, exp_avg_sq, i,
                                              mode, random, l2, slow, halves);
                     else adamw_pairs(c, param, residual, grad, exp_avg, exp_avg_sq, i, mode,
                                      random, 0, 1, halves))
        else
            adamw_step(c, param, residual, grad, exp_avg, exp_avg_sq, i, param_dtype, mode, random,
                       grad_dtype, state_dtype, l2, slow);
        random = weights_are_random(mode) ? random + CPU_STEP : random;
    }
    adamw_few(c, param, residual, grad, exp_avg, exp_avg_sq, NULL, i, end, param_dtype, mode,
              random, grad_dtype, state_dtype, 0, 0);
}

/* The tensors of one parameter, and the constants of its step. */
typedef struct adamw_part {
    adamw_constants constants;
    void *param, *exp_avg, *exp_avg_sq, *max_exp_avg_sq;
    const void *grad;
    hr_dtype param_dtype, grad_dtype, state_dtype;
    const weights_tensor *weights; /* for adamw_joined_range() and adamw_weights() */
    int skip;
} adamw_part;

/* Updates any mix of types, with amsgrad and skip: converts tiles to binary32, which stay in the
 * first-level cache. A loop for each of the 54 mixes would take minutes to compile and a
 * megabyte. */
HR_INLINE void adamw_by_tiles(const adamw_part *p, int64_t begin, int64_t end,
                              half_conversions halves)
{
    enum { PARAM, GRAD, EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, TILES };
    _Alignas(64) float tiles[TILES][WEIGHTS_TILE];
    for (int64_t i = begin; i < end; i += WEIGHTS_TILE) {
        const int count = end - i < WEIGHTS_TILE ? (int)(end - i) : WEIGHTS_TILE;
        cpu_prefetch(p->param, i, count, end, p->param_dtype);
        cpu_prefetch(p->grad, i, count, end, p->grad_dtype);
        cpu_prefetch(p->exp_avg, i, count, end, p->state_dtype);
        cpu_prefetch(p->exp_avg_sq, i, count, end, p->state_dtype);
        halves_to_tile(p->param, i, count, p->param_dtype, tiles[PARAM], halves);
        halves_to_tile(p->grad, i, count, p->grad_dtype, tiles[GRAD], halves);
        halves_to_tile(p->exp_avg, i, count, p->state_dtype, tiles[EXP_AVG], halves);
        halves_to_tile(p->exp_avg_sq, i, count, p->state_dtype, tiles[EXP_AVG_SQ], halves);
        if (p->max_exp_avg_sq) {
            halves_to_tile(p->max_exp_avg_sq, i, count, p->state_dtype, tiles[MAX_EXP_AVG_SQ],
                           halves);
            adamw_few(p->constants, tiles[PARAM], NULL, tiles[GRAD], tiles[EXP_AVG],
                      tiles[EXP_AVG_SQ], tiles[MAX_EXP_AVG_SQ], 0, count, HR_F32,
                      HR_WEIGHTS_NEAREST, NULL, HR_F32, HR_F32, 1, p->skip);
            halves_from_tile(p->max_exp_avg_sq, i, count, p->state_dtype, tiles[MAX_EXP_AVG_SQ],
                             halves);
        } else if (p->skip) {
            adamw_few(p->constants, tiles[PARAM], NULL, tiles[GRAD], tiles[EXP_AVG],
                      tiles[EXP_AVG_SQ], NULL, 0, count, HR_F32, HR_WEIGHTS_NEAREST, NULL, HR_F32,
                      HR_F32, 0, 1);
        } else {
            adamw_run(p->constants, tiles[PARAM], NULL, tiles[GRAD], tiles[EXP_AVG],
                      tiles[EXP_AVG_SQ], 0, count, 0, HR_F32, HR_WEIGHTS_NEAREST, NULL, HR_F32,
                      HR_F32, halves);
        }
        halves_from_tile(p->param, i, count, p->param_dtype, tiles[PARAM], halves);
        halves_from_tile(p->exp_avg, i, count, p->state_dtype, tiles[EXP_AVG], halves);
        halves_from_tile(p->exp_avg_sq, i, count, p->state_dtype, tiles[EXP_AVG_SQ], halves);
    }
}

HR_INLINE void adamw_as(const adamw_part *p, int64_t begin, int64_t end, hr_dtype param,
                        hr_dtype grad, hr_dtype state, half_conversions halves)
{
    adamw_run(p->constants, p->param, NULL, p->grad, p->exp_avg, p->exp_avg_sq, begin, end, end,
              param, HR_WEIGHTS_NEAREST, NULL, grad, state, halves);
}

/* adamw_run() where all is f16, of which F16_AT_ONCE elements are converted at a time: between the
 * roots and divisions, which leave time for it. */
HR_INLINE void adamw_f16_step(adamw_constants c, uint16_t *restrict param,
                              const uint16_t *restrict grad, uint16_t *restrict exp_avg,
                              uint16_t *restrict exp_avg_sq, int l2, int slow,
                              half_conversions halves)
{
    float params[CPU_STEP], exp_avgs[CPU_STEP], roots[CPU_STEP];
    for (int j = 0; j < CPU_STEP; j += F16_AT_ONCE) {
        float g[F16_AT_ONCE], m[F16_AT_ONCE], v[F16_AT_ONCE];
        halves.widen_f16(params + j, param + j);
        halves.widen_f16(g, grad + j);
        halves.widen_f16(m, exp_avg + j);
        halves.widen_f16(v, exp_avg_sq + j);
        for (int lane = 0; lane < F16_AT_ONCE; lane++) {
            adamw_values x = {params[j + lane], g[lane], m[lane], v[lane], 0.0f};
            x = adamw_moments_of(c, x, 0, l2, slow);
            params[j + lane] = x.param;
            exp_avgs[j + lane] = x.exp_avg;
            roots[j + lane] = sqrtf(x.exp_avg_sq);
            hr_store(m, lane, x.exp_avg, HR_F32);
            hr_store(v, lane, x.exp_avg_sq, HR_F32);
        }
        halves.narrow_f16(exp_avg + j, m);
        halves.narrow_f16(exp_avg_sq + j, v);
    }
    for (int j = 0; j < CPU_STEP; j += F16_AT_ONCE) {
        float p[F16_AT_ONCE];
        for (int lane = j; lane < j + F16_AT_ONCE; lane++)
            hr_store(p, lane - j, adamw_param_of(c, params[lane], exp_avgs[lane], roots[lane]),
                     HR_F32);
        halves.narrow_f16(param + j, p);
    }
}

HR_INLINE void adamw_f16(const adamw_part *p, int64_t begin, int64_t end, half_conversions halves)
{
    const int l2 = adamw_has_l2(p->constants), slow = adamw_is_slow(p->constants);
    uint16_t *const param = (uint16_t *)p->param;
    const uint16_t *const grad = (const uint16_t *)p->grad;
    uint16_t *const exp_avg = (uint16_t *)p->exp_avg, *const exp_avg_sq = (uint16_t *)p->exp_avg_sq;
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        cpu_prefetch(param, i, CPU_STEP, end, HR_F16);
        cpu_prefetch(grad, i, CPU_STEP, end, HR_F16);
        cpu_prefetch(exp_avg, i, CPU_STEP, end, HR_F16);
        cpu_prefetch(exp_avg_sq, i, CPU_STEP, end, HR_F16);
        FOR_FLAG(l2 || !slow, GENERAL,
                 if (GENERAL) adamw_f16_step(p->constants, param + i, grad + i, exp_avg + i,
                                             exp_avg_sq + i, l2, slow, halves);
                 else adamw_f16_step(p->constants, param + i, grad + i, exp_avg + i, exp_avg_sq + i,
                                     0, 1, halves))
    }
    adamw_few(p->constants, param, NULL, grad, exp_avg, exp_avg_sq, NULL, i, end, HR_F16,
              HR_WEIGHTS_NEAREST, NULL, HR_F16, HR_F16, 0, 0);
}

/* A number for each mix of types. The common ones have a loop of their own. */
#define ADAMW_MIX(param, grad, state) ((param) | (grad) << 4 | (state) << 8)

HR_INLINE void adamw_part_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const adamw_part *const p = (const adamw_part *)context;
    if (p->skip || p->max_exp_avg_sq) {
        adamw_by_tiles(p, begin, end, halves);
        return;
    }
#define ADAMW_CASE(param, grad, state)                       \
    case ADAMW_MIX(param, grad, state):                      \
        adamw_as(p, begin, end, param, grad, state, halves); \
        break;
    switch (ADAMW_MIX(p->param_dtype, p->grad_dtype, p->state_dtype)) {
        ADAMW_CASE(HR_F32, HR_F32, HR_F32)
        ADAMW_CASE(HR_F32, HR_F32, HR_BF16)
        ADAMW_CASE(HR_F32, HR_BF16, HR_F32)
        ADAMW_CASE(HR_BF16, HR_BF16, HR_F32)
        ADAMW_CASE(HR_BF16, HR_BF16, HR_BF16)
    case ADAMW_MIX(HR_F16, HR_F16, HR_F16):
        adamw_f16(p, begin, end, halves);
        break;
    default:
        adamw_by_tiles(p, begin, end, halves);
        break;
    }
#undef ADAMW_CASE
}

CPU_HALVES_VARIANTS(adamw_part_range)

/* Joins, updates and splits weights in one loop, which needs adamw_is_joined(). */
HR_INLINE void adamw_joined(const adamw_part *p, int64_t begin, int64_t end, hr_weights_mode mode,
                            hr_dtype state_dtype, half_conversions halves)
{
    uint16_t random[8 * WEIGHTS_TILE];
    const int64_t step = weights_are_random(mode) ? 8 * WEIGHTS_TILE : end - begin;
    for (int64_t i = begin; i < end; i += step) {
        const int64_t next = end - i < step ? end : i + step;
        if (weights_are_random(mode))
            weights_fill_random(p->weights, i, (int)(next - i), random);
        adamw_run(p->constants, p->weights->param, p->weights->residual, p->grad, p->exp_avg,
                  p->exp_avg_sq, i, next, end, HR_BF16, mode, random, HR_BF16, state_dtype, halves);
    }
}

HR_INLINE void adamw_joined_as(const adamw_part *p, int64_t begin, int64_t end,
                               hr_weights_mode mode, half_conversions halves){
    FOR_F32_OR_BF16(p->state_dtype, S, adamw_joined(p, begin, end, mode, S, halves))}

HR_INLINE void adamw_joined_range(void *context, int64_t begin, int64_t end,
                                  half_conversions halves)
{
    const adamw_part *const p = (const adamw_part *)context;
    WEIGHTS_FOR_MODE(p->weights->mode,
                     if (M != HR_WEIGHTS_NEAREST) adamw_joined_as(p, begin, end, M, halves))
}

CPU_HALVES_VARIANTS(adamw_joined_range)

/* Whether adamw_joined_range() has a loop for these weights: the common mixes of types. */
static int adamw_is_joined(const adamw_part *p)
{
    return p->weights->mode != HR_WEIGHTS_NEAREST && !p->weights->stalled &&
           p->weights->dtype == HR_BF16 && p->grad_dtype == HR_BF16 && p->state_dtype != HR_F16 &&
           !p->max_exp_avg_sq && !p->skip;
}

static void *adamw_at(void *base, int64_t i, hr_dtype dtype)
{
    return base ? (char *)base + i * hr_element_size(dtype) : NULL;
}

/* Updates the elements [begin, end) of a tensor with any mode of weights, by tiles of binary32. */
static void adamw_weights(const adamw_part *p, int64_t begin, int64_t end)
{
    const weights_tensor *const weights = p->weights;
    _Alignas(64) float tile[WEIGHTS_TILE], before[WEIGHTS_TILE];
    adamw_part part = *p;
    part.param = tile;
    part.param_dtype = HR_F32;
    for (int64_t i = begin; i < end; i += WEIGHTS_TILE) {
        const int count = end - i < WEIGHTS_TILE ? (int)(end - i) : WEIGHTS_TILE;
        part.grad = adamw_at((void *)p->grad, i, p->grad_dtype);
        part.exp_avg = adamw_at(p->exp_avg, i, p->state_dtype);
        part.exp_avg_sq = adamw_at(p->exp_avg_sq, i, p->state_dtype);
        part.max_exp_avg_sq = adamw_at(p->max_exp_avg_sq, i, p->state_dtype);
        weights_load(weights, i, count, tile);
        if (weights->stalled)
            memcpy(before, tile, (size_t)count * sizeof before[0]);
        /* A few at a time, because a core can wait for few cache lines at once. */
        for (int j = 0; j < count; j += CPU_STEP) {
            const int step = count - j < CPU_STEP ? count - j : CPU_STEP;
            weights_prefetch(weights->param, weights->residual, i + j, step, end, weights->dtype,
                             weights->mode);
            cpu_prefetch(p->grad, i + j, step, end, p->grad_dtype);
            cpu_prefetch(p->exp_avg, i + j, step, end, p->state_dtype);
            cpu_prefetch(p->exp_avg_sq, i + j, step, end, p->state_dtype);
            CPU_BEST(adamw_part_range)(&part, j, j + step);
        }
        weights_store(weights, i, count, tile, weights->stalled ? before : NULL);
    }
}

/* Updates the elements [begin, end) of the tensors of the list laid end to end. */
static void adamw_range(void *context, int64_t begin, int64_t end)
{
    const adamw_args *const a = (const adamw_args *)context;
    adamw_part part = {0};
    part.skip = a->config->step.skip_nonfinite;
    double folded_for = NAN; /* equal to no step */
    CPU_FOR_EACH_TENSOR(a->params, begin, end, k, from, to)
    {
        const double t = step_number_of(&a->config->step, a->steps, k);
        if (t != folded_for)
            part.constants = adamw_fold(a->config, t);
        folded_for = t;
        part.param = a->params->data[k];
        part.grad = a->grads->data[k];
        part.exp_avg = a->exp_avgs->data[k];
        part.exp_avg_sq = a->exp_avg_sqs->data[k];
        part.max_exp_avg_sq = a->max_exp_avg_sqs ? a->max_exp_avg_sqs->data[k] : NULL;
        part.param_dtype = a->params->dtype[k];
        part.grad_dtype = a->grads->dtype[k];
        part.state_dtype = a->exp_avgs->dtype[k];
        if (a->config->step.weights) {
            const weights_tensor weights = weights_of(a->config->step.weights, a->params, k, t);
            part.weights = &weights;
            if (adamw_is_joined(&part))
                CPU_BEST(adamw_joined_range)(&part, from, to);
            else
                adamw_weights(&part, from, to);
        } else {
            CPU_BEST(adamw_part_range)(&part, from, to);
        }
    }
}

hr_status adamw_cpu(const adamw_args *args)
{
    if (step_is_skipped(&args->config->step))
        return HR_OK;
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, adamw_range, (void *)args);
    step_count_all(args->steps);
    return HR_OK;
}
