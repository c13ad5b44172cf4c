// step.h: fills hr_step_config from the arguments that every optimizer's op has.
#pragma once

#include "torch_ext/core/tensor.h"

namespace headroom
{

struct StepOptions {
    double lr;
    bool maximize, skip_nonfinite;
    const OptionalTensor &lr_tensor, &grad_scale, &found_inf, &clip_coef;
};

// Sets the learning rate from a tensor: its address if it is on the device of the call, its value
// if it is on the CPU.
inline void set_lr(hr_step_config &step, const View &lr, const View &like)
{
    const int dtype = dtype_of(lr.torch_dtype);
    if (lr.numel() != 1)
        fail("lr_tensor has " + std::to_string(lr.numel()) + " elements, wanted 1");
    if (dtype != HR_F32 && dtype != HR_F64)
        fail("lr_tensor must be float32 or float64");
    require_memory(lr, "lr_tensor");
    step.lr_dtype = static_cast<hr_dtype>(dtype);
    if (lr.is_with(like))
        step.lr_ptr = lr.data;
    else if (lr.is_cpu())
        step.lr = dtype == HR_F64 ? *static_cast<const double *>(lr.data)
                                  : *static_cast<const float *>(lr.data);
    else
        fail("lr_tensor is on " + lr.device_name() + ", but params[0] is on " + like.device_name() +
             "; wanted that device or the CPU");
}

inline void set_step(hr_step_config &step, const StepOptions &o, const View &like)
{
    step.lr = o.lr;
    step.maximize = o.maximize;
    step.skip_nonfinite = o.skip_nonfinite;
    step.grad_scale = scalar_of(o.grad_scale, like, "grad_scale");
    step.found_inf = scalar_of(o.found_inf, like, "found_inf");
    step.clip_coef = scalar_of(o.clip_coef, like, "clip_coef");
    if (o.lr_tensor)
        set_lr(step, View(*o.lr_tensor), like);
}

} // namespace headroom
