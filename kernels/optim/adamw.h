/*
 * adamw.h: Adam and AdamW: the formula of one element, the constants it needs, and the kernels.
 *
 * The update is documented at hr_adamw in headroom.h. adamw_fold() computes everything that depends
 * on the step alone in binary64, on the host or in one thread of a CUDA block, so that an element
 * costs one square root, one division and a handful of multiplications.
 *
 * Adam: a method for stochastic optimization, Kingma and Ba, arXiv:1412.6980.
 * Decoupled weight decay regularization, Loshchilov and Hutter, arXiv:1711.05101.
 */
#ifndef HR_ADAMW_H
#define HR_ADAMW_H

#include <math.h>

#include "kernels/core/step.h"

typedef struct adamw_constants {
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float grad_factor; /* clip_coef / grad_scale, negative to maximize */
    float l2;          /* weight_decay if it is not decoupled, else 0 */
    float keep;        /* 1 - lr * weight_decay if it is decoupled, else 1 */
    float step_size;   /* lr / (1 - beta1^t) */
    float rsqrt_bias2; /* 1 / sqrt(1 - beta2^t) */
    float eps;
} adamw_constants;

typedef struct adamw_values {
    float param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;
} adamw_values;

/* What of the constants decides between formulas, so that a kernel can look at it once for many
 * elements. */
HR_INLINE int adamw_has_l2(adamw_constants c)
{
    return c.l2 != 0.0f;
}

HR_INLINE int adamw_is_slow(adamw_constants c)
{
    return c.one_minus_beta1 < 0.5f;
}

/* The new moments. `l2` and `slow` are what the two functions above give. */
HR_INLINE adamw_values adamw_moments_of(adamw_constants c, adamw_values x, int amsgrad, int l2,
                                        int slow)
{
    const float scaled = x.grad * c.grad_factor;
    /* Not `scaled + l2 * param` alone: 0 * inf would turn an infinite parameter into NaN. */
    const float grad = l2 ? scaled + c.l2 * x.param : scaled;
    /* From the nearer end towards the other: half the error of the sum of two products. */
    const float from = slow ? x.exp_avg : grad;
    const float weight = slow ? c.one_minus_beta1 : -c.beta1;
    x.exp_avg = from + weight * (grad - x.exp_avg);
    x.exp_avg_sq = c.beta2 * x.exp_avg_sq + c.one_minus_beta2 * (grad * grad);
    if (amsgrad) {
        const int keep = x.max_exp_avg_sq >= x.exp_avg_sq || x.max_exp_avg_sq != x.max_exp_avg_sq;
        x.max_exp_avg_sq = keep ? x.max_exp_avg_sq : x.exp_avg_sq; /* NaN wins on either side */
    }
    return x;
}

/* The new parameter, from its new first moment and the root of its new second moment, or of the
 * maximum of these. */
HR_INLINE float adamw_param_of(adamw_constants c, float param, float exp_avg, float root)
{
    const float denominator = root * c.rsqrt_bias2 + c.eps;
    return c.keep * param - c.step_size * (exp_avg / denominator);
}

HR_INLINE adamw_values adamw_element_of(adamw_constants c, adamw_values x, int amsgrad, int l2,
                                        int slow)
{
    x = adamw_moments_of(c, x, amsgrad, l2, slow);
    const float root = sqrtf(amsgrad ? x.max_exp_avg_sq : x.exp_avg_sq);
    x.param = adamw_param_of(c, x.param, x.exp_avg, root);
    return x;
}

/* adamw_element_of(), except that with `skip_nonfinite` an element whose gradient is not finite
 * stays. */
HR_INLINE adamw_values adamw_update_of(adamw_constants c, adamw_values x, int amsgrad,
                                       int skip_nonfinite, int l2, int slow)
{
    const adamw_values y = adamw_element_of(c, x, amsgrad, l2, slow);
    const uint32_t magnitude = hr_bits(x.grad * c.grad_factor) & 0x7FFFFFFFu;
    const int stays = skip_nonfinite && magnitude >= 0x7F800000u;
    x.param = stays ? x.param : y.param;
    x.exp_avg = stays ? x.exp_avg : y.exp_avg;
    x.exp_avg_sq = stays ? x.exp_avg_sq : y.exp_avg_sq;
    x.max_exp_avg_sq = stays ? x.max_exp_avg_sq : y.max_exp_avg_sq;
    return x;
}

HR_INLINE adamw_values adamw_update(adamw_constants c, adamw_values x, int amsgrad,
                                    int skip_nonfinite)
{
    return adamw_update_of(c, x, amsgrad, skip_nonfinite, adamw_has_l2(c), adamw_is_slow(c));
}

/* base^exponent by repeated squaring: IEEE products in a fixed order, unlike pow(). */
HR_INLINE double adamw_power(double base, double exponent)
{
    double power = 1.0;
    for (uint64_t bits = (uint64_t)exponent; bits != 0; bits >>= 1) {
        if (bits & 1u)
            power *= base;
        base *= base;
    }
    return power;
}

/* The constants of step t. Reads the scalars that `config` points to, so it must run where these
 * live. */
HR_INLINE adamw_constants adamw_fold(const hr_adamw_config *config, double t)
{
    const double lr = step_lr(&config->step);
    adamw_constants c;
    c.beta1 = (float)config->beta1;
    c.one_minus_beta1 = (float)(1.0 - config->beta1);
    c.beta2 = (float)config->beta2;
    c.one_minus_beta2 = (float)(1.0 - config->beta2);
    c.grad_factor = step_grad_factor(&config->step);
    c.l2 = config->decoupled ? 0.0f : (float)config->weight_decay;
    c.keep = config->decoupled ? (float)(1.0 - lr * config->weight_decay) : 1.0f;
    c.step_size = (float)(lr / (1.0 - adamw_power(config->beta1, t)));
    c.rsqrt_bias2 = (float)(1.0 / sqrt(1.0 - adamw_power(config->beta2, t)));
    c.eps = (float)config->eps;
    return c;
}

/* The checked arguments of a call. */
typedef struct adamw_args {
    const hr_tensor_list *params, *exp_avgs, *exp_avg_sqs;
    const hr_tensor_list *max_exp_avg_sqs; /* NULL unless amsgrad */
    const hr_tensor_list *steps;           /* NULL: config->step.t */
    const hr_tensor_list *grads;
    const hr_adamw_config *config;
} adamw_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status adamw_cpu(const adamw_args *args);
hr_status adamw_cuda(const adamw_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
