/* update_scale.c: hr_update_scale: checks, then the kernel of the device. */
#include "kernels/grad/update_scale.h"

#include <math.h>

#include "capi/check/check.h"

hr_status hr_update_scale(float *scale, int32_t *growth_tracker, int32_t *hysteresis_tracker,
                          const float *found_inf, const hr_update_scale_config *config,
                          const hr_exec *exec)
{
    HR_REQUIRE(config, "hr_update_scale: config is NULL");
    hr_update_scale_config own = HR_UPDATE_SCALE_CONFIG_INIT;
    HR_TRY(hr_copy_config("hr_update_scale", "config->", &own, sizeof own, config,
                          offsetof(hr_update_scale_config, growth_factor),
                          "HR_UPDATE_SCALE_CONFIG_INIT"));
    HR_REQUIRE(own.growth_factor > 1, "hr_update_scale: growth_factor is %g, wanted > 1",
               own.growth_factor);
    HR_REQUIRE(own.backoff_factor > 0 && own.backoff_factor < 1,
               "hr_update_scale: backoff_factor is %g, wanted (0, 1)", own.backoff_factor);
    HR_REQUIRE(own.min_scale >= 0 && isfinite((float)own.min_scale) &&
                   own.max_scale >= own.min_scale && own.max_scale > 0,
               "hr_update_scale: min_scale is %g and max_scale %g, wanted 0 <= min <= max, a min "
               "that is finite in binary32 and a max > 0",
               own.min_scale, own.max_scale);
    HR_REQUIRE(own.growth_interval >= 1, "hr_update_scale: growth_interval is %d, wanted >= 1",
               own.growth_interval);
    HR_REQUIRE(own.hysteresis >= 1, "hr_update_scale: hysteresis is %d, wanted >= 1",
               own.hysteresis);
    HR_REQUIRE(own.hysteresis == 1 || hysteresis_tracker,
               "hr_update_scale: hysteresis is %d, but hysteresis_tracker is NULL", own.hysteresis);
    HR_REQUIRE(scale && growth_tracker && found_inf, "hr_update_scale: %s is NULL",
               !scale            ? "scale"
               : !growth_tracker ? "growth_tracker"
                                 : "found_inf");
    HR_TRY(hr_check_scalar("hr_update_scale", "scale", scale, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "growth_tracker", growth_tracker, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "hysteresis_tracker", hysteresis_tracker, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "found_inf", found_inf, HR_F32));
    HR_TRY(hr_check_exec("hr_update_scale", exec));
    const update_scale_args args = {scale, growth_tracker, hysteresis_tracker, found_inf, own};
    if (exec->device == HR_CPU)
        return update_scale_cpu(&args);
    HR_RETURN_CUDA(update_scale_cuda(&args, exec), exec);
}
