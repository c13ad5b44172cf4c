/*
 * adamw8bit.h: Adam and AdamW with 8-bit moments: bitsandbytes' formula of one element, the random
 * numbers of its codes, and the kernels. The rule is documented at hr_adamw8bit in headroom.h;
 * hr_adamw's formula is in adamw.h, and that of codes in quantize_blocks.h.
 *
 * A block is updated in two passes. The first decodes and updates the elements and finds the
 * largest magnitudes; the second encodes, because a code depends on the scale of the whole block.
 *
 * 8-bit optimizers via block-wise quantization, Dettmers et al., arXiv:2110.02861.
 */
#ifndef HR_ADAMW8BIT_H
#define HR_ADAMW8BIT_H

#include "kernels/optim/adamw.h"
#include "kernels/quant/quantize_blocks.h"
#include "kernels/core/random.h"

#define ADAMW8BIT_MAX_BLOCK 512

/* ---- bitsandbytes' rule ---------------------------------------------------------------------- */

typedef struct adamw8bit_bnb_constants {
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float grad_factor;
    float keep;      /* 1 - lr * weight_decay */
    float step_size; /* -lr * sqrt(1 - beta2^t) / (1 - beta1^t) */
    float eps;       /* eps * sqrt(1 - beta2^t) */
} adamw8bit_bnb_constants;

/* bitsandbytes folds in binary32 with fast powers. Here constants that depend on the step are
 * folded in binary64, and the others as bitsandbytes does. */
HR_INLINE adamw8bit_bnb_constants adamw8bit_bnb_fold(const hr_adamw_config *config, double t)
{
    const double lr = step_lr(&config->step);
    const double root = sqrt(1.0 - adamw_power(config->beta2, t));
    adamw8bit_bnb_constants c;
    c.beta1 = (float)config->beta1;
    c.one_minus_beta1 = 1.0f - c.beta1;
    c.beta2 = (float)config->beta2;
    c.one_minus_beta2 = 1.0f - c.beta2;
    c.grad_factor = step_grad_factor(&config->step);
    c.keep = 1.0f - (float)lr * (float)config->weight_decay;
    c.step_size = (float)(-lr * root / (1.0 - adamw_power(config->beta1, t)));
    c.eps = (float)(root * config->eps);
    return c;
}

/* x rounded to its type in memory. */
HR_INLINE float adamw8bit_round(float x, hr_dtype dtype)
{
    return dtype == HR_F32 ? x : hr_from_half(hr_to_half(x, dtype), dtype);
}

HR_INLINE adamw_values adamw8bit_bnb_element(adamw8bit_bnb_constants c, adamw_values x,
                                             hr_dtype param_dtype)
{
    const float grad = x.grad * c.grad_factor;
    const float exp_avg_sq = x.exp_avg_sq * c.beta2 + c.one_minus_beta2 * grad * grad;
    const float exp_avg = x.exp_avg * c.beta1 + c.one_minus_beta1 * grad;
    const float update = c.step_size * (exp_avg / (sqrtf(exp_avg_sq) + c.eps));
    const float param = adamw8bit_round(x.param + update, param_dtype) * c.keep;
    const int stay = (hr_bits(x.grad) & 0x7FFFFFFFu) >= 0x7F800000u;
    x.param = stay ? x.param : param;
    x.exp_avg = stay ? 0.0f : exp_avg;
    x.exp_avg_sq = stay ? 0.0f : exp_avg_sq;
    return x;
}

/* ---- The codes of an element ----------------------------------------------------------------- */

/* The random words of elements i and i + 1 of a tensor in step t, i even: for exp_avg and
 * exp_avg_sq of element i, then for those of element i + 1. */
HR_INLINE hr_random4 adamw8bit_random(uint64_t seed, double t, int64_t i)
{
    const uint64_t step = (uint64_t)t, pair = (uint64_t)i / 2;
    hr_random4 counter;
    counter.word[0] = (uint32_t)pair;
    counter.word[1] = (uint32_t)(pair >> 32);
    counter.word[2] = (uint32_t)step;
    counter.word[3] = (uint32_t)(step >> 32);
    return hr_philox(counter, seed);
}

/* bitsandbytes' code of a moment x, from the code that is nearest to its quotient y. Its search gives
 * a NaN, such as 0 / 0, code 0. It then compares the sign bits of code and moment, and moves a code by
 * one if they differ. */
HR_INLINE uint8_t adamw8bit_bnb_code(int nearest, float x, float y, int is_signed)
{
    const int code = y != y ? 0 : nearest;
    const int negative = x == x && hr_bits(x) >> 31 != 0; /* the sign of a NaN depends on the CPU */
    const int differs = is_signed && (code < 127) != negative;
    return (uint8_t)(code + (differs ? (x > 0.0f ? 1 : -1) : 0)); /* 0 - 1 is 255 */
}

/* The same from maps that were filled with `bnb`. */
HR_INLINE uint8_t adamw8bit_bnb_encode(const quant_maps *maps, float x, float absmax, int is_signed)
{
    const float y = x / absmax;
    return adamw8bit_bnb_code(y != y ? 0 : dynamic_encode(&maps->map[is_signed], y, is_signed), x,
                              y, is_signed);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The checked arguments of a call. */
typedef struct adamw8bit_args {
    const hr_tensor_list *params, *exp_avgs, *exp_avg_absmaxs, *exp_avg_sqs, *exp_avg_sq_absmaxs;
    const hr_tensor_list *steps; /* NULL: config->adamw.step.t */
    const hr_tensor_list *grads;
    const hr_adamw8bit_config *config;
} adamw8bit_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status adamw8bit_cpu(const adamw8bit_args *args);
hr_status adamw8bit_cuda(const adamw8bit_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
