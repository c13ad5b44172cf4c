/*
 * muon_update_cuda.cu: the grids of Muon's last pass: sums of the squares of rows and what follows from
 * them, if rows are normalized, and the update of weights.
 */
#include "kernels/core/count.cuh"
#include "kernels/optim/muon.cuh"
#include "kernels/optim/muon_update.h"
#include "kernels/weights/weights.cuh"

typedef struct muon_update_record {
    static constexpr bool plain = true;
    void *param, *step;
    const void *update;
    const double *factors; /* of rows; NULL: none */
    hr_muon_matrix matrix;
    double scale;
    int64_t numel;
    uint32_t first_block;
    uint8_t param_dtype, update_dtype, step_dtype, is_dense;
} muon_update_record;

using muon_update_mode_record = weights_mode_record<muon_update_record>;

typedef struct muon_update_shared {
    hr_muon_update_config config;
    hr_weights_mode mode;
    int64_t *stalled;
} muon_update_shared;

template <typename Record> using muon_update_launch = list_launch<muon_update_shared, Record>;

/* What the elements of a block have in common, and where they begin in memory. */
typedef struct muon_part {
    void *param, *residual;
    const void *update;
    const double *factors;
    const hr_muon_matrix *matrix;
    const muon_block *block;
    muon_update_constants constants;
    hr_dtype param_dtype, update_dtype;
    hr_weights_mode mode;
    double step;
    bool is_aligned, is_dense, counts_stalled;
} muon_part;

/* A group of the update: from the tile in shared memory, or from where it lies. */
template <bool turned>
static __device__ __forceinline__ void get(const muon_part &c, int i, bool whole, int left,
                                           const float *turned_row, int col, float (&update)[GROUP])
{
    if constexpr (turned) {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            update[e] = e < left ? turned_row[col + e] : 0.0f;
    } else if (c.is_dense) {
        pack_floats(pack_load<GROUP>(c.update, i, c.update_dtype, whole, left), c.update_dtype,
                    update);
    } else {
#pragma unroll
        for (int e = 0; e < GROUP; e++)
            update[e] = e < left ? hr_load(c.update, muon_offset_of(*c.matrix, *c.block, i + e),
                                           c.update_dtype)
                                 : 0.0f;
    }
}

/* A span from element `first` on; `row` and `turned_row` are those of a tile. */
template <bool plain, bool turned>
static __device__ __forceinline__ void update_span(const muon_part &c, weights_thread &thread,
                                                   int64_t first, int left, int row,
                                                   const float *turned_row)
{
    const int lane = (int)threadIdx.x % WARP * GROUP;
    const bool whole = c.is_aligned && left >= SPAN;
    void *const param = list_address(c.param, first, c.param_dtype);
    const hr_dtype residual_dtype = weights_residual_dtype(c.mode, c.param_dtype);
    void *const residual = plain ? nullptr : list_address(c.residual, first, residual_dtype);
    weights_pack<GROUP> weights[GROUPS];
    pack<GROUP> params[GROUPS];
    float updates[GROUPS][GROUP];
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        if constexpr (plain)
            params[j] = pack_load<GROUP>(param, i, c.param_dtype, whole, left - i);
        else
            weights[j] =
                weights_load<GROUP>(param, residual, i, c.param_dtype, c.mode, whole, left - i);
        get<turned>(c, (int)first + i, whole, left - i, turned_row, i, updates[j]);
    }
    pack_all_loaded();
#pragma unroll
    for (int j = 0; j < GROUPS; j++) {
        const int i = lane + j * WARP * GROUP;
        float x[GROUP];
        hr_random4 random = {{0, 0, 0, 0}};
        if constexpr (plain)
            pack_floats(params[j], c.param_dtype, x);
        else
            weights_join_all(weights[j], c.param_dtype, c.mode, x);
        if (!plain && weights_are_random(c.mode) && left > i)
            random = weights_random_of<GROUP>(*thread.record, thread.start, c.step,
                                              (uint32_t)(turned ? i : (int)first + i));
#pragma unroll
        for (int e = 0; e < GROUP; e++) {
            float factor = 1.0f;
            if (c.factors && e < left - i)
                factor =
                    (float)c.factors[turned ? c.block->row + row
                                            : muon_row_of(*c.matrix, *c.block, (int)first + i + e)];
            x[e] = muon_update_element(c.constants, x[e], updates[j][e], factor);
        }
        if constexpr (plain) {
            pack_store<GROUP>(param, i, c.param_dtype, whole, left - i, pack_of(x, c.param_dtype));
        } else {
            const weights_pack<GROUP> after = weights_split_all(x, c.param_dtype, c.mode, random);
            weights_store<GROUP>(param, residual, i, c.param_dtype, c.mode, whole, left - i, after);
            if (c.counts_stalled)
                thread.stalled += weights_stalled(weights[j], after, x, c.param_dtype, c.mode,
                                                  left - i < GROUP ? left - i : GROUP);
        }
    }
}

/* Reads the tile: a warp a column of the parameter, in which each thread has a row. */
static __device__ __forceinline__ void get_tile(muon_turned &tile, const muon_update_record &t,
                                                const muon_block &block)
{
    const int row = (int)threadIdx.x % WARP;
    const hr_dtype dtype = (hr_dtype)t.update_dtype;
    if (row < block.rows) {
#pragma unroll 4
        for (int col = (int)threadIdx.x / WARP; col < block.cols; col += WARPS)
            tile.rows[row][col] =
                hr_load(t.update, muon_offset(&t.matrix, block.row + row, block.col + col), dtype);
    }
    __syncthreads();
}

template <typename Record, bool turned>
static __global__ void __launch_bounds__(THREADS, 2)
    muon_update_kernel(const muon_update_launch<Record> __grid_constant__ args)
{
    constexpr bool plain = Record::plain;
    if (step_is_skipped(&args.config.step))
        return;
    const Record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    __shared__ muon_update_constants shared;
    if (threadIdx.x == 0)
        shared = muon_update_fold(&args.config, t.scale);
    const muon_block block = muon_block_of<turned>(t.matrix, blockIdx.x - t.first_block);
    muon_part c;
    c.param_dtype = (hr_dtype)t.param_dtype;
    c.update_dtype = (hr_dtype)t.update_dtype;
    c.mode = args.mode;
    c.param = list_address(t.param, block.begin, c.param_dtype);
    c.update = t.is_dense ? list_address(t.update, block.begin, c.update_dtype) : t.update;
    c.residual = nullptr;
    c.factors = t.factors;
    c.matrix = &t.matrix;
    c.block = &block;
    c.step = 0.0;
    c.is_dense = t.is_dense;
    c.counts_stalled = args.stalled != nullptr;
    uintptr_t addresses = (uintptr_t)t.param | (t.is_dense ? (uintptr_t)t.update : 0);
    weights_thread thread = {};
    if constexpr (!plain) {
        const hr_dtype residual = weights_residual_dtype(c.mode, c.param_dtype);
        c.residual = list_address(t.weights.residual, block.begin, residual);
        addresses |= (uintptr_t)t.weights.residual << (residual == HR_I8 ? 2 : 0);
        c.step = step_number(&args.config.step, t.step, (hr_dtype)t.step_dtype);
        thread.record = &t.weights;
        thread.start = weights_start_of(t.weights.place, block.begin);
    }
    c.is_aligned = addresses % 16 == 0 && (!turned || t.matrix.cols % 8 == 0);
    if constexpr (turned) {
        __shared__ muon_turned tile;
        get_tile(tile, t, block);
        c.constants = shared;
        muon_spans<true>(block, t.matrix.cols, [&](int64_t first, int left, int row) {
            if constexpr (!plain)
                thread.start = weights_start_of(t.weights.place, block.begin + first);
            update_span<plain, true>(c, thread, first, left, row, tile.rows[row]);
        });
    } else {
        __syncthreads();
        c.constants = shared;
        muon_spans<false>(block, t.matrix.cols, [&](int64_t first, int left, int) {
            update_span<plain, false>(c, thread, first, left, 0, nullptr);
        });
    }
    if constexpr (!plain)
        if (args.stalled)
            weights_add_stalled(args.stalled, thread.stalled);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

typedef struct muon_rows_record {
    const void *update;
    float *row_vars;
    double *rows;
    hr_muon_matrix matrix;
    int64_t numel;
    uint32_t first_block, update_dtype;
} muon_rows_record;

typedef struct muon_rows_shared {
    hr_step_config step;
    double beta2;
} muon_rows_shared;

using muon_rows_launch = list_launch<muon_rows_shared, muon_rows_record>;

#define FEW 8 /* squares that are added in binary32 */

/* Adds the squares of elements `stride` apart, from `first` on. */
static __device__ __forceinline__ double row_part(const void *update, hr_dtype dtype, int64_t at,
                                                  int64_t first, int64_t cols, int64_t step,
                                                  int64_t stride)
{
    double sum = 0.0;
#pragma unroll 1
    for (int64_t col = first; col < cols; col += FEW * step) {
        float few = 0.0f;
#pragma unroll
        for (int e = 0; e < FEW; e++) {
            const int64_t j = col + e * step;
            const float x = j < cols ? hr_load(update, at + j * stride, dtype) : 0.0f;
            few += x * x;
        }
        sum += (double)few;
    }
    return sum;
}

/* The sums of the squares of rows. A warp has a row; or, where rows are columns in memory, a part of
 * 32 of them, a thread each. */
static __global__ void __launch_bounds__(THREADS)
    muon_rows_kernel(const muon_rows_launch __grid_constant__ args)
{
    __shared__ double parts[WARPS][WARP];
    if (step_is_skipped(&args.step))
        return;
    const muon_rows_record &t = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const hr_muon_matrix &m = t.matrix;
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const bool turned = m.transposed;
    const int64_t block = blockIdx.x - t.first_block;
    const int64_t row = turned ? block * WARP + lane : block * WARPS + warp;
    double sum = 0.0;
    if (row < m.rows)
        sum = row_part(t.update, (hr_dtype)t.update_dtype, muon_offset(&m, row, 0),
                       turned ? warp : lane, m.cols, turned ? WARPS : WARP, turned ? m.stride : 1);
    parts[warp][lane] = sum;
    for (int width = (turned ? WARPS : WARP) / 2; width > 0; width /= 2) {
        __syncthreads();
        if (turned && warp < width)
            parts[warp][lane] += parts[warp + width][lane];
        if (!turned && lane < width)
            parts[warp][lane] += parts[warp][lane + width];
    }
    if (row < m.rows && (turned ? warp : lane) == 0)
        t.rows[row] = parts[warp][lane];
}

/* Updates the variances of the rows of a matrix, and turns their sums into factors. A block per
 * matrix. */
static __global__ void __launch_bounds__(THREADS)
    muon_normalize_kernel(const muon_rows_launch __grid_constant__ args)
{
    __shared__ double ratio;
    if (step_is_skipped(&args.step))
        return;
    const muon_rows_record &t = args.tensors[blockIdx.x];
    double before = 0.0, after = 0.0;
    if (t.numel == 0)
        return;
#pragma unroll 1
    for (int64_t r = threadIdx.x; r < t.matrix.rows; r += THREADS) {
        const float row_var = muon_row_var(t.row_vars[r], t.rows[r], t.matrix.cols, args.beta2);
        const double divisor = muon_row_divisor(row_var);
        before += t.rows[r];
        after += t.rows[r] / (divisor * divisor);
        hr_store(t.row_vars, r, row_var, HR_F32);
    }
    before = reduce_block<THREADS>(before, reduce_add());
    __syncthreads();
    after = reduce_block<THREADS>(after, reduce_add());
    if (threadIdx.x == 0)
        ratio = muon_norm_ratio(before, after);
    __syncthreads();
#pragma unroll 1
    for (int64_t r = threadIdx.x; r < t.matrix.rows; r += THREADS)
        t.rows[r] = ratio / muon_row_divisor(t.row_vars[r]);
}

/* ---- The host -------------------------------------------------------------------------------- */

static uint32_t row_blocks(const hr_muon_matrix &m)
{
    return m.cols > 0 ? (uint32_t)muon_parts(m.rows, m.transposed ? WARP : WARPS) : 0;
}

static hr_status launch_rows(const muon_update_args *args, const hr_exec *exec)
{
    muon_rows_launch launch;
    launch.step = args->config->step;
    launch.beta2 = args->config->beta2;
    double *rows = args->rows;
    const auto fill = [&](muon_rows_record &t, int64_t k) {
        t.matrix = args->matrices[k];
        t.update = args->updates->data[k];
        t.update_dtype = (uint32_t)args->updates->dtype[k];
        t.row_vars = (float *)args->row_vars->data[k];
        t.rows = rows;
        rows += t.matrix.rows;
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH(muon_rows_kernel, blocks, THREADS, 0, exec->stream, launch);
        HR_LAUNCH(muon_normalize_kernel, launch.count, THREADS, 0, exec->stream, launch);
    };
    return list_launch_all(&launch, args->updates, "hr_muon_update", fill, queue,
                           [](const muon_rows_record &t) { return row_blocks(t.matrix); });
}

/* Queues launches for the matrices that are cut into tiles, or for all others. */
template <typename Record, bool turned>
static hr_status launch_kind(const muon_update_args *args, const hr_exec *exec)
{
    const hr_weights *const weights = args->config->step.weights;
    muon_update_launch<Record> launch;
    launch.config = *args->config;
    launch.mode = weights_mode_of(weights);
    launch.stalled = weights_stalled_of(weights);
    const double *rows = args->row_vars ? args->rows : nullptr;
    const auto fill = [&](Record &t, int64_t k) {
        t.matrix = args->matrices[k];
        t.is_dense = (uint8_t)muon_is_dense(&t.matrix);
        t.param = args->params->data[k];
        t.update = args->updates->data[k];
        t.step = step_counter(args->steps, k);
        t.scale = args->scales ? args->scales[k] : 1.0;
        t.param_dtype = (uint8_t)args->params->dtype[k];
        t.update_dtype = (uint8_t)args->updates->dtype[k];
        t.step_dtype = (uint8_t)step_counter_dtype(args->steps, k);
        t.factors = rows;
        rows += rows ? t.matrix.rows : 0;
        if constexpr (!Record::plain)
            t.weights = weights_record_of(weights, args->params, k);
    };
    const auto queue = [&](uint32_t blocks, int64_t) {
        if (blocks > 0)
            HR_LAUNCH((muon_update_kernel<Record, turned>), blocks, THREADS, 0, exec->stream,
                      launch);
    };
    return list_launch_all(
        &launch, args->params, "hr_muon_update", fill, queue, [](const Record &t) {
            const int64_t blocks =
                turned ? muon_tiles(&t.matrix) : muon_runs(&t.matrix, CUDA_CHUNK);
            return muon_is_tiled(t.matrix, false, 0) == turned ? (uint32_t)blocks : 0u;
        });
}

template <typename Record>
static hr_status launch_all(const muon_update_args *args, const hr_exec *exec)
{
    const hr_status status = launch_kind<Record, false>(args, exec);
    return status == HR_OK ? launch_kind<Record, true>(args, exec) : status;
}

hr_status muon_update_cuda(const muon_update_args *args, const hr_exec *exec)
{
    hr_status status = args->row_vars ? launch_rows(args, exec) : HR_OK;
    if (status == HR_OK)
        status = args->config->step.weights ? launch_all<muon_update_mode_record>(args, exec)
                                            : launch_all<muon_update_record>(args, exec);
    if (status != HR_OK)
        return status;
    list_count(&args->config->step, args->steps, 0, args->params->count, exec->stream);
    return cuda_launch_status("hr_muon_update");
}
