/* runtime_cuda.cu: the device guard of the C interface. */
#include "kernels/core/cuda.cuh"

hr_status hr_cuda_enter(int32_t device, int32_t *previous)
{
    int count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
        (void)cudaGetLastError(); /* or the next launch would report it again */
        return hr_fail(HR_NO_DEVICE, "exec->device is %d, but CUDA found no device: %s", device,
                       cudaGetErrorString(error));
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
