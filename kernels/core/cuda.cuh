/*
 * cuda.cuh: what every CUDA kernel shares.
 *
 * The same .cu files also compile as C++ for the host under the emulator in tests/c/emulator, which
 * brings its own CUDA types and HR_LAUNCH. So they use plain CUDA C, no library, and launch only
 * through HR_LAUNCH.
 */
#ifndef HR_CUDA_CUH
#define HR_CUDA_CUH

#if !defined(HR_EMULATE)
#include <cuda_runtime.h>
#define HR_LAUNCH(kernel, grid, block, shared_bytes, stream, ...) \
    kernel<<<grid, block, shared_bytes, stream>>>(__VA_ARGS__)
#define HR_DYNAMIC_SHARED(type, name) extern __shared__ __align__(16) type name[]
#endif

#include "kernels/core/dtype.h"
#include "kernels/core/runtime.h"

/* The status of the launch just made, with CUDA's words for hr_last_error(). */
static inline hr_status cuda_launch_status(const char *function)
{
    const cudaError_t error = cudaGetLastError();
    if (error == cudaSuccess)
        return HR_OK;
    return hr_fail(HR_CUDA_ERROR, "%s: the launch failed: %s", function, cudaGetErrorString(error));
}

#endif
