/* quant.h: checks the scales of blocks, for all functions that take them. */
#ifndef HR_CHECK_QUANT_H
#define HR_CHECK_QUANT_H

#include "capi/check/check.h"

/* Checks a list of scales, one per block of each tensor of `of`, which has been checked already. */
hr_status quant_check_absmaxs(const char *function, const char *name, const hr_tensor_list *list,
                              const hr_tensor_list *of, int32_t block_size);

#endif
