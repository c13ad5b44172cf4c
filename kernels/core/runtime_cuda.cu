/* runtime_cuda.cu: the device guard of the C interface. */
#include "kernels/core/cuda.cuh"

/* The oldest driver that this build runs on. A runtime of CUDA 13 refuses older ones; that of CUDA
 * 12 runs on those before, of which the first with 32 KB of launch parameters is R530. */
#if defined(CUDART_VERSION) && CUDART_VERSION >= 13000
#define OLDEST_DRIVER "R580, that of a build with CUDA 12.8 or 12.9 is R530"
#else
#define OLDEST_DRIVER "R530"
#endif

hr_status hr_cuda_enter(int32_t device, int32_t *previous)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* or the next launch would report it again */
        return hr_fail(HR_NO_DEVICE,
                       "exec->device is %d, but CUDA found no device: %s; the oldest NVIDIA driver "
                       "that this build runs on is " OLDEST_DRIVER " (nvidia-smi shows yours)",
                       device, cudaGetErrorString(error));
    }
    if (device < 0 || device >= count)
        return hr_fail(HR_NO_DEVICE, "exec->device is %d, wanted HR_CPU (%d) or 0 to %d", device,
                       HR_CPU, count - 1);
    int current = 0;
    error = cudaGetDevice(&current);
    if (error == cudaSuccess && current != device)
        error = cudaSetDevice(device);
    if (error != cudaSuccess) {
        (void)cudaGetLastError();
        return hr_fail(HR_CUDA_ERROR, "exec->device %d cannot be used: %s", device,
                       cudaGetErrorString(error));
    }
    *previous = current;
    return HR_OK;
}

void hr_cuda_leave(int32_t previous)
{
    int current = previous;
    if (cudaGetDevice(&current) == cudaSuccess && current != previous)
        (void)cudaSetDevice(previous);
}

hr_status hr_cuda_capability(int32_t device, int32_t *capability)
{
    int32_t previous = 0;
    const hr_status status = hr_cuda_enter(device, &previous);
    if (status != HR_OK)
        return status;
    hr_cuda_leave(previous);
    int major = 0, minor = 0;
    cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error != cudaSuccess)
        return hr_fail(HR_CUDA_ERROR, "exec->device %d does not say its compute capability: %s",
                       device, cudaGetErrorString(error));
    *capability = 10 * major + minor;
    return HR_OK;
}
