/*
 * norm_cuda.cu: the grids. A team of threads takes a row and holds it in registers, two or four
 * vectors of 16 bytes a thread: a few lanes a short row, a warp or a few a long one. Still longer rows
 * are read again, from the cache. Rows that 16-byte accesses do not reach go element by element in
 * the same code.
 *
 * Backward, a block takes a group of rows. Its threads have the same columns in each, and so add
 * dweight and dbias by themselves, in registers. A second kernel adds groups in a fixed order.
 */
#include "kernels/nn/norm_rows.cuh"

#define THREADS       256
#define ADDING        1024 /* threads that add groups */
#define FORWARD_BLOCK 128  /* threads of a block, or those of a wider team */
#define LONG_THREADS  512  /* of a backward block at most */
#define HELD          2    /* vectors of x and of dy that a thread holds, backward */

/* ---- Kernels --------------------------------------------------------------------------------- */

/* 64 registers at most, so that a multiprocessor holds 1,024 threads. */
#define NORM_KERNEL static __global__ void __launch_bounds__(TEAM_WIDEST, 1)

template <hr_dtype dtype, int V, bool layer>
NORM_KERNEL norm_forward_kernel(const norm_args __grid_constant__ a, int width)
{
    FOR_FLAG(is_plain(a), P, (forward_row<vector_of<dtype>, V, layer>(a, width, dtype, P)))
}

template <bool layer>
NORM_KERNEL norm_forward_single_kernel(const norm_args __grid_constant__ a, int width)
{
    forward_row<1, 1, layer>(a, width, a.config.dtype, false);
}

#define BACKWARD_KERNEL static __global__ void __launch_bounds__(LONG_THREADS, 1)

template <hr_dtype dtype, bool layer>
BACKWARD_KERNEL norm_backward_kernel(const norm_args __grid_constant__ a, int width)
{
    backward_group<vector_of<dtype>, HELD, layer>(a, width, dtype);
}

template <hr_dtype dtype, bool layer>
BACKWARD_KERNEL norm_backward_long_kernel(const norm_args __grid_constant__ a)
{
    backward_long_group<vector_of<dtype>, layer>(a, dtype);
}

template <bool layer>
BACKWARD_KERNEL norm_backward_single_kernel(const norm_args __grid_constant__ a)
{
    backward_long_group<1, layer>(a, a.config.dtype);
}

/* Thirty-two columns a block; slice s adds groups s, s + 32, ..., of which the sums of eight are read
 * together, and then slices are added in order. */
static __global__ void __launch_bounds__(ADDING)
    norm_add_groups_kernel(const norm_args __grid_constant__ a)
{
    constexpr int SLICES = ADDING / 32, READ = NORM_GROUPS / SLICES;
    __shared__ double slices[ADDING];
    const int64_t j = (int64_t)blockIdx.x * 32 + threadIdx.x % 32, groups = norm_groups(a.rows);
    const int sums = norm_sums(a.config.kind), s = (int)blockIdx.y;
    float read[READ];
#pragma unroll
    for (int k = 0; k < READ; k++) {
        const int64_t group = threadIdx.x / 32 + k * SLICES;
        read[k] = j < a.cols && group < groups ? a.partials[(group * sums + s) * a.cols + j] : 0.0f;
    }
    double total = 0.0;
#pragma unroll
    for (int k = 0; k < READ; k++)
        total += (double)read[k];
    slices[threadIdx.x] = total;
    __syncthreads();
    void *const out = s ? a.dbias : a.dweight;
    if (threadIdx.x >= 32 || j >= a.cols || !out)
        return;
    total = 0.0;
#pragma unroll 1
    for (int slice = 0; slice < SLICES; slice++)
        total += slices[slice * 32 + threadIdx.x];
    hr_store(out, j, (float)total, a.config.weight_dtype);
}

/* Whether 16-byte accesses reach every vector of each row. Weights may be of another type, so all have
 * room for eight elements. */
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

/* Short rows take fewer vectors of a thread, so that more of its threads have all of theirs. */
template <bool layer> static hr_status launch_forward(const norm_args *a, const hr_exec *exec)
{
    const hr_dtype dtype = a->config.dtype;
    const bool vectors = is_vectorizable(a);
    const int elements = !vectors ? 1 : dtype == HR_F32 ? 4 : 8;
    const bool is_short = a->cols <= 2 * 32 * elements;
    const int held = !vectors ? 1 : is_short ? 2 : 4;
    const uint32_t width = team_width(a->cols, held * elements, FORWARD_BLOCK);
    const uint32_t block = width < FORWARD_BLOCK ? FORWARD_BLOCK : width;
    const int64_t teams = block / width, blocks = (a->rows + teams - 1) / teams;
    const hr_status status = check_grid("hr_norm_forward", a, blocks);
    if (status != HR_OK || blocks == 0)
        return status;
    const auto kernel = !vectors           ? norm_forward_single_kernel<layer>
                        : dtype == HR_F32  ? is_short ? norm_forward_kernel<HR_F32, 2, layer>
                                                      : norm_forward_kernel<HR_F32, 4, layer>
                         : dtype == HR_BF16 ? is_short ? norm_forward_kernel<HR_BF16, 2, layer>
                                                       : norm_forward_kernel<HR_BF16, 4, layer>
                         : is_short ? norm_forward_kernel<HR_F16, 2, layer>
                                           : norm_forward_kernel<HR_F16, 4, layer>;
    HR_LAUNCH(kernel, (uint32_t)blocks, block, 0, exec->stream, *a, (int)width);
    return cuda_launch_status("hr_norm_forward");
}

hr_status norm_forward_cuda(const norm_args *args, const hr_exec *exec)
{
    return args->config.kind == HR_NORM_LAYER ? launch_forward<true>(args, exec)
                                              : launch_forward<false>(args, exec);
}

template <hr_dtype dtype, bool layer>
static void launch_backward(const norm_args *a, int64_t groups, const hr_exec *exec)
{
    const int64_t count = a->partials ? norm_sums(a->config.kind) * a->cols : 0;
    const uint32_t blocks = (uint32_t)groups;
    if (a->cols > LONG_THREADS * HELD * vector_of<dtype>) {
        const int64_t held = count < SHARED_SUMS ? count : SHARED_SUMS;
        HR_LAUNCH((norm_backward_long_kernel<dtype, layer>), blocks, LONG_THREADS,
                  4 * (uint32_t)held, exec->stream, *a);
        return;
    }
    const uint32_t width = team_width(a->cols, HELD * vector_of<dtype>, THREADS);
    const uint32_t block = width < THREADS ? THREADS : width, teams = block / width;
    HR_LAUNCH((norm_backward_kernel<dtype, layer>), blocks, block,
              teams > 1 ? 4 * teams * (uint32_t)count : 0, exec->stream, *a, (int)width);
}

template <bool layer>
static void launch_backward(const norm_args *a, int64_t groups, const hr_exec *exec)
{
    if (!is_vectorizable(a)) {
        const int64_t count = a->partials ? norm_sums(a->config.kind) * a->cols : 0;
        const uint32_t held = (uint32_t)(count < SHARED_SUMS ? count : SHARED_SUMS);
        const uint32_t width = team_width(a->cols, 1, 32);
        const uint32_t block = width < 32 ? 32 : width < LONG_THREADS ? width : LONG_THREADS;
        HR_LAUNCH(norm_backward_single_kernel<layer>, (uint32_t)groups, block, 4 * held,
                  exec->stream, *a);
    } else if (a->config.dtype == HR_F32) {
        launch_backward<HR_F32, layer>(a, groups, exec);
    } else if (a->config.dtype == HR_BF16) {
        launch_backward<HR_BF16, layer>(a, groups, exec);
    } else {
        launch_backward<HR_F16, layer>(a, groups, exec);
    }
}

hr_status norm_backward_cuda(const norm_args *args, const hr_exec *exec)
{
    const int64_t groups = norm_groups(args->rows);
    const hr_status status = check_grid("hr_norm_backward", args, groups);
    if (status != HR_OK)
        return status;
    if (groups > 0 && args->config.kind == HR_NORM_LAYER)
        launch_backward<true>(args, groups, exec);
    else if (groups > 0)
        launch_backward<false>(args, groups, exec);
    if (args->dweight || args->dbias) {
        const dim3 columns((uint32_t)((args->cols + 31) / 32),
                           (uint32_t)norm_sums(args->config.kind));
        HR_LAUNCH(norm_add_groups_kernel, columns, ADDING, 0, exec->stream, *args);
    }
    return cuda_launch_status("hr_norm_backward");
}
