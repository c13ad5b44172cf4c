/* weights_checks.h: what the optimizers' entry points refuse of hr_weights. */
#ifndef HR_WEIGHTS_CHECKS_H
#define HR_WEIGHTS_CHECKS_H

#include "capi/check/check.h"

/* Copies *weights into `own`, with defaults for what an older header lacks, and lets *weights point
 * there. A *weights of NULL stays. */
hr_status weights_copy(const char *function, hr_weights *own, const hr_weights **weights);

/* NULL is allowed. `params` has been checked. */
hr_status weights_check(const char *function, const hr_weights *weights,
                        const hr_tensor_list *params);

#endif
