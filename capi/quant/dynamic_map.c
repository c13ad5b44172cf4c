#include "kernels/quant/dynamic_map.h"

#include "capi/check/check.h"

hr_status hr_dynamic_map(float *values, int32_t is_signed)
{
    HR_REQUIRE(values, "hr_dynamic_map: values is NULL");
    for (int code = 0; code < 256; code++)
        values[code] = dynamic_value(code, is_signed != 0);
    return HR_OK;
}

int64_t hr_block_count(int64_t numel, int64_t block_size)
{
    return numel <= 0 || block_size <= 0 ? 0 : numel / block_size + (numel % block_size != 0);
}
