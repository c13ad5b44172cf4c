/* copy_rows.cu: copies rows on a CUDA device, with the copy engine's own pitch. */
#include "kernels/core/copy.h"
#include "kernels/core/cuda.cuh"

hr_status copy_rows_cuda(void *to, int64_t to_pitch, const void *from, int64_t from_pitch,
                         int64_t bytes, int64_t rows, const hr_exec *exec)
{
    const cudaStream_t stream = (cudaStream_t)exec->stream;
    const bool dense = rows <= 1 || (to_pitch == bytes && from_pitch == bytes);
    const cudaError_t error =
        dense ? cudaMemcpyAsync(to, from, (size_t)(bytes * rows), cudaMemcpyDeviceToDevice, stream)
              : cudaMemcpy2DAsync(to, (size_t)to_pitch, from, (size_t)from_pitch, (size_t)bytes,
                                  (size_t)rows, cudaMemcpyDeviceToDevice, stream);
    if (error == cudaSuccess)
        return HR_OK;
    (void)cudaGetLastError(); /* or the next launch would report it again */
    return hr_fail(HR_CUDA_ERROR, "a copy of rows failed: %s", cudaGetErrorString(error));
}
