/* step.h: checks hr_step_config, for every optimizer's step. */
#ifndef HR_CHECK_STEP_H
#define HR_CHECK_STEP_H

#include "capi/check/check.h"

/* Checks everything that can be checked without reading device memory. `path` comes before "step"
 * in messages, such as "config->". `has_steps`: the call has a list of counters. */
hr_status step_check_config(const char *function, const char *path, const hr_step_config *step,
                            int has_steps);

/* Checks the list of counters, which may be NULL. */
hr_status step_check_steps(const char *function, const hr_tensor_list *steps, int64_t count);

/* Checks the values of scalars and counters, which a call on the CPU can read. */
hr_status step_check_values(const char *function, const hr_step_config *step,
                            const hr_tensor_list *steps);

/* Checks the value of *grad_scale in host memory; grad_scale may be NULL. */
hr_status step_check_grad_scale(const char *function, const float *grad_scale);

#endif
