/*
 * muon_momentum.h: the first pass of Muon: the formula of one element, its constants, and the
 * kernels. The rule is documented at hr_muon_momentum in headroom.h.
 *
 * Products and sums are fused where torch's lerp fuses them, so that moments are torch's.
 */
#ifndef HR_MUON_MOMENTUM_H
#define HR_MUON_MOMENTUM_H

#include <math.h>

#include "kernels/core/step.h"
#include "kernels/optim/muon_matrix.h"

/* Of a + weight * (b - a), computed from the nearer end: `from_b` says which. */
typedef struct muon_lerp {
    float part;
    int32_t from_b;
} muon_lerp;

typedef struct muon_momentum_constants {
    float grad_factor; /* clip_coef / grad_scale, negative to maximize */
    muon_lerp mix;     /* from the moment to the gradient */
    muon_lerp look;    /* from the gradient to the new moment */
    int32_t nesterov;
} muon_momentum_constants;

typedef struct muon_momentum_values {
    float moment, update;
} muon_momentum_values;

HR_INLINE muon_lerp muon_lerp_of(double weight)
{
    const float w = (float)weight;
    muon_lerp lerp;
    lerp.from_b = !(w < 0.5f);
    lerp.part = lerp.from_b ? w - 1.0f : w;
    return lerp;
}

HR_INLINE float muon_between(float a, float b, muon_lerp lerp)
{
    return fmaf(lerp.part, b - a, lerp.from_b ? b : a);
}

HR_INLINE muon_momentum_values muon_momentum_element(muon_momentum_constants c, float grad,
                                                     float moment)
{
    const float g = grad * c.grad_factor;
    muon_momentum_values x;
    x.moment = muon_between(moment, g, c.mix);
    x.update = c.nesterov ? muon_between(g, x.moment, c.look) : x.moment;
    return x;
}

/* Reads the scalars that `config` points to, so it must run where these live. */
HR_INLINE muon_momentum_constants muon_momentum_fold(const hr_muon_momentum_config *config)
{
    muon_momentum_constants c;
    c.grad_factor = step_grad_factor(&config->step);
    c.mix = muon_lerp_of(1.0 - config->momentum);
    c.look = muon_lerp_of(config->momentum);
    c.nesterov = config->nesterov != 0;
    return c;
}

/* The checked arguments of a call. */
typedef struct muon_momentum_args {
    const hr_tensor_list *updates;
    float *squares;
    const hr_tensor_list *moments;
    const hr_tensor_list *absmaxs; /* NULL: moments are numbers, not codes */
    const hr_tensor_list *grads;
    const hr_muon_matrix *matrices;
    const hr_muon_momentum_config *config;
    double *sums; /* of the chunks of every matrix */
} muon_momentum_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status muon_momentum_cpu(const muon_momentum_args *args);
hr_status muon_momentum_cuda(const muon_momentum_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
