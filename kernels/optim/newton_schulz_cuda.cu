/* newton_schulz_cuda.cu: the grids of orthogonalization that are not products. */
#include "kernels/core/pack.cuh"
#include "kernels/optim/newton_schulz.h"

#define THREADS   256
#define GROUP     8
#define MOST_ROWS 65535 /* of a grid */

/* A matrix for each row of the grid. */
template <hr_dtype dtype>
static __global__ void __launch_bounds__(THREADS)
    newton_schulz_scale_kernel(const newton_schulz_scale __grid_constant__ a, int is_aligned)
{
    const int64_t i = ((int64_t)blockIdx.x * THREADS + threadIdx.x) * GROUP;
    for (int64_t index = blockIdx.y; i < a.numel && index < a.batch; index += gridDim.y) {
        const float factor = newton_schulz_factor(a.squares[index], a.eps);
        const int64_t at = index * a.numel + i;
        if (is_aligned && a.numel - i >= GROUP) {
            float x[GROUP];
            pack_floats(pack_load<GROUP>(a.in, at, dtype), dtype, x);
#pragma unroll
            for (int e = 0; e < GROUP; e++)
                x[e] *= factor;
            pack_store(a.out, at, pack_of(x, dtype), dtype);
        } else {
            for (int e = 0; e < GROUP && i + e < a.numel; e++)
                hr_store(a.out, at + e, hr_load(a.in, at + e, dtype) * factor, dtype);
        }
    }
}

static uint32_t rows_of_grid(int64_t rows)
{
    return (uint32_t)(rows < MOST_ROWS ? rows : MOST_ROWS);
}

static bool is_too_large(int64_t blocks)
{
    return blocks > INT32_MAX;
}

hr_status newton_schulz_scale_cuda(const newton_schulz_scale *args, const hr_exec *exec)
{
    const int64_t blocks = (args->numel + THREADS * GROUP - 1) / (THREADS * GROUP);
    const int is_aligned =
        ((uintptr_t)args->in | (uintptr_t)args->out) % 16 == 0 && args->numel % GROUP == 0;
    if (is_too_large(blocks))
        return hr_fail(HR_UNSUPPORTED, "hr_newton_schulz: x is more than a grid of CUDA can take");
    const dim3 grid((uint32_t)blocks, rows_of_grid(args->batch));
    FOR_DTYPE(
        args->dtype, D,
        HR_LAUNCH(newton_schulz_scale_kernel<D>, grid, THREADS, 0, exec->stream, *args, is_aligned))
    return cuda_launch_status("hr_newton_schulz");
}

/* A row of a matrix for each row of the grid. */
template <hr_dtype dtype>
static __global__ void __launch_bounds__(THREADS)
    newton_schulz_shift_kernel(const newton_schulz_shift __grid_constant__ a)
{
    const int64_t col = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    for (int64_t row = blockIdx.y; col < a.m && row < a.batch * a.m; row += gridDim.y) {
        const int64_t i = row * a.m + col;
        const float x = hr_load(a.in, i, dtype);
        hr_store(a.out, i, row % a.m == col ? x + a.a : x, dtype);
    }
}

hr_status newton_schulz_shift_cuda(const newton_schulz_shift *args, const hr_exec *exec)
{
    const dim3 grid((uint32_t)((args->m + THREADS - 1) / THREADS),
                    rows_of_grid(args->batch * args->m));
    FOR_DTYPE(args->dtype, D,
              HR_LAUNCH(newton_schulz_shift_kernel<D>, grid, THREADS, 0, exec->stream, *args))
    return cuda_launch_status("hr_newton_schulz");
}
