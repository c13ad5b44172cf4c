/*
 * muon_momentum_cuda.cu: the grid of Muon's first pass. Each thread block leaves the sum of its
 * squares in the workspace; a block for each matrix then adds them, always in the same order.
 */
#include "kernels/optim/momentum_codes.cuh"
#include "kernels/optim/muon.cuh"
#include "kernels/optim/muon_momentum.h"

typedef struct muon_momentum_record {
    void *update, *moment;
    const void *grad;
    float *absmax; /* NULL: the moment is not in codes */
    hr_muon_matrix matrix;
    int64_t numel, first_sum;
    uint32_t first_block;
    uint8_t update_dtype, moment_dtype, grad_dtype, is_dense;
} muon_momentum_record;

typedef struct muon_momentum_shared {
    hr_muon_momentum_config config;
    int32_t block_shift; /* log2 of the block size of codes */
    double *sums;
} muon_momentum_shared;

using muon_momentum_launch = list_launch<muon_momentum_shared, muon_momentum_record>;

/* What the elements of a block have in common. Where a call site gives literals, the tests of them
 * fold away. */
typedef struct muon_types {
    hr_dtype grad, moment, update;
} muon_types;

/* A thread block's elements: where they begin in memory. */
typedef struct muon_part {
    const void *grad;
    void *moment, *update;
    float *absmax;
    const hr_muon_matrix *matrix;
    const muon_block *block;
    bool is_aligned, is_dense;
} muon_part;

static __device__ __forceinline__ float sum_of_squares(const float (&x)[GROUP])
{
    return (x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]);
}

/* Writes a group of the update: to the tile in shared memory, or to where it lies. */
template <bool turned>
static __device__ __forceinline__ void put(const muon_part &c, hr_dtype dtype, int i, bool whole,
                                           int left, const float (&update)[GROUP],
                                           float *turned_row, int col)
{
    if constexpr (turned) {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < left)
                turned_row[col + e] = update[e];
    } else if (c.is_dense) {
        pack_store<GROUP>(c.update, i, dtype, whole, left, pack_of(update, dtype));
    } else {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            if (e < left)
                hr_store(c.update, muon_offset_of(*c.matrix, *c.block, i + e), update[e], dtype);
    }
}

/* A span of moments that are numbers, from element `first` on, of which the thread's groups begin at
 * element `col`. Returns the sum of the thread's squares. */
template <bool turned>
static __device__ __forceinline__ double span_of_numbers(const muon_part &c, const muon_types types,
                                                         const muon_momentum_constants &constants,
                                                         int64_t first, int left, float *turned_row)
{
    const int lane = (int)threadIdx.x % WARP * GROUP;
    const bool whole = c.is_aligned && left >= SPAN;
    const void *const grad = list_address(c.grad, first, types.grad);
    void *const moment = list_address(c.moment, first, types.moment);
    pack<GROUP> grads[GROUPS], moments[GROUPS];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        grads[j] = pack_load<GROUP>(grad, i, types.grad, whole, left - i);
        moments[j] = pack_load<GROUP>(moment, i, types.moment, whole, left - i);
    }
    pack_all_loaded();
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        float g[GROUP], m[GROUP], u[GROUP];
        pack_floats(grads[j], types.grad, g);
        pack_floats(moments[j], types.moment, m);
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const muon_momentum_values x = muon_momentum_element(constants, g[e], m[e]);
            m[e] = x.moment;
            u[e] = x.update;
        }
        pack_store<GROUP>(moment, i, types.moment, whole, left - i, pack_of(m, types.moment));
        put<turned>(c, types.update, (int)first + i, whole, left - i, u, turned_row, i);
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            u[e] = e < left - i ? u[e] : 0.0f;
        sum += (double)sum_of_squares(u);
    }
    return sum;
}

/* A span of moments in codes. All warps come here if blocks have 512 elements: two spans. */
template <bool turned>
static __device__ __forceinline__ double span_of_codes(const muon_part &c, const muon_types types,
                                                       const muon_momentum_constants &constants,
                                                       const quant_tables &tables, int block_shift,
                                                       int64_t first, int left, float *turned_row)
{
    const int lane = (int)threadIdx.x % WARP * GROUP;
    const bool whole = c.is_aligned && left >= SPAN;
    const void *const grad = list_address(c.grad, first, types.grad);
    uint8_t *const moment = (uint8_t *)c.moment + first;
    float *const absmax = c.absmax + (first >> block_shift);
    /* A span is half of a block of 512. */
    const int skipped = (int)first & ((1 << block_shift) - 1);
    pack<GROUP> grads[GROUPS];
    uint32_t codes[GROUPS][1], largest[GROUPS];
    float absmaxs[GROUPS], moments[GROUPS][GROUP];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        grads[j] = pack_load<GROUP>(grad, i, types.grad, whole, left - i);
        pack_load_bytes<GROUP>(moment, i, whole, left - i, dynamic_zero(1), codes[j]);
        absmaxs[j] = whole || left > i ? absmax[(i + skipped) >> block_shift] : 0.0f;
    }
    pack_all_loaded();
    double sum = 0.0;
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        float g[GROUP], u[GROUP];
        pack_floats(grads[j], types.grad, g);
        largest[j] = 0;
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            const float m = tables.values[1][pack_byte(codes[j], e)] * absmaxs[j];
            const muon_momentum_values x = muon_momentum_element(constants, g[e], m);
            moments[j][e] = x.moment;
            u[e] = e < left - i ? x.update : 0.0f;
            largest[j] = quant_larger(largest[j], x.moment, 0);
        }
        put<turned>(c, types.update, (int)first + i, whole, left - i, u, turned_row, i);
        sum += (double)sum_of_squares(u);
    }
    codes_largest_of_blocks<WARPS, GROUP, GROUPS>(largest, block_shift);
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        uint32_t words[1];
        const float scale = codes_encode<GROUP>(tables, moments[j], largest[j], words);
        if ((whole || left > i) && ((i + skipped) & ((1 << block_shift) - 1)) == 0)
            absmax[(i + skipped) >> block_shift] = scale;
        pack_store_bytes<GROUP>(moment, i, whole, left - i, words);
    }
    return sum;
}

/* Writes the tile: a warp a column of the parameter, in which each thread has a row. */
static __device__ __forceinline__ void
put_tile(const muon_turned &tile, const muon_momentum_record &t, const muon_block &block)
{
    const int row = (int)threadIdx.x % WARP;
    const hr_dtype dtype = (hr_dtype)t.update_dtype;
    __syncthreads();
    if (row >= block.rows)
        return;
#pragma unroll 4
    for (int col = (int)threadIdx.x / WARP; col < block.cols; col += WARPS)
        hr_store(t.update, muon_offset(&t.matrix, block.row + row, block.col + col),
                 tile.rows[row][col], dtype);
}

template <bool codes, bool turned>
static __global__ void __launch_bounds__(THREADS, 2)
    muon_momentum_kernel(const muon_momentum_launch __grid_constant__ args)
{
    __shared__ muon_momentum_constants shared;
    if (step_is_skipped(&args.config.step))
        return;
    const muon_momentum_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    if (threadIdx.x == 0)
        shared = muon_momentum_fold(&args.config);
    const muon_block block = muon_block_of<turned>(t.matrix, blockIdx.x - t.first_block);
    const muon_types types = {(hr_dtype)t.grad_dtype, (hr_dtype)t.moment_dtype,
                              (hr_dtype)t.update_dtype};
    muon_part c;
    c.grad = list_address(t.grad, block.begin, types.grad);
    c.moment = codes ? (uint8_t *)t.moment + block.begin
                     : list_address(t.moment, block.begin, types.moment);
    c.absmax = codes ? t.absmax + (block.begin >> args.block_shift) : nullptr;
    c.update = t.is_dense ? list_address(t.update, block.begin, types.update) : t.update;
    c.matrix = &t.matrix;
    c.block = &block;
    c.is_dense = t.is_dense;
    uintptr_t addresses =
        (uintptr_t)t.grad | (codes ? (uintptr_t)t.moment << 2 : (uintptr_t)t.moment);
    addresses |= t.is_dense ? (uintptr_t)t.update : 0;
    c.is_aligned = addresses % 16 == 0 && (!turned || t.matrix.cols % 8 == 0);
    double sum = 0.0;
    if constexpr (codes) {
        __shared__ quant_tables tables;
        quant_copy_tables<THREADS, 0>(&tables);
        const muon_momentum_constants constants = shared;
        if constexpr (turned) {
            __shared__ muon_turned tile;
            muon_spans<true>(block, t.matrix.cols, [&](int64_t first, int left, int row) {
                sum += span_of_codes<true>(c, types, constants, tables, args.block_shift, first,
                                           left, tile.rows[row]);
            });
            put_tile(tile, t, block);
        } else {
            /* Both spans of a block of 512 meet at its barrier, so warps without one come too. */
            const int most = 1 << args.block_shift > SPAN ? CUDA_CHUNK : block.count;
#pragma unroll 1
            for (int first = (int)threadIdx.x / WARP * SPAN; first < most; first += WARPS * SPAN)
                sum += span_of_codes<false>(c, types, constants, tables, args.block_shift, first,
                                            block.count - first, nullptr);
        }
    } else {
        __syncthreads();
        const muon_momentum_constants constants = shared;
        if constexpr (turned) {
            __shared__ muon_turned tile;
            muon_spans<true>(block, t.matrix.cols, [&](int64_t first, int left, int row) {
                sum += span_of_numbers<true>(c, types, constants, first, left, tile.rows[row]);
            });
            put_tile(tile, t, block);
        } else {
            muon_spans<false>(block, t.matrix.cols, [&](int64_t first, int left, int) {
                sum += span_of_numbers<false>(c, types, constants, first, left, nullptr);
            });
        }
    }
    sum = reduce_block<THREADS>(sum, reduce_add());
    if (threadIdx.x == 0)
        args.sums[t.first_sum + (blockIdx.x - t.first_block)] = sum;
}

/* A block per matrix. */
typedef struct muon_squares_record {
    int64_t numel, first_sum, sums;
    uint32_t first_block;
} muon_squares_record;

typedef struct muon_squares_shared {
    hr_step_config step;
    const double *sums;
    float *squares; /* of the first matrix of the launch */
} muon_squares_shared;

using muon_squares_launch = list_launch<muon_squares_shared, muon_squares_record>;

static __global__ void __launch_bounds__(THREADS)
    muon_squares_kernel(const muon_squares_launch __grid_constant__ args)
{
    if (step_is_skipped(&args.step))
        return;
    const muon_squares_record &t = args.tensors[blockIdx.x];
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < t.sums; i += THREADS)
        sum += args.sums[t.first_sum + i];
    sum = reduce_block<THREADS>(sum, reduce_add());
    if (threadIdx.x == 0)
        hr_store(args.squares, blockIdx.x, (float)sum, HR_F32);
}

/* ---- The host -------------------------------------------------------------------------------- */

static uint32_t blocks_of(const hr_muon_matrix &m, bool turned)
{
    return (uint32_t)(turned ? muon_tiles(&m) : muon_runs(&m, CUDA_CHUNK));
}

/* Queues launches for the matrices that are cut into tiles, or for all others. */
template <bool codes, bool turned>
static hr_status launch_kind(const muon_momentum_args *args, const hr_exec *exec)
{
    muon_momentum_launch launch;
    launch.config = *args->config;
    launch.sums = args->sums;
    for (launch.block_shift = 0; 1 << launch.block_shift < args->config->block_size;)
        launch.block_shift++;
    int64_t sums = 0;
    const auto fill = [&](muon_momentum_record &t, int64_t k) {
        t.matrix = args->matrices[k];
        t.is_dense = (uint8_t)muon_is_dense(&t.matrix);
        t.update = args->updates->data[k];
        t.moment = args->moments->data[k];
        t.grad = args->grads->data[k];
        t.absmax = codes ? (float *)args->absmaxs->data[k] : nullptr;
        t.update_dtype = (uint8_t)args->updates->dtype[k];
        t.moment_dtype = (uint8_t)args->moments->dtype[k];
        t.grad_dtype = (uint8_t)args->grads->dtype[k];
        t.first_sum = sums;
        sums += muon_most_chunks(&t.matrix);
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH((muon_momentum_kernel<codes, turned>), blocks, THREADS, 0, exec->stream,
                      launch);
    };
    return list_launch_all(&launch, args->updates, "hr_muon_momentum", fill, queue,
                           [=](const muon_momentum_record &t) {
                               const bool is_tiled =
                                   muon_is_tiled(t.matrix, codes, args->config->block_size);
                               return is_tiled == turned ? blocks_of(t.matrix, turned) : 0;
                           });
}

static hr_status launch_squares(const muon_momentum_args *args, const hr_exec *exec)
{
    muon_squares_launch launch;
    launch.step = args->config->step;
    launch.sums = args->sums;
    int64_t sums = 0;
    const auto fill = [&](muon_squares_record &t, int64_t k) {
        const hr_muon_matrix &m = args->matrices[k];
        const bool turned = muon_is_tiled(m, args->absmaxs != nullptr, args->config->block_size);
        t.first_sum = sums;
        t.sums = blocks_of(m, turned);
        sums += muon_most_chunks(&m);
    };
    const auto queue = [&](uint32_t blocks, int64_t first) {
        launch.squares = args->squares + first;
        HR_LAUNCH(muon_squares_kernel, blocks, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->updates, "hr_muon_momentum", fill, queue,
                           [](const muon_squares_record &) { return 1u; });
}

template <bool codes>
static hr_status launch_all(const muon_momentum_args *args, const hr_exec *exec)
{
    const hr_status status = launch_kind<codes, false>(args, exec);
    return status == HR_OK ? launch_kind<codes, true>(args, exec) : status;
}

hr_status muon_momentum_cuda(const muon_momentum_args *args, const hr_exec *exec)
{
    const hr_status status =
        args->absmaxs ? launch_all<true>(args, exec) : launch_all<false>(args, exec);
    return status == HR_OK ? launch_squares(args, exec) : status;
}
