/* dynamic_map.c: hr_dynamic_map. */
#include "kernels/quant/dynamic_map.h"

#include "capi/check/check.h"

hr_status hr_dynamic_map(float *values, int32_t is_signed)
{
    HR_REQUIRE(values, "hr_dynamic_map: values is NULL");
    for (int code = 0; code < 256; code++)
        values[code] = dynamic_value(code, is_signed != 0);
    return HR_OK;
}
