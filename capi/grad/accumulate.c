/* accumulate.c: hr_accumulate: checks, then the kernel of the device. */
#include "kernels/grad/accumulate.h"

#include <math.h>

#include "capi/check/check.h"

hr_status hr_accumulate(const hr_tensor_list *sums, const hr_tensor_list *compensations,
                        const hr_tensor_list *grads, const hr_accumulate_config *config,
                        const hr_exec *exec)
{
    HR_REQUIRE(config, "hr_accumulate: config is NULL");
    hr_accumulate_config own = HR_ACCUMULATE_CONFIG_INIT;
    HR_TRY(hr_copy_config("hr_accumulate", "config->", &own, sizeof own, config,
                          offsetof(hr_accumulate_config, factor), "HR_ACCUMULATE_CONFIG_INIT"));
    HR_REQUIRE(own.factor_ptr || isfinite((float)own.factor),
               "hr_accumulate: factor is %g, wanted a finite binary32", own.factor);
    HR_TRY(hr_check_scalar("hr_accumulate", "factor_ptr", own.factor_ptr, HR_F32));
    HR_TRY(hr_check_exec("hr_accumulate", exec));
    HR_REQUIRE(grads, "hr_accumulate: grads is NULL");
    const int64_t count = grads->count;
    HR_TRY(hr_check_list("hr_accumulate", "grads", grads, count, NULL, HR_FLOATS));
    HR_TRY(hr_check_list("hr_accumulate", "sums", sums, count, grads->numel, HR_BIT(HR_F32)));
    if (compensations)
        HR_TRY(hr_check_list("hr_accumulate", "compensations", compensations, count, grads->numel,
                             HR_BIT(HR_F32)));
    const accumulate_args args = {sums, compensations, grads, &own};
    if (exec->device == HR_CPU)
        return accumulate_cpu(&args);
    HR_RETURN_CUDA(accumulate_cuda(&args, exec), exec);
}
