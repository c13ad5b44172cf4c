/* cross_entropy_checks.h: what the cross entropies of logits and of a linear layer check alike. */
#ifndef HR_CROSS_ENTROPY_CHECKS_H
#define HR_CROSS_ENTROPY_CHECKS_H

#include "capi/check/check.h"
#include "kernels/loss/cross_entropy.h"

/* The members of a config from target_bytes on. */
hr_status ce_check_options(const char *function, const hr_cross_entropy_config *own);

/* The address `name` of the targets, and on the CPU each target. */
hr_status ce_check_targets(const char *function, const char *name, const cross_entropy_args *args,
                           const hr_exec *exec);

/* Refuses the first target that is neither a class nor ignored, if there is one. */
hr_status ce_check_stray(const char *function, const cross_entropy_args *args,
                         const ce_stray *stray);

#endif
