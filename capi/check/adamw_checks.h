/* adamw_checks.h: what the entry points with Adam's rule check of hr_adamw_config. */
#ifndef HR_ADAMW_CHECKS_H
#define HR_ADAMW_CHECKS_H

#include "capi/check/check.h"

/* Copies the config into `own`, with defaults for what an older header lacks, and checks it. `path`
 * is what the caller writes before a member, such as "config->". */
hr_status adamw_check_config(const char *function, const char *path, hr_adamw_config *own,
                             const hr_adamw_config *config, int has_steps);

#endif
