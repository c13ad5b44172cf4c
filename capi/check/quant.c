/* quant.c: checks lists of scales. */
#include "capi/check/quant.h"

#include <inttypes.h>

hr_status quant_check_absmaxs(const char *function, const char *name, const hr_tensor_list *list,
                              const hr_tensor_list *of, int32_t block_size)
{
    HR_TRY(hr_check_list(function, name, list, of->count, NULL, HR_BIT(HR_F32)));
    for (int64_t k = 0; k < of->count; k++) {
        const int64_t blocks = hr_block_count(of->numel[k], block_size);
        HR_REQUIRE(list->numel[k] == blocks,
                   "%s: %s[%" PRId64 "] has numel %" PRId64 ", wanted %" PRId64 ", one per %" PRId32
                   " elements",
                   function, name, k, list->numel[k], blocks, block_size);
    }
    return HR_OK;
}
