/* step.h: what every optimizer's entry point checks of hr_step_config. */
#ifndef HR_CHECK_STEP_H
#define HR_CHECK_STEP_H

#include "capi/check/check.h"

/* `path` is what the caller writes before `step`, such as "config->". */
hr_status step_check_config(const char *function, const char *path, const hr_step_config *step,
                            int has_steps);

/* The list of counters, which may be NULL. */
hr_status step_check_steps(const char *function, const hr_tensor_list *steps, int64_t count);

/* The values of scalars and counters in host memory, for a call on the CPU. */
hr_status step_check_values(const char *function, const hr_step_config *step,
                            const hr_tensor_list *steps);

/* *grad_scale in host memory; NULL is allowed. */
hr_status step_check_grad_scale(const char *function, const float *grad_scale);

#endif
