/* cross_entropy_checks.c: checks options and targets of a cross entropy. */
#include "capi/loss/cross_entropy_checks.h"

#include <inttypes.h>
#include <math.h>

hr_status ce_check_options(const char *function, const hr_cross_entropy_config *own)
{
    HR_REQUIRE(own->target_bytes == 4 || own->target_bytes == 8,
               "%s: config->target_bytes is %d, wanted 4 or 8", function, (int)own->target_bytes);
    HR_REQUIRE(own->reduction >= HR_REDUCE_SUM && own->reduction <= HR_REDUCE_MEAN_OR_ZERO,
               "%s: config->reduction is %d, wanted 0, 1 or 2", function, (int)own->reduction);
    HR_REQUIRE(own->label_smoothing >= 0 && own->label_smoothing <= 1,
               "%s: config->label_smoothing is %g, wanted a number from 0 to 1", function,
               own->label_smoothing);
    HR_REQUIRE(own->softcap >= 0 && isfinite((float)own->softcap) &&
                   (own->softcap == 0 || (float)own->softcap > 0),
               "%s: config->softcap is %g, wanted a finite binary32 of 0 or more", function,
               own->softcap);
    HR_REQUIRE(own->z_loss >= 0 && isfinite((float)own->z_loss),
               "%s: config->z_loss is %g, wanted a finite binary32 of 0 or more", function,
               own->z_loss);
    return HR_OK;
}

hr_status ce_check_stray(const char *function, const cross_entropy_args *args,
                         const ce_stray *stray)
{
    HR_REQUIRE(stray->row < 0,
               "%s: target[%" PRId64 "] is %" PRId64 ", wanted a class from 0 to %" PRId64
               ", or ignore_index, %" PRId64,
               function, stray->row, stray->target, args->all - 1, args->config.ignore_index);
    return HR_OK;
}

hr_status ce_check_targets(const char *function, const char *name, const cross_entropy_args *args,
                           const hr_exec *exec)
{
    HR_REQUIRE(args->target || args->rows == 0, "%s: %s is NULL", function, name);
    HR_REQUIRE((uintptr_t)args->target % (size_t)args->config.target_bytes == 0,
               "%s: %s is at %p, which is not a multiple of %d bytes", function, name, args->target,
               (int)args->config.target_bytes);
    if (exec->device != HR_CPU)
        return HR_OK; /* reading targets of a device would wait for it */
    const ce_stray stray = cross_entropy_stray_cpu(args);
    return ce_check_stray(function, args, &stray);
}
