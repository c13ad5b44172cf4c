// adamw_options.h: the options that the ops of Adam's rule share, as the C interface takes them.
#pragma once

#include "torch_ext/core/step.h"

namespace headroom
{

struct Options {
    StepOptions step;
    double beta1, beta2, weight_decay, eps;
    bool amsgrad, decoupled;
};

inline hr_adamw_config config_of(const Options &o, const View &like)
{
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    set_step(config.step, o.step, like);
    config.beta1 = o.beta1;
    config.beta2 = o.beta2;
    config.weight_decay = o.weight_decay;
    config.eps = o.eps;
    config.amsgrad = o.amsgrad;
    config.decoupled = o.decoupled;
    return config;
}

} // namespace headroom
