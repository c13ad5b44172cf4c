/*
 * columns_cuda.cu: sums of columns: a block takes 32 of them, and each of its 8 warps every eighth
 * row, so that a warp reads neighbors; what the warps have is added in their order.
 */
#include "kernels/core/columns.h"
#include "kernels/core/cuda.cuh"

#define COLUMNS   32 /* of a block */
#define WARPS     8
#define IN_FLIGHT 4 /* loads of a thread */

/* `next` elements lead from a sum to its neighbor, `step` from a term to the next. */
template <hr_dtype dtype>
static __device__ __forceinline__ double sum_of_warp(const column_sums &s, int64_t j, int64_t terms,
                                                     int64_t next, int64_t step)
{
    double total = 0.0;
    int64_t i = (int64_t)threadIdx.y;
    for (; i + (IN_FLIGHT - 1) * WARPS < terms; i += IN_FLIGHT * WARPS) {
        float x[IN_FLIGHT];
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            x[k] = hr_load(s.x.data, j * next + (i + k * WARPS) * step, dtype);
#pragma unroll
        for (int k = 0; k < IN_FLIGHT; k++)
            total += (double)x[k];
    }
    for (; i < terms; i += WARPS)
        total += (double)hr_load(s.x.data, j * next + i * step, dtype);
    return total;
}

static __global__ void __launch_bounds__(COLUMNS *WARPS)
    columns_kernel(const column_sums __grid_constant__ s)
{
    __shared__ double of_warps[WARPS][COLUMNS];
    const int lane = (int)threadIdx.x, warp = (int)threadIdx.y;
    const int64_t j = (int64_t)blockIdx.x * COLUMNS + lane;
    const int64_t count = s.of_rows ? s.rows : s.cols, terms = s.of_rows ? s.cols : s.rows;
    const int64_t next = s.of_rows ? s.x.stride : 1, step = s.of_rows ? 1 : s.x.stride;
    double total = 0.0;
    if (j < count)
        FOR_DTYPE(s.dtype, D, total = sum_of_warp<D>(s, j, terms, next, step))
    of_warps[warp][lane] = total;
    __syncthreads();
    if (warp != 0 || j >= count)
        return;
    total = s.is_first ? 0.0 : s.sums[j];
#pragma unroll
    for (int w = 0; w < WARPS; w++)
        total += of_warps[w][lane];
    if (s.sums)
        s.sums[j] = total;
    if (!s.out)
        return;
    const float before = s.adds_to_out ? hr_load(s.out, j, s.out_dtype) : 0.0f;
    hr_store(s.out, j, (float)((double)before + s.factor * total), s.out_dtype);
}

hr_status sum_columns_cuda(const column_sums *sums, const hr_exec *exec)
{
    const int64_t count = sums->of_rows ? sums->rows : sums->cols;
    const int64_t blocks = (count + COLUMNS - 1) / COLUMNS;
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "sums of columns: more than a grid of CUDA can take");
    if (blocks > 0)
        HR_LAUNCH(columns_kernel, (uint32_t)blocks, dim3(COLUMNS, WARPS), 0, exec->stream, *sums);
    return cuda_launch_status("sums of columns");
}
