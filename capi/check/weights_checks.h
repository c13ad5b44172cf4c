/* weights_checks.h: checks hr_weights, for the optimizers and for hr_join_weights and
 * hr_split_weights. */
#ifndef HR_WEIGHTS_CHECKS_H
#define HR_WEIGHTS_CHECKS_H

#include "capi/check/check.h"

/* Copies *weights over `own`, which holds the defaults, and lets *weights point there. Does nothing
 * if *weights is NULL. */
hr_status weights_copy(const char *function, hr_weights *own, const hr_weights **weights);

/* Checks the weights of `params`, which have been checked already; `weights` may be NULL. */
hr_status weights_check(const char *function, const hr_weights *weights,
                        const hr_tensor_list *params);

#endif
