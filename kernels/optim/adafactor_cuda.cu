/*
 * adafactor_cuda.cu: the grids. Each phase is a launch over the blocks of all tensors and a small
 * one that adds up what they left. The list travels in the launch parameters.
 *
 * In a block of a matrix, `lanes` threads side by side take 8 columns each, and the groups of so
 * many take 8 rows each, every groups-th row. Eight elements per thread and turn, in 16-byte
 * accesses where every address of the tensor allows them, else one by one.
 */
#include "kernels/optim/adafactor_tiny.cuh"
#include "kernels/optim/adafactor_totals.cuh"
#include "kernels/optim/adafactor_weights.cuh"

/* The columns and rows of a thread in a block of a matrix. */
typedef struct thread_place {
    adafactor_place block;
    int lanes, lane, group;
    int count;      /* of columns, 0 to 8 */
    bool vector;    /* whether rows begin at multiples of 16 bytes */
    int64_t column; /* in the matrix */
} thread_place;

static __device__ __forceinline__ thread_place place_of_thread(const adafactor_tensor &t,
                                                               uint32_t block)
{
    thread_place p;
    p.block = adafactor_place_of(&t.shape, &t.cut, block);
    p.lanes = (int)(t.cut.block_cols / 8);
    p.lane = (int)threadIdx.x % p.lanes;
    p.group = (int)threadIdx.x / p.lanes;
    const int64_t left = p.block.cols - p.lane * 8;
    p.count = left >= 8 ? 8 : left > 0 ? (int)left : 0;
    p.column = p.block.col + p.lane * 8;
    p.vector = ((uintptr_t)t.param | (uintptr_t)t.grad | (uintptr_t)t.exp_avg) % 16 == 0 &&
               t.shape.cols % 8 == 0;
    return p;
}

/* The row that the thread takes j-th, and whether it is there. */
static __device__ __forceinline__ int row_of_thread(const thread_place &p, int j)
{
    return j * (THREADS / p.lanes) + p.group;
}

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

/* The thread's sum of the squares of param. */
static __device__ __forceinline__ double params_of_matrix(const adafactor_tensor &t, uint32_t block)
{
    const thread_place p = place_of_thread(t, block);
    float sum = 0.0f;
    for (int j = 0; j < ROWS; j++) {
        const int row = row_of_thread(p, j);
        float x[8];
        load_eight(x, t.param, p.block.first + p.lane * 8 + row * t.shape.cols,
                   row < p.block.rows ? p.count : 0, p.vector, t.param_dtype);
#pragma unroll
        for (int c = 0; c < 8; c++)
            x[c] *= x[c];
        sum += sum_of_eight(x);
    }
    return (double)sum;
}

/* Leaves the sums of squares of the block's rows and columns. */
static __device__ __forceinline__ void sums_of_matrix(const adafactor_tensor &t, uint32_t block,
                                                      float factor)
{
    __shared__ float sums[8 * THREADS];
    const thread_place p = place_of_thread(t, block);
    const int64_t first = p.block.first + p.lane * 8;
    float columns[8] = {0};
    for (int j = 0; j < ROWS; j++) {
        const int row = row_of_thread(p, j);
        float x[8];
        load_eight(x, t.grad, first + row * t.shape.cols, row < p.block.rows ? p.count : 0,
                   p.vector, t.grad_dtype);
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const float g = x[c] * factor;
            x[c] = g * g;
            columns[c] += x[c];
        }
        float sum = sum_of_eight(x);
        for (int width = p.lanes / 2; width > 0; width /= 2)
            sum += __shfl_xor_sync(0xFFFFFFFFu, sum, width);
        if (p.lane == 0 && row < p.block.rows)
            t.row_parts[(p.block.matrix * t.shape.rows + p.block.row + row) * t.cut.col_blocks +
                        p.block.col_block] = (double)sum;
    }
#pragma unroll
    for (int c = 0; c < 8; c++)
        sums[c * THREADS + threadIdx.x] = columns[c];
    for (int width = THREADS / 2; width >= p.lanes; width /= 2) {
        __syncthreads();
        if ((int)threadIdx.x < width) {
#pragma unroll
            for (int c = 0; c < 8; c++)
                sums[c * THREADS + threadIdx.x] += sums[c * THREADS + threadIdx.x + width];
        }
    }
    double *const parts =
        t.col_parts + (p.block.matrix * t.cut.row_blocks + p.block.row_block) * t.shape.cols;
    if (p.group == 0) {
        for (int c = 0; c < p.count; c++)
            parts[p.column + c] = (double)sums[c * THREADS + threadIdx.x];
    }
}

static __global__ void __launch_bounds__(THREADS, 3)
    adafactor_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    const float factor = step_grad_factor(&args.config.step);
    const bool scaled = adafactor_is_scaled(&args.config) && !args.config.step.weights;
    double sum = 0.0;
    if (t.kind == ADAFACTOR_MATRIX) {
        if (scaled)
            sum = params_of_matrix(t, block);
        sums_of_matrix(t, block, factor);
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

static __device__ __forceinline__ float square_of(const float (&update)[8], int count)
{
    float squares[8];
#pragma unroll
    for (int j = 0; j < 8; j++)
        squares[j] = j < count ? update[j] * update[j] : 0.0f;
    return sum_of_eight(squares);
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
static __device__ __forceinline__ double matrix_updates(const adafactor_tensor &t, uint32_t block,
                                                        const block_constants &c,
                                                        const float *row_factors)
{
    const thread_place p = place_of_thread(t, block);
    const int64_t first = p.block.first + p.lane * 8;
    float columns[8], sum = 0.0f;
    load_eight(columns, t.col_factors, p.block.matrix * t.shape.cols + p.column, p.count, false,
               HR_F32);
    for (int j = 0; j < ROWS; j++) {
        const int row = row_of_thread(p, j);
        if (row >= p.block.rows)
            break;
        const int64_t i = first + row * t.shape.cols;
        float grad[8], update[8];
        load_eight(grad, t.grad, i, p.count, p.vector, t.grad_dtype);
        updates_of(update, adafactor_row_of(row_factors[row], c.bound, c.grad_factor), grad,
                   columns);
        if (is_norm)
            sum += square_of(update, p.count);
        else
            apply_eight(t, c.step, update, i, p.count, p.vector);
    }
    return (double)sum;
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
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    const bool is_matrix = t.kind == ADAFACTOR_MATRIX;
    const adafactor_place place =
        is_matrix ? adafactor_place_of(&t.shape, &t.cut, block) : adafactor_place{};
    if (threadIdx.x == 0)
        shared = constants_of(args.config, t, place.matrix, is_norm);
    __syncthreads();
    const block_constants c = shared;
    double sum;
    if (is_matrix) {
        const float *const variances = t.row_var + place.matrix * t.shape.rows + place.row;
        for (int r = (int)threadIdx.x; r < place.rows; r += THREADS)
            row_factors[r] = adafactor_row_factor(variances[r], c.mean);
        __syncthreads();
        sum = matrix_updates<is_norm>(t, block, c, row_factors);
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

static __global__ void __launch_bounds__(THREADS)
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
    launch.mode = weights ? weights->mode : HR_WEIGHTS_NEAREST;
    launch.stalled = weights ? weights->stalled : nullptr;
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
