/* update_scale_cpu.c: the update of the loss scale on the CPU. */
#include "kernels/core/runtime.h"
#include "kernels/grad/update_scale.h"

hr_status update_scale_cpu(const update_scale_args *args)
{
    update_scale(args);
    return HR_OK;
}
