#include "capi/check/adamw_checks.h"

#include <inttypes.h>
#include <math.h>

#include "kernels/core/dtype.h"

hr_status adamw_check_config(const char *function, const char *path, const hr_adamw_config *config,
                             int has_steps)
{
    HR_REQUIRE(config->size == sizeof *config,
               "%s: %ssize is %zu, wanted %zu; start from HR_ADAMW_CONFIG_INIT", function, path,
               config->size, sizeof *config);
    HR_REQUIRE(config->lr_ptr || (isfinite(config->lr) && config->lr >= 0),
               "%s: lr is %g, wanted a finite number >= 0", function, config->lr);
    HR_REQUIRE(config->beta1 >= 0 && config->beta1 < 1, "%s: beta1 is %g, wanted [0, 1)", function,
               config->beta1);
    HR_REQUIRE(config->beta2 >= 0 && config->beta2 < 1, "%s: beta2 is %g, wanted [0, 1)", function,
               config->beta2);
    HR_REQUIRE(isfinite(config->eps) && config->eps >= 0,
               "%s: eps is %g, wanted a finite number >= 0", function, config->eps);
    HR_REQUIRE(isfinite(config->weight_decay) && config->weight_decay >= 0,
               "%s: weight_decay is %g, wanted a finite number >= 0", function,
               config->weight_decay);
    HR_REQUIRE(has_steps || config->step >= 1, "%s: %sstep is %" PRId64 ", wanted 1 or more",
               function, path, config->step);
    HR_TRY(hr_check_scalar(function, "lr_ptr", config->lr_ptr, config->lr_dtype));
    HR_TRY(hr_check_scalar(function, "grad_scale", config->grad_scale, HR_F32));
    HR_TRY(hr_check_scalar(function, "found_inf", config->found_inf, HR_F32));
    HR_TRY(hr_check_scalar(function, "clip_coef", config->clip_coef, HR_F32));
    return HR_OK;
}

hr_status adamw_check_steps(const char *function, const hr_tensor_list *steps, int64_t count)
{
    if (!steps)
        return HR_OK;
    HR_TRY(hr_check_list(function, "steps", steps, count, NULL, HR_SCALARS));
    for (int64_t k = 0; k < count; k++)
        HR_REQUIRE(steps->numel[k] == 1, "%s: steps[%" PRId64 "] has numel %" PRId64 ", wanted 1",
                   function, k, steps->numel[k]);
    return HR_OK;
}

hr_status adamw_check_scalars(const char *function, const void *lr_ptr, hr_dtype lr_dtype,
                              const float *grad_scale, const hr_tensor_list *steps)
{
    for (int64_t k = 0; steps && k < steps->count; k++) {
        const double step = hr_load_scalar(steps->data[k], steps->dtype[k]);
        HR_REQUIRE(step >= 0 && step < 9007199254740992.0,
                   "%s: steps[%" PRId64 "] holds %g, wanted 0 or more and below 2^53", function, k,
                   step);
    }
    if (lr_ptr) {
        const double lr = hr_load_scalar(lr_ptr, lr_dtype);
        HR_REQUIRE(isfinite(lr) && lr >= 0, "%s: *lr_ptr is %g, wanted a finite number >= 0",
                   function, lr);
    }
    HR_REQUIRE(!grad_scale || (isfinite(*grad_scale) && *grad_scale > 0),
               "%s: *grad_scale is %g, wanted a finite number > 0", function,
               grad_scale ? (double)*grad_scale : 0.0);
    return HR_OK;
}

hr_status adamw_check_values(const char *function, const hr_adamw_config *config,
                             const hr_tensor_list *steps)
{
    return adamw_check_scalars(function, config->lr_ptr, config->lr_dtype, config->grad_scale,
                               steps);
}
