/*
 * adafactor_cuda.cu: the grids. Each phase is a launch over the blocks of all tensors and a small
 * one that adds up what they left. The list travels in the launch parameters.
 */
#include "kernels/optim/adafactor_matrix.cuh"
#include "kernels/optim/adafactor_tiny.cuh"
#include "kernels/optim/adafactor_totals.cuh"
#include "kernels/optim/adafactor_weights.cuh"

/* ---- Sums ------------------------------------------------------------------------------------ */

static __device__ __forceinline__ double squares_of_run(const void *x, int64_t from, int64_t to,
                                                        hr_dtype dtype)
{
    const bool vector = (uintptr_t)x % 16 == 0 && from % 8 == 0;
    double sum = 0.0;
    for (int64_t i = from + threadIdx.x * 8; i < to; i += THREADS * 8) {
        float values[8];
        load_eight(values, x, i, to - i < 8 ? (int)(to - i) : 8, vector, dtype);
#pragma unroll
        for (int j = 0; j < 8; j++)
            values[j] *= values[j];
        sum += (double)sum_of_eight(values);
    }
    return sum;
}

static __global__ void __launch_bounds__(THREADS, 3)
    adafactor_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ float sums[8 * THREADS]; /* of columns */
    if (is_skipped(args))
        return;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    const float factor = step_grad_factor(&args.config.step);
    const bool scaled = adafactor_is_scaled(&args.config) && !args.config.step.weights;
    double sum = 0.0;
    if (t.kind == ADAFACTOR_MATRIX) {
        const thread_place p = place_of_thread(t, block);
        float *const columns = sums;
        sum = by_kind(t, p, [&](auto kind) {
            return scaled ? sums_of_matrix<decltype(kind), true>(t, p, factor, columns)
                          : sums_of_matrix<decltype(kind), false>(t, p, factor, columns);
        });
    } else {
        int64_t from, to;
        adafactor_run_of(&t.shape, &t.cut, block, &from, &to);
        if (scaled)
            sum = squares_of_run(t.param, from, to, t.param_dtype);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0)
        t.blocks_of_params[block] = sum;
}

/* ---- Updates --------------------------------------------------------------------------------- */

/* Eight updates, from a row and the factors of the columns. */
static __device__ __forceinline__ void updates_of(float (&update)[8], const adafactor_row &row,
                                                  const float (&grad)[8], const float (&columns)[8])
{
#pragma unroll
    for (int j = 0; j < 8; j++)
        update[j] = adafactor_update(row, grad[j], columns[j]);
}

static __device__ __forceinline__ void apply_eight(const adafactor_tensor &t, adafactor_step step,
                                                   const float (&update)[8], int64_t i, int count,
                                                   bool vector)
{
    float x[8];
    load_eight(x, t.param, i, count, vector, t.param_dtype);
    if (t.exp_avg) {
        float average[8];
        load_eight(average, t.exp_avg, i, count, vector, HR_F32);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = adafactor_apply(step, x[j], update[j], &average[j]);
        store_eight(t.exp_avg, i, average, count, vector, HR_F32);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = adafactor_apply(step, x[j], update[j], nullptr);
    }
    store_eight(t.param, i, x, count, vector, t.param_dtype);
}

template <bool is_norm>
static __device__ __forceinline__ double vector_updates(const adafactor_tensor &t, int64_t from,
                                                        int64_t to, const block_constants &c)
{
    const bool vector =
        ((uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.variance | (uintptr_t)t.exp_avg) %
            16 ==
        0;
    const adafactor_row row = adafactor_row_of(1.0f, c.bound, c.grad_factor);
    double sum = 0.0;
    for (int64_t i = from + threadIdx.x * 8; i < to; i += THREADS * 8) {
        const int count = to - i < 8 ? (int)(to - i) : 8;
        float grad[8], variance[8], factors[8], update[8];
        load_eight(grad, t.grad, i, count, vector, t.grad_dtype);
        load_eight(variance, t.variance, i, count, vector, HR_F32);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const float x = grad[j] * c.grad_factor;
            if (is_norm)
                variance[j] =
                    adafactor_element_variance(variance[j], x * x + c.added, c.weight, c.keep);
            factors[j] = 1.0f / sqrtf(variance[j]);
        }
        updates_of(update, row, grad, factors);
        if (is_norm) {
            store_eight(t.variance, i, variance, count, vector, HR_F32);
            sum += (double)square_of(update, count);
        } else {
            apply_eight(t, c.step, update, i, count, vector);
        }
    }
    return sum;
}

template <bool is_norm>
static __device__ __forceinline__ void updates_of_block(const adafactor_launch &args)
{
    __shared__ block_constants shared;
    __shared__ float row_factors[ROWS * THREADS];
    if (is_skipped(args))
        return;
    /* The norm goes backwards: the gradients that the sums read last may still be in the cache, and
     * those that it reads last are the first that are applied. */
    const uint32_t index = is_norm ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, index)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = index - record.first_block;
    const bool is_matrix = t.kind == ADAFACTOR_MATRIX;
    const thread_place p = is_matrix ? place_of_thread(t, block) : thread_place{};
    if (threadIdx.x == 0)
        shared = constants_of(args.config, t, p.block.matrix, is_norm);
    __syncthreads();
    const block_constants c = shared;
    double sum;
    if (is_matrix) {
        const float *const variances = t.row_var + p.block.matrix * t.shape.rows + p.block.row;
        for (int r = (int)threadIdx.x; r < p.block.rows; r += THREADS)
            row_factors[r] = adafactor_row_factor(variances[r], c.mean);
        __syncthreads();
        const float *const factors = row_factors;
        sum = by_kind(t, p, [&](auto kind) {
            if (!is_norm && t.exp_avg)
                return matrix_updates<decltype(kind), is_norm, !is_norm>(t, p, c, factors);
            return matrix_updates<decltype(kind), is_norm, false>(t, p, c, factors);
        });
    } else {
        int64_t from, to;
        adafactor_run_of(&t.shape, &t.cut, block, &from, &to);
        sum = vector_updates<is_norm>(t, from, to, c);
    }
    if (is_norm) {
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            t.blocks_of_updates[block] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_norm_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_block<true>(args);
}

static __global__ void __launch_bounds__(THREADS, 3)
    adafactor_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_block<false>(args);
}

/* ---- Launches -------------------------------------------------------------------------------- */

typedef void (*adafactor_kernel)(const adafactor_launch __grid_constant__);

static int64_t blocks_of_elements(const adafactor_tensor *t)
{
    return t->cut.blocks;
}

static int64_t blocks_of_tiny(const adafactor_tensor *t)
{
    return t->kind == ADAFACTOR_TINY ? t->cut.blocks : 0;
}

static int64_t blocks_of_others(const adafactor_tensor *t)
{
    return t->kind != ADAFACTOR_TINY ? t->cut.blocks : 0;
}

static int64_t blocks_of_lines(const adafactor_tensor *t)
{
    return adafactor_ceil(adafactor_lines(t), THREADS / STRANDS);
}

static int64_t blocks_of_matrices(const adafactor_tensor *t)
{
    return t->kind == ADAFACTOR_MATRIX ? adafactor_max(t->shape.batch, 1) : 1;
}

/* One launch with so many blocks per tensor that has elements. */
static void launch_blocks(adafactor_launch *launch, adafactor_kernel kernel,
                          int64_t (*blocks_of)(const adafactor_tensor *), hr_stream stream)
{
    uint32_t blocks = 0;
    for (uint32_t k = 0; k < launch->count; k++) {
        const adafactor_tensor *const t = &launch->tensors[k].t;
        launch->tensors[k].first_block = blocks;
        blocks += t->shape.whole_numel > 0 ? (uint32_t)blocks_of(t) : 0;
    }
    if (blocks > 0)
        HR_LAUNCH(kernel, blocks, THREADS, 0, stream, *launch);
}

static void launch_phases(adafactor_launch *launch, hr_stream stream)
{
    const int phases = launch->config.phases;
    if (phases & HR_ADAFACTOR_SUMS) {
        launch_blocks(launch, adafactor_sums_kernel, blocks_of_elements, stream);
        launch_blocks(launch, adafactor_tiny_sums_kernel, blocks_of_tiny, stream);
        if (launch->config.step.weights && adafactor_is_scaled(&launch->config))
            launch_blocks(launch, adafactor_weights_sums_kernel, blocks_of_elements, stream);
    }
    if (phases & (HR_ADAFACTOR_SUMS | HR_ADAFACTOR_STATES)) {
        launch_blocks(launch, adafactor_lines_kernel, blocks_of_lines, stream);
        launch_blocks(launch, adafactor_means_kernel, blocks_of_matrices, stream);
    }
    if (phases & HR_ADAFACTOR_NORM) {
        launch_blocks(launch, adafactor_norm_kernel, blocks_of_others, stream);
        launch_blocks(launch, adafactor_tiny_norm_kernel, blocks_of_tiny, stream);
        HR_LAUNCH(adafactor_total_kernel, launch->count, THREADS, 0, stream, *launch);
    }
    if (phases & HR_ADAFACTOR_APPLY) {
        if (launch->config.step.weights) {
            launch_blocks(launch, adafactor_weights_apply_kernel, blocks_of_elements, stream);
        } else {
            launch_blocks(launch, adafactor_apply_kernel, blocks_of_others, stream);
            launch_blocks(launch, adafactor_tiny_apply_kernel, blocks_of_tiny, stream);
        }
        HR_LAUNCH(adafactor_count_kernel, (launch->count + THREADS - 1) / THREADS, THREADS, 0,
                  stream, *launch);
    }
}

hr_status adafactor_cuda(const adafactor_args *args, const hr_exec *exec)
{
    const int64_t count = args->params->count;
    const adafactor_extent all = adafactor_extent_of(args->shapes, count, adafactor_cut_cuda);
    adafactor_extent before = {0, 0, 0, 0, 0, 0};
    adafactor_launch launch;
    const hr_weights *const weights = args->config->step.weights;
    launch.config = *args->config;
    launch.mode = weights_mode_of(weights);
    launch.stalled = weights_stalled_of(weights);
    const auto fill = [&](adafactor_record &record, int64_t k) {
        const adafactor_cut cut = adafactor_cut_cuda(&args->shapes[k]);
        record.t = adafactor_tensor_of(args, k, cut, &before, &all);
        if (weights)
            record.weights = weights_record_of(weights, args->params, k);
        adafactor_add(&before, &args->shapes[k], &cut);
    };
    const auto queue = [&](uint32_t, int64_t) { launch_phases(&launch, exec->stream); };
    return list_launch_all(&launch, args->params, "hr_adafactor", fill, queue);
}
