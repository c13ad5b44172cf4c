/* weights_checks.h: what the optimizers' entry points refuse of hr_weights. */
#ifndef HR_WEIGHTS_CHECKS_H
#define HR_WEIGHTS_CHECKS_H

#include "capi/check/check.h"

/* NULL is allowed. `params` has been checked. */
hr_status weights_check(const char *function, const hr_weights *weights,
                        const hr_tensor_list *params);

#endif
