#include "kernels/grad/update_scale.h"

#include <math.h>

#include "capi/check/check.h"

hr_status hr_update_scale(float *scale, int32_t *growth_tracker, int32_t *hysteresis_tracker,
                          const float *found_inf, const hr_update_scale_config *config,
                          const hr_exec *exec)
{
    HR_REQUIRE(config, "hr_update_scale: config is NULL");
    HR_REQUIRE(config->size == sizeof *config,
               "hr_update_scale: config->size is %zu, wanted %zu; start from "
               "HR_UPDATE_SCALE_CONFIG_INIT",
               config->size, sizeof *config);
    HR_REQUIRE(config->growth_factor > 1, "hr_update_scale: growth_factor is %g, wanted > 1",
               config->growth_factor);
    HR_REQUIRE(config->backoff_factor > 0 && config->backoff_factor < 1,
               "hr_update_scale: backoff_factor is %g, wanted (0, 1)", config->backoff_factor);
    HR_REQUIRE(config->min_scale >= 0 && isfinite((float)config->min_scale) &&
                   config->max_scale >= config->min_scale && config->max_scale > 0,
               "hr_update_scale: min_scale is %g and max_scale %g, wanted 0 <= min <= max, a min "
               "that is finite in binary32 and a max > 0",
               config->min_scale, config->max_scale);
    HR_REQUIRE(config->growth_interval >= 1, "hr_update_scale: growth_interval is %d, wanted >= 1",
               config->growth_interval);
    HR_REQUIRE(config->hysteresis >= 1, "hr_update_scale: hysteresis is %d, wanted >= 1",
               config->hysteresis);
    HR_REQUIRE(config->hysteresis == 1 || hysteresis_tracker,
               "hr_update_scale: hysteresis is %d, but hysteresis_tracker is NULL",
               config->hysteresis);
    HR_REQUIRE(scale && growth_tracker && found_inf, "hr_update_scale: %s is NULL",
               !scale            ? "scale"
               : !growth_tracker ? "growth_tracker"
                                 : "found_inf");
    HR_TRY(hr_check_scalar("hr_update_scale", "scale", scale, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "growth_tracker", growth_tracker, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "hysteresis_tracker", hysteresis_tracker, HR_F32));
    HR_TRY(hr_check_scalar("hr_update_scale", "found_inf", found_inf, HR_F32));
    HR_TRY(hr_check_exec("hr_update_scale", exec));
    const update_scale_args args = {scale, growth_tracker, hysteresis_tracker, found_inf, *config};
    if (exec->device == HR_CPU)
        return update_scale_cpu(&args);
    HR_RETURN_CUDA(update_scale_cuda(&args, exec), exec);
}
