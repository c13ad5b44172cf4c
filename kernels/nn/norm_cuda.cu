/*
 * norm_cuda.cu: the grids. A team of threads takes a row: a warp a short one, a block a long one, so
 * that each thread reads eight elements once and holds them in registers; rows of more than 8,192
 * columns are read again, from the cache. Rows that 16-byte accesses do not reach go element by
 * element in the same code.
 *
 * Backward, a block takes a group of rows. Its threads have the same columns in each, and so add
 * dweight and dbias by themselves, in shared memory. A second kernel adds groups in a fixed order.
 */
#include "kernels/nn/norm_rows.cuh"

#define THREADS      256
#define LONG_THREADS 512 /* for backward rows that do not fit into the registers of a block */

/* ---- Kernels --------------------------------------------------------------------------------- */

/* 64 registers at most: a multiprocessor then holds four blocks of 256 threads. */
#define NORM_KERNEL static __global__ void __launch_bounds__(TEAM_WIDEST, 1)

template <hr_dtype dtype>
NORM_KERNEL norm_forward_kernel(const norm_args __grid_constant__ a, int width)
{
    forward_row<8>(a, width, dtype);
}

template <hr_dtype dtype>
NORM_KERNEL norm_backward_kernel(const norm_args __grid_constant__ a, int width)
{
    backward_group<8, true>(a, width, dtype);
}

template <hr_dtype dtype>
static __global__ void __launch_bounds__(LONG_THREADS, 1)
    norm_backward_long_kernel(const norm_args __grid_constant__ a, int width)
{
    backward_group<8, false>(a, width, dtype);
}

NORM_KERNEL norm_forward_single_kernel(const norm_args __grid_constant__ a, int width)
{
    forward_row<1>(a, width, a.config.dtype);
}

NORM_KERNEL norm_backward_single_kernel(const norm_args __grid_constant__ a, int width)
{
    backward_group<1, false>(a, width, a.config.dtype);
}

/* Thirty-two columns a block; slice s adds groups s, s + 8, ..., and then slices are added in order. */
static __global__ void __launch_bounds__(THREADS)
    norm_add_groups_kernel(const norm_args __grid_constant__ a)
{
    __shared__ double slices[THREADS];
    const int64_t j = (int64_t)blockIdx.x * 32 + threadIdx.x % 32, groups = norm_groups(a.rows);
    const int sums = norm_sums(a.config.kind), s = (int)blockIdx.y;
    double total = 0.0;
    if (j < a.cols)
        for (int64_t group = threadIdx.x / 32; group < groups; group += THREADS / 32)
            total += (double)a.partials[(group * sums + s) * a.cols + j];
    slices[threadIdx.x] = total;
    __syncthreads();
    void *const out = s ? a.dbias : a.dweight;
    if (threadIdx.x >= 32 || j >= a.cols || !out)
        return;
    total = 0.0;
    for (int slice = 0; slice < THREADS / 32; slice++)
        total += slices[slice * 32 + threadIdx.x];
    hr_store(out, j, (float)total, a.config.weight_dtype);
}

/* Whether 16-byte accesses reach eight elements of every row and vector. */
static bool is_vectorizable(const norm_args *a)
{
    const uintptr_t bytes = a->config.dtype == HR_F32 ? 4 : 2;
    uintptr_t bits = (uintptr_t)a->weight | (uintptr_t)a->bias | (uintptr_t)a->partials;
    const hr_rows *const all[] = {&a->x, &a->y, &a->sum, &a->residual, &a->dx, &a->dy, &a->dsum};
    for (const hr_rows *rows : all)
        if (rows->data)
            bits |= (uintptr_t)rows->data | (a->rows > 1 ? (uintptr_t)rows->stride * bytes : 0);
    return bits % 16 == 0 && a->cols % 8 == 0;
}

/* Columns are counted in 32 bits, and so are the sums of both weights. */
static hr_status check_grid(const char *function, const norm_args *a, int64_t blocks)
{
    if (a->cols > 1 << 29)
        return hr_fail(HR_UNSUPPORTED, "%s: cols is %lld, and CUDA takes at most 2^29", function,
                       (long long)a->cols);
    if (blocks > INT32_MAX)
        return hr_fail(HR_UNSUPPORTED, "%s: rows is more than a grid of CUDA can take", function);
    return HR_OK;
}

/* One of the instances for eight elements a thread, or the one for a single element. */
template <auto f32, auto bf16, auto f16, auto single>
static void launch(const norm_args *a, bool vectors, int64_t blocks, uint32_t width, uint32_t bytes,
                   const hr_exec *exec)
{
    const uint32_t grid = (uint32_t)blocks, block = team_block(width);
    if (!vectors)
        HR_LAUNCH(single, grid, block, bytes, exec->stream, *a, (int)width);
    else if (a->config.dtype == HR_F32)
        HR_LAUNCH(f32, grid, block, bytes, exec->stream, *a, (int)width);
    else if (a->config.dtype == HR_BF16)
        HR_LAUNCH(bf16, grid, block, bytes, exec->stream, *a, (int)width);
    else
        HR_LAUNCH(f16, grid, block, bytes, exec->stream, *a, (int)width);
}

hr_status norm_forward_cuda(const norm_args *args, const hr_exec *exec)
{
    const bool vectors = is_vectorizable(args);
    const uint32_t width = team_width(args->cols, vectors ? 8 : 1);
    const int64_t teams = team_block(width) / width, blocks = (args->rows + teams - 1) / teams;
    const hr_status status = check_grid("hr_norm_forward", args, blocks);
    if (status != HR_OK)
        return status;
    if (blocks > 0)
        launch<norm_forward_kernel<HR_F32>, norm_forward_kernel<HR_BF16>,
               norm_forward_kernel<HR_F16>, norm_forward_single_kernel>(args, vectors, blocks,
                                                                        width, 0, exec);
    return cuda_launch_status("hr_norm_forward");
}

hr_status norm_backward_cuda(const norm_args *args, const hr_exec *exec)
{
    const bool vectors = is_vectorizable(args);
    const bool is_long = vectors && args->cols > 8 * TEAM_WIDEST;
    const uint32_t width = is_long ? LONG_THREADS : team_width(args->cols, vectors ? 8 : 1);
    const int64_t teams = team_block(width) / width, blocks = norm_groups(args->rows);
    const int64_t sums = args->partials ? teams * norm_sums(args->config.kind) * args->cols : 0;
    const uint32_t bytes = 4 * (uint32_t)(sums < SHARED_SUMS ? sums : SHARED_SUMS);
    const hr_status status = check_grid("hr_norm_backward", args, blocks);
    if (status != HR_OK)
        return status;
    const auto grid =
        is_long ? launch<norm_backward_long_kernel<HR_F32>, norm_backward_long_kernel<HR_BF16>,
                         norm_backward_long_kernel<HR_F16>, norm_backward_single_kernel>
                : launch<norm_backward_kernel<HR_F32>, norm_backward_kernel<HR_BF16>,
                         norm_backward_kernel<HR_F16>, norm_backward_single_kernel>;
    if (blocks > 0)
        grid(args, vectors, blocks, width, bytes, exec);
    if (args->dweight || args->dbias) {
        const dim3 columns((uint32_t)((args->cols + 31) / 32),
                           (uint32_t)norm_sums(args->config.kind));
        HR_LAUNCH(norm_add_groups_kernel, columns, THREADS, 0, exec->stream, *args);
    }
    return cuda_launch_status("hr_norm_backward");
}
