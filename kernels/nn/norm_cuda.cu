/*
 * norm_cuda.cu: the grids. A team of threads takes a row: a warp a short one, a block a long one, so
 * that each thread reads eight elements once and holds them in registers; rows of more than 8,192
 * columns are read again, from the cache. Rows that 16-byte accesses do not reach go element by
 * element in the same code.
 *
 * Backward, a block takes a group of rows. Its threads have the same columns in each, and so add
 * dweight and dbias by themselves, in shared memory. A second kernel adds groups in a fixed order.
 */
#include "kernels/core/rows.cuh"
#include "kernels/nn/norm.h"

#define THREADS      256
#define LONG_THREADS 512 /* for backward rows that do not fit into the registers of a block */

/* Sums that fit into the shared memory of a block, which is 48 KB. The others are in the
 * workspace. */
#define SHARED_SUMS 11264

/* Weights of the elements from j on, as binary32. */
template <int E>
static __device__ __forceinline__ void read_weights(const norm_args &a, int j, float (&w)[E])
{
    const float offset = (float)a.config.offset;
    if (a.weight)
        few_floats<E>(few_load<E>(a.weight, j, a.config.weight_dtype), a.config.weight_dtype, w);
#pragma unroll
    for (int e = 0; e < E; e++)
        w[e] = a.weight ? w[e] + offset : 1.0f;
}

/* The normed value of each x. */
template <int E>
static __device__ __forceinline__ void read_hat(const norm_args &a, const few<E> &x, float mean,
                                                float factor, hr_dtype dtype, float (&hat)[E])
{
#pragma unroll
    for (int e = 0; e < E; e++)
        hat[e] = norm_hat(few_get(x, e, dtype), mean, factor, 0, dtype);
    if (norm_rounds(&a.config)) {
#pragma unroll
        for (int e = 0; e < E; e++)
            hat[e] = norm_rounded(hat[e], dtype);
    }
}

/* y of the elements from j on. */
template <int E>
static __device__ __forceinline__ void write_y(const norm_args &a, void *y, int j,
                                               const float (&hat)[E], hr_dtype dtype)
{
    float out[E], b[E];
    read_weights<E>(a, j, out);
#pragma unroll
    for (int e = 0; e < E; e++)
        out[e] = norm_y(hat[e], out[e], NORM_NO_BIAS);
    if (a.bias) {
        pack_all_loaded(); /* the bias needs no registers before */
        few_floats<E>(few_load<E>(a.bias, j, a.config.weight_dtype), a.config.weight_dtype, b);
#pragma unroll
        for (int e = 0; e < E; e++)
            out[e] += b[e];
    }
    few_store<E>(y, j, out, dtype);
}

/* ---- Forward --------------------------------------------------------------------------------- */

template <int E>
static __device__ __forceinline__ void forward_row(const norm_args &a, int width, hr_dtype dtype)
{
    const row_team team = team_of(width);
    const int64_t row = (int64_t)blockIdx.x * team.count + team.index;
    const int cols = row < a.rows ? (int)a.cols : 0; /* a team without a row helps at barriers */
    const void *in = row_at(a.x, row, dtype);
    row_walk walk = walk_of(team, E);
    few<E> x = {};
    const auto load = [&](int j) { x = few_load<E>(in, j, dtype); };
    if (walk.j < cols)
        load(walk.j);
    if (a.sum.data) {
        const void *const residual = row_at(a.residual, row, dtype);
        void *const sum = row_at(a.sum, row, dtype);
        row_visit(walk, cols, load, [&](int j) {
            const few<E> right = few_load<E>(residual, j, dtype);
            float total[E];
#pragma unroll
            for (int e = 0; e < E; e++)
                total[e] = few_get(x, e, dtype) + few_get(right, e, dtype);
            x = few_rounded<E>(sum, j, total, dtype);
        });
        in = sum;
    }
    float mean = 0.0f;
    const auto total_of = [&](int squares) {
        float total[1] = {0.0f};
        row_visit(walk, cols, load, [&](int) {
            float part = 0.0f;
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float centered = few_get(x, e, dtype) - mean;
                part += squares ? centered * centered : centered;
            }
            total[0] += part;
        });
        team_totals(team, squares, total);
        return total[0];
    };
    if (a.config.kind == HR_NORM_LAYER)
        mean = total_of(0) / (float)a.cols;
    const float rstd = norm_rstd(total_of(1), a.cols, (float)a.config.eps);
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    if (team.lane == 0 && cols > 0) {
        if (a.mean)
            a.mean[row] = mean;
        if (a.rstd)
            a.rstd[row] = rstd;
    }
    void *const y = row_at(a.y, row, dtype);
    row_visit(walk, cols, load, [&](int j) {
        float hat[E];
        read_hat<E>(a, x, mean, factor, dtype, hat);
        write_y<E>(a, y, j, hat, dtype);
    });
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* Adds x to sums, in shared or in global memory. */
template <int E> static __device__ __forceinline__ void add_to(float *sums, const float (&x)[E])
{
    if constexpr (E == 8) {
        uint4 *const vectors = (uint4 *)sums;
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const uint4 old = vectors[v];
            vectors[v] = make_uint4(
                hr_bits(hr_float(old.x) + x[4 * v]), hr_bits(hr_float(old.y) + x[4 * v + 1]),
                hr_bits(hr_float(old.z) + x[4 * v + 2]), hr_bits(hr_float(old.w) + x[4 * v + 3]));
        }
    } else {
        sums[0] += x[0];
    }
}

static __device__ __forceinline__ int sums_count(const norm_args &a)
{
    return norm_sums(a.config.kind) * (int)a.cols;
}

/* The sums of the block's group in the workspace. Computed again each time, or the compiler would
 * keep two registers for it. */
static __device__ __forceinline__ float *sums_in_workspace(const norm_args &a)
{
    int block = (int)blockIdx.x;
    asm volatile("" : "+r"(block));
    return a.partials + (int64_t)block * sums_count(a);
}

/* Where a team adds dweight, which is s = 0, or dbias of the columns from j on. Short rows, of which
 * a block takes several at a time, all fit into shared memory. */
static __device__ __forceinline__ float *sums_of(const norm_args &a, const row_team &team,
                                                 float *shared, int s, int j)
{
    const int i = team.index * sums_count(a) + s * (int)a.cols + j;
    return i < SHARED_SUMS ? shared + i : sums_in_workspace(a) + i;
}

template <int E, bool once>
static __device__ __forceinline__ void backward_row(const norm_args &a, const row_team &team,
                                                    int turn, int64_t row, int cols, float *shared,
                                                    hr_dtype dtype)
{
    row_walk walk = walk_of(team, E);
    few<E> x = {}, dy = {};
    const auto load = [&](int j) {
        x = few_load<E>(row_at(a.x, row, dtype), j, dtype);
        if (a.dy.data)
            dy = few_load<E>(row_at(a.dy, row, dtype), j, dtype);
    };
    float rstd = 0.0f, mean = 0.0f;
    if (walk.j < cols) {
        load(walk.j);
        rstd = a.rstd[row];
        mean = a.mean ? a.mean[row] : 0.0f;
    }
    const float factor = norm_factor(rstd, a.config.casting, dtype);
    float means[2] = {0.0f, 0.0f}; /* of g * hat and of g */
    if (a.dx.data) {
        row_visit<once>(walk, cols, load, [&](int j) {
            float w[E], hat[E], part = 0.0f, g_part = 0.0f;
            read_weights<E>(a, j, w);
            read_hat<E>(a, x, mean, factor, dtype, hat);
#pragma unroll
            for (int e = 0; e < E; e++) {
                const float g = few_get(dy, e, dtype) * w[e];
                part += g * hat[e];
                g_part += g;
            }
            means[0] += part;
            means[1] += g_part;
        });
        team_totals(team, turn, means);
        means[0] /= (float)a.cols;
        means[1] = a.config.kind == HR_NORM_LAYER ? means[1] / (float)a.cols : 0.0f;
    }
    row_visit<once>(walk, cols, load, [&](int j) {
        float hat[E], g[E], out[E];
        read_hat<E>(a, x, mean, factor, dtype, hat);
        if (a.y.data)
            write_y<E>(a, row_at(a.y, row, dtype), j, hat, dtype);
        pack_all_loaded(); /* or loads for later come first, and take registers */
        if (!a.dy.data)
            return;
        few_floats<E>(dy, dtype, g);
        if (a.partials) {
            if (a.config.kind == HR_NORM_LAYER)
                add_to<E>(sums_of(a, team, shared, 1, j), g);
#pragma unroll
            for (int e = 0; e < E; e++)
                out[e] = g[e] * hat[e];
            add_to<E>(sums_of(a, team, shared, 0, j), out);
            pack_all_loaded();
        }
        if (!a.dx.data)
            return;
        read_weights<E>(a, j, out);
#pragma unroll
        for (int e = 0; e < E; e++)
            out[e] = norm_dx(g[e] * out[e], hat[e], rstd, means[0], means[1]);
        if (a.dsum.data) {
            const few<E> dsum = few_load<E>(row_at(a.dsum, row, dtype), j, dtype);
#pragma unroll
            for (int e = 0; e < E; e++)
                out[e] += few_get(dsum, e, dtype);
        }
        few_store<E>(row_at(a.dx, row, dtype), j, out, dtype);
    });
}

template <int E, bool once>
static __device__ __forceinline__ void backward_group(const norm_args &a, int width, hr_dtype dtype)
{
    HR_DYNAMIC_SHARED(float, shared);
    const row_team team = team_of(width);
    const int count = sums_count(a);
    const int held = team.count * count < SHARED_SUMS ? team.count * count : SHARED_SUMS;
    if (a.partials) {
        for (int i = (int)threadIdx.x; i < held; i += (int)blockDim.x)
            shared[i] = 0.0f;
        float *const others = sums_in_workspace(a);
        for (int i = held + (int)threadIdx.x; i < count; i += (int)blockDim.x)
            others[i] = 0.0f;
        __syncthreads();
    }
    const int64_t size = norm_group_rows(a.rows), begin = blockIdx.x * size;
    const int rows = (int)(begin + size < a.rows ? size : a.rows - begin);
    for (int next = 0; next < rows; next += team.count) {
        const int r = next + team.index;
        backward_row<E, once>(a, team, next & team.count ? 1 : 0, begin + r,
                              r < rows ? (int)a.cols : 0, shared, dtype);
    }
    if (!a.partials)
        return;
    __syncthreads();
    float *const sums = sums_in_workspace(a);
    for (int i = (int)threadIdx.x; i < count && i < SHARED_SUMS; i += (int)blockDim.x) {
        float total = 0.0f;
        for (int t = 0; t < team.count; t++)
            total += shared[t * count + i];
        sums[i] = total;
    }
}

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
