/* update_scale_cuda.cu: one thread, so that the host need not know whether a step overflowed. */
#include "kernels/core/cuda.cuh"
#include "kernels/grad/update_scale.h"

static __global__ void update_scale_kernel(update_scale_args args)
{
    update_scale(&args);
}

hr_status update_scale_cuda(const update_scale_args *args, const hr_exec *exec)
{
    HR_LAUNCH(update_scale_kernel, 1, 1, 0, exec->stream, *args);
    return cuda_launch_status("hr_update_scale");
}
