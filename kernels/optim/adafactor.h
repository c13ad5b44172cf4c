/*
 * adafactor.h: Adafactor: the rule, its constants, and the kernels. The rule is documented at
 * hr_adafactor in headroom.h; adafactor_plan.h has the order in which a call computes it.
 *
 * Adafactor: adaptive learning rates with sublinear memory cost, Shazeer and Stern,
 * arXiv:1804.04235.
 */
#ifndef HR_ADAFACTOR_H
#define HR_ADAFACTOR_H

#include <math.h>

#include "kernels/core/step.h"

/* adafactor_fold() reads the scalars that `config` points to, so it must run where these live. */

/* 1 - beta2_t: the weight of the new square in a variance. */
HR_INLINE double adafactor_weight(const hr_adafactor_config *config, double t)
{
    return pow(t, config->beta2_decay);
}

typedef struct adafactor_rates {
    double rho, lr;
    float grad_factor;
} adafactor_rates;

HR_INLINE adafactor_rates adafactor_fold(const hr_adafactor_config *config, double t)
{
    const double relative = 1.0 / sqrt(t);
    adafactor_rates r;
    r.lr = step_lr(&config->step);
    double most = r.lr;
    if (config->semantics == HR_ADAFACTOR_HF && config->relative_step)
        most = config->warmup_init ? 1e-6 * t : 1e-2;
    const int is_relative = config->semantics == HR_ADAFACTOR_TORCH || config->relative_step;
    r.rho = is_relative && relative < most ? relative : most;
    r.grad_factor = step_grad_factor(&config->step);
    return r;
}

/* Whether the step is scaled by RMS(param). */
HR_INLINE int adafactor_is_scaled(const hr_adafactor_config *config)
{
    return config->semantics == HR_ADAFACTOR_TORCH || config->scale_parameter;
}

/* eps1 of a tensor. A negative eps1 stands for the epsilon of the param's type, as torch's default
 * does. */
HR_INLINE double adafactor_eps1(const hr_adafactor_config *config, hr_dtype param)
{
    const double eps = param == HR_F32 ? 0x1p-23 : param == HR_BF16 ? 0x1p-7 : 0x1p-10;
    return config->eps1 >= 0 ? config->eps1 : eps;
}

/* The least value of the mean of the row variances, and the number that is added to squares. */
HR_INLINE double adafactor_least_mean(const hr_adafactor_config *config, double eps1)
{
    return config->semantics == HR_ADAFACTOR_TORCH ? eps1 : -INFINITY;
}

HR_INLINE double adafactor_added(const hr_adafactor_config *config, double eps1)
{
    return config->semantics == HR_ADAFACTOR_HF ? eps1 : 0.0;
}

/* The largest factor 1 / sqrt(variance) of a gradient, which torch bounds. */
HR_INLINE float adafactor_bound(const hr_adafactor_config *config, double eps1)
{
    return config->semantics == HR_ADAFACTOR_TORCH ? (float)(1.0 / eps1) : INFINITY;
}

/* The variance of a row or a column, from the mean of its squares. */
HR_INLINE float adafactor_variance(float variance, double mean, double weight)
{
    const double old = (double)variance, change = mean - old;
    const double from = weight < 0.5 ? old : mean, part = weight < 0.5 ? weight : weight - 1.0;
    return (float)(from + part * change);
}

/* The variance of an element of a vector; at most one of `weight` and `keep` is below 0.5. */
HR_INLINE float adafactor_element_variance(float variance, float square, float weight, float keep)
{
    const float change = square - variance;
    return weight < 0.5f ? variance + weight * change : square - keep * change;
}

/* The factors of a row, with the mean of the matrix's rows, and of a column. Their product is
 * 1 / sqrt(row * column / mean). */
HR_INLINE float adafactor_row_factor(float variance, double mean)
{
    return (float)sqrt(mean / (double)variance);
}

HR_INLINE float adafactor_column_factor(float variance)
{
    return (float)(1.0 / sqrt((double)variance));
}

/* The factors of a tiny matrix, whose rows and columns are so short that every pass over the elements
 * computes them again: in binary32, which many GPUs compute 64 times as fast as binary64. */
HR_INLINE float adafactor_tiny_row_factor(float variance, float root_of_mean)
{
    return root_of_mean / sqrtf(variance);
}

HR_INLINE float adafactor_tiny_column_factor(float variance)
{
    return 1.0f / sqrtf(variance);
}

/* The constants of a row: the update of an element is its gradient times min(factor * column,
 * bound). Both include the magnitude of the gradient's factor; adafactor_step holds its sign. */
typedef struct adafactor_row {
    float factor, bound;
} adafactor_row;

HR_INLINE adafactor_row adafactor_row_of(float factor, float bound, float grad_factor)
{
    adafactor_row row;
    row.factor = factor * fabsf(grad_factor);
    row.bound = bound * fabsf(grad_factor);
    return row;
}

HR_INLINE float adafactor_update(adafactor_row row, float grad, float column)
{
    const float factor = row.factor * column;
    return grad * (row.bound < factor ? row.bound : factor); /* NaN stays */
}

/* The parameter becomes param - (decay * param + step * update). */
typedef struct adafactor_step {
    float decay, step, beta1, one_minus_beta1;
} adafactor_step;

HR_INLINE adafactor_step adafactor_step_of(const hr_adafactor_config *config, adafactor_rates rates,
                                           double squared_param, double squared_update,
                                           double numel)
{
    const int is_torch = config->semantics == HR_ADAFACTOR_TORCH;
    double alpha = rates.rho;
    if (adafactor_is_scaled(config)) {
        const double rms = sqrt(squared_param / numel);
        alpha *= rms > config->eps2 ? rms : config->eps2;
    }
    /* The two implementations treat a NaN differently. */
    const double over = sqrt(squared_update / numel) / config->clip_threshold;
    const double clip = is_torch ? (over > 1.0 ? over : 1.0) : (over < 1.0 ? 1.0 : over);
    adafactor_step s;
    s.decay = (float)((is_torch ? rates.lr : alpha) * config->weight_decay);
    s.step = (float)(rates.grad_factor < 0.0f ? -alpha / clip : alpha / clip);
    s.beta1 = (float)config->beta1;
    s.one_minus_beta1 = (float)(1.0 - config->beta1);
    return s;
}

/* The new parameter. `exp_avg` is updated; NULL: no momentum. */
HR_INLINE float adafactor_apply(adafactor_step s, float param, float update, float *exp_avg)
{
    float change = s.step * update;
    if (exp_avg) {
        /* From the nearer end towards the other, as in adamw.h. */
        const float from = s.one_minus_beta1 < 0.5f ? *exp_avg : change;
        const float weight = s.one_minus_beta1 < 0.5f ? s.one_minus_beta1 : -s.beta1;
        change = *exp_avg = from + weight * (change - *exp_avg);
    }
    /* Not `param * (1 - decay)`: the rounding error of 1 - decay would add up over the steps. Nor
     * `decay * param` alone: 0 * inf would turn an infinite parameter into NaN. */
    return param - (s.decay != 0.0f ? s.decay * param + change : change);
}

/* ---- The kernels ----------------------------------------------------------------------------- */

/* The checked arguments of a call. */
typedef struct adafactor_args {
    const hr_tensor_list *params, *row_vars, *col_vars, *variances;
    const hr_tensor_list *exp_avgs, *rms_values; /* or NULL */
    const hr_tensor_list *steps;                 /* NULL: config->step.t */
    const hr_tensor_list *grads;
    const hr_adafactor_shape *shapes;
    const hr_adafactor_config *config;
    void *workspace;
} adafactor_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status adafactor_cpu(const adafactor_args *args);
hr_status adafactor_cuda(const adafactor_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
