/* step.c: checks hr_step_config, its scalars and its counters. */
#include "capi/check/step.h"

#include <inttypes.h>
#include <math.h>

#include "kernels/core/dtype.h"

hr_status step_check_config(const char *function, const char *path, const hr_step_config *step,
                            int has_steps)
{
    HR_REQUIRE(step->lr_ptr || (isfinite(step->lr) && step->lr >= 0),
               "%s: lr is %g, wanted a finite number >= 0", function, step->lr);
    HR_REQUIRE(has_steps || step->t >= 1, "%s: %sstep.t is %" PRId64 ", wanted 1 or more", function,
               path, step->t);
    for (size_t i = 0; i < sizeof step->reserved / sizeof step->reserved[0]; i++)
        HR_REQUIRE(step->reserved[i] == 0,
                   "%s: %sstep.reserved[%zu] is %" PRId32 ", wanted 0; start from an INIT macro",
                   function, path, i, step->reserved[i]);
    HR_TRY(hr_check_scalar(function, "lr_ptr", step->lr_ptr, step->lr_dtype));
    HR_TRY(hr_check_scalar(function, "grad_scale", step->grad_scale, HR_F32));
    HR_TRY(hr_check_scalar(function, "found_inf", step->found_inf, HR_F32));
    HR_TRY(hr_check_scalar(function, "clip_coef", step->clip_coef, HR_F32));
    return HR_OK;
}

hr_status step_check_steps(const char *function, const hr_tensor_list *steps, int64_t count)
{
    if (!steps)
        return HR_OK;
    HR_TRY(hr_check_list(function, "steps", steps, count, NULL, HR_SCALARS));
    for (int64_t k = 0; k < count; k++)
        HR_REQUIRE(steps->numel[k] == 1, "%s: steps[%" PRId64 "] has numel %" PRId64 ", wanted 1",
                   function, k, steps->numel[k]);
    return HR_OK;
}

hr_status step_check_grad_scale(const char *function, const float *grad_scale)
{
    HR_REQUIRE(!grad_scale || (isfinite(*grad_scale) && *grad_scale > 0),
               "%s: *grad_scale is %g, wanted a finite number > 0", function,
               grad_scale ? (double)*grad_scale : 0.0);
    return HR_OK;
}

hr_status step_check_values(const char *function, const hr_step_config *step,
                            const hr_tensor_list *steps)
{
    for (int64_t k = 0; steps && k < steps->count; k++) {
        const double done = hr_load_scalar(steps->data[k], steps->dtype[k]);
        HR_REQUIRE(done >= 0 && done < 9007199254740992.0,
                   "%s: steps[%" PRId64 "] holds %g, wanted 0 or more and below 2^53", function, k,
                   done);
    }
    if (step->lr_ptr) {
        const double lr = hr_load_scalar(step->lr_ptr, step->lr_dtype);
        HR_REQUIRE(isfinite(lr) && lr >= 0, "%s: *lr_ptr is %g, wanted a finite number >= 0",
                   function, lr);
    }
    HR_TRY(step_check_grad_scale(function, step->grad_scale));
    return HR_OK;
}
