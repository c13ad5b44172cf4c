/* adamw_checks.c: checks hr_adamw_config. */
#include "capi/check/adamw_checks.h"

#include <math.h>

#include "capi/check/step.h"

hr_status adamw_check_config(const char *function, const char *path, hr_adamw_config *own,
                             const hr_adamw_config *config, int has_steps)
{
    HR_TRY(hr_copy_config(function, path, own, sizeof *own, config,
                          offsetof(hr_adamw_config, beta1), "HR_ADAMW_CONFIG_INIT"));
    HR_TRY(step_check_config(function, path, &own->step, has_steps));
    HR_REQUIRE(own->beta1 >= 0 && own->beta1 < 1, "%s: beta1 is %g, wanted [0, 1)", function,
               own->beta1);
    HR_REQUIRE(own->beta2 >= 0 && own->beta2 < 1, "%s: beta2 is %g, wanted [0, 1)", function,
               own->beta2);
    HR_REQUIRE(isfinite(own->eps) && own->eps >= 0, "%s: eps is %g, wanted a finite number >= 0",
               function, own->eps);
    HR_REQUIRE(isfinite(own->weight_decay) && own->weight_decay >= 0,
               "%s: weight_decay is %g, wanted a finite number >= 0", function, own->weight_decay);
    return HR_OK;
}
