/* adamw_checks.h: checks hr_adamw_config, for hr_adamw and hr_adamw8bit. */
#ifndef HR_ADAMW_CHECKS_H
#define HR_ADAMW_CHECKS_H

#include "capi/check/check.h"

/* Copies the config over `own`, which holds the defaults, and checks it. `path` comes before the
 * name of a member in messages, such as "config->". `has_steps`: the call has a list of
 * counters. */
hr_status adamw_check_config(const char *function, const char *path, hr_adamw_config *own,
                             const hr_adamw_config *config, int has_steps);

#endif
