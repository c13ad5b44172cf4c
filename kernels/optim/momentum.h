/*
 * momentum.h: optimizers with one moment or none, SGD and Lion: the formulas of one element, the
 * constants they need, and the kernels. The rules are documented at hr_momentum in headroom.h.
 *
 * SGD fuses a product and a sum wherever torch's vector code does, so that its results are torch's.
 *
 * On the importance of initialization and momentum in deep learning, Sutskever et al., ICML 2013.
 * Symbolic discovery of optimization algorithms, Chen et al., arXiv:2302.06675 (Lion).
 */
#ifndef HR_MOMENTUM_H
#define HR_MOMENTUM_H

#include <math.h>

#include "kernels/core/step.h"

typedef struct momentum_constants {
    float grad_factor; /* clip_coef / grad_scale, negative to maximize */
    float l2;          /* SGD: weight_decay */
    float keep;        /* Lion: 1 - lr * weight_decay */
    float beta;        /* of the old moment in the new one */
    float mix;         /* of the gradient in the new moment */
    float look;        /* SGD: of the new moment in a step of Nesterov's; Lion: beta1 */
    float rest;        /* Lion: 1 - beta1 */
    float step_size;   /* -lr */
} momentum_constants;

/* Which formula. It is the same for all elements of a call: kernels have it as literals. */
typedef struct momentum_kind {
    int lion;
    int plain; /* SGD without a moment */
    int nesterov, l2, skip_nonfinite;
} momentum_kind;

typedef struct momentum_values {
    float param, grad, moment;
} momentum_values;

HR_INLINE float momentum_sign(float x)
{
    const float one = hr_float((hr_bits(x) & 0x80000000u) | 0x3F800000u);
    return x > 0.0f || x < 0.0f ? one : x; /* zeros and NaNs stay */
}

HR_INLINE momentum_values momentum_lion(momentum_constants c, momentum_values x)
{
    const float grad = x.grad * c.grad_factor;
    const float direction = momentum_sign(c.look * x.moment + c.rest * grad);
    x.param = c.keep * x.param + c.step_size * direction;
    x.moment = c.beta * x.moment + c.mix * grad;
    return x;
}

HR_INLINE momentum_values momentum_sgd(momentum_constants c, momentum_values x, momentum_kind kind)
{
    const float scaled = x.grad * c.grad_factor;
    /* Not with l2 0 alone: 0 * inf would turn an infinite parameter into NaN. */
    const float grad = kind.l2 ? fmaf(c.l2, x.param, scaled) : scaled;
    float direction = grad;
    if (!kind.plain) {
        x.moment = fmaf(c.mix, grad, c.beta * x.moment);
        direction = kind.nesterov ? fmaf(c.look, x.moment, grad) : x.moment;
    }
    x.param = fmaf(c.step_size, direction, x.param);
    return x;
}

HR_INLINE momentum_values momentum_element(momentum_constants c, momentum_values x,
                                           momentum_kind kind)
{
    const momentum_values y = kind.lion ? momentum_lion(c, x) : momentum_sgd(c, x, kind);
    const uint32_t magnitude = hr_bits(x.grad * c.grad_factor) & 0x7FFFFFFFu;
    const int stays = kind.skip_nonfinite && magnitude >= 0x7F800000u;
    x.param = stays ? x.param : y.param;
    x.moment = stays ? x.moment : y.moment;
    return x;
}

static inline momentum_kind momentum_kind_of(const hr_momentum_config *config)
{
    momentum_kind kind;
    kind.lion = config->rule == HR_LION;
    kind.plain = !kind.lion && config->momentum == 0.0;
    kind.nesterov = !kind.lion && config->nesterov;
    kind.l2 = !kind.lion && (float)config->weight_decay != 0.0f;
    kind.skip_nonfinite = config->step.skip_nonfinite != 0;
    return kind;
}

/* The constants of step t. Reads the scalars that `config` points to, so it must run where these
 * live. */
HR_INLINE momentum_constants momentum_fold(const hr_momentum_config *config, double t)
{
    const double lr = step_lr(&config->step);
    momentum_constants c;
    c.grad_factor = step_grad_factor(&config->step);
    c.step_size = (float)-lr;
    if (config->rule == HR_LION) {
        c.l2 = 0.0f;
        c.keep = (float)(1.0 - lr * config->weight_decay);
        c.beta = (float)config->beta2;
        c.mix = (float)(1.0 - config->beta2);
        c.look = (float)config->beta1;
        c.rest = (float)(1.0 - config->beta1);
    } else {
        c.l2 = (float)config->weight_decay;
        c.keep = 1.0f;
        c.beta = t > 1.0 ? (float)config->momentum : 0.0f;
        c.mix = t > 1.0 ? (float)(1.0 - config->dampening) : 1.0f; /* torch damps from step 2 on */
        c.look = (float)config->momentum;
        c.rest = 0.0f;
    }
    return c;
}

/* The checked arguments of a call. */
typedef struct momentum_args {
    const hr_tensor_list *params;
    const hr_tensor_list *moments; /* NULL: SGD without momentum */
    const hr_tensor_list *absmaxs; /* NULL: moments are numbers, not codes */
    const hr_tensor_list *steps;   /* NULL: config->step.t */
    const hr_tensor_list *grads;
    const hr_momentum_config *config;
} momentum_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status momentum_cpu(const momentum_args *args);
hr_status momentum_cuda(const momentum_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
