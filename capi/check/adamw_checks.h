/* adamw_checks.h: what the entry points with Adam's rule refuse alike. */
#ifndef HR_ADAMW_CHECKS_H
#define HR_ADAMW_CHECKS_H

#include "capi/check/check.h"

/* `path` is what the caller writes before a member, such as "config->". */
hr_status adamw_check_config(const char *function, const char *path, const hr_adamw_config *config,
                             int has_steps);

/* Counters; NULL is allowed. */
hr_status adamw_check_steps(const char *function, const hr_tensor_list *steps, int64_t count);

/* What lies in host memory can be looked at too. */
hr_status adamw_check_scalars(const char *function, const void *lr_ptr, hr_dtype lr_dtype,
                              const float *grad_scale, const hr_tensor_list *steps);
hr_status adamw_check_values(const char *function, const hr_adamw_config *config,
                             const hr_tensor_list *steps);

#endif
