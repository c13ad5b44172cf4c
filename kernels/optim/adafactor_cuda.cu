/*
 * adafactor_cuda.cu: the grids. Each phase is a launch over the blocks of all tensors and a small
 * one that adds up what they left. The list travels in the launch parameters.
 *
 * In a block of a matrix, `lanes` threads side by side take 8 columns each, and the groups of so
 * many take 8 rows each, every groups-th row. Eight elements per thread and turn, in 16-byte
 * accesses where every address of the tensor allows them, else one by one.
 */
#include "kernels/optim/adafactor.h"
#include "kernels/core/reduce.cuh"
#include "kernels/weights/weights.cuh"

#define THREADS 256
#define ROWS    8 /* of a thread, in a block of a matrix */
#define STRANDS 8 /* threads that add up the parts of one row or column */

typedef struct adafactor_record {
    adafactor_tensor t;
    weights_record weights; /* if config.step.weights */
    int64_t numel;
    uint32_t first_block; /* in one launch after another */
} adafactor_record;

typedef struct adafactor_shared {
    hr_adafactor_config config; /* its `weights` only says whether there are any */
    hr_weights_mode mode;
    int64_t *stalled;
} adafactor_shared;

typedef list_launch<adafactor_shared, adafactor_record> adafactor_launch;

static __device__ __forceinline__ bool is_skipped(const adafactor_launch &args)
{
    return step_is_skipped(&args.config.step);
}

/* ---- Sums within a block --------------------------------------------------------------------- */

static __device__ __forceinline__ double sum_of_block(double sum)
{
    return reduce_block<THREADS>(sum, reduce_add());
}

static __device__ __forceinline__ float sum_of_eight(const float (&x)[8])
{
    return ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
}

/* ---- Eight elements -------------------------------------------------------------------------- */

/* Elements [i, i + count), count at most 8; zeros in the place of those that are not there. */
static __device__ __forceinline__ void load_eight(float (&x)[8], const void *base, int64_t i,
                                                  int count, bool vector, hr_dtype dtype)
{
    if (vector && count == 8) {
        const pack<8> all = pack_load<8>(base, i, dtype);
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = pack_get(all, j, dtype);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            x[j] = j < count ? hr_load(base, i + j, dtype) : 0.0f;
    }
}

static __device__ __forceinline__ void store_eight(void *base, int64_t i, const float (&x)[8],
                                                   int count, bool vector, hr_dtype dtype)
{
    if (vector && count == 8) {
        pack_store(base, i, pack_of(x, dtype), dtype);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < count)
                hr_store(base, i + j, x[j], dtype);
    }
}

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

/* The variances of a row (`stride` 1) or column of a tiny matrix. */
static __device__ __forceinline__ void tiny_line(float *variance, const adafactor_tensor &t,
                                                 int64_t first, int length, int stride,
                                                 float factor, double added, double weight)
{
    float sum = 0.0f;
    for (int e = 0; e < length; e++) {
        const float g = hr_load(t.grad, first + e * stride, t.grad_dtype) * factor;
        sum += g * g;
    }
    *variance = adafactor_variance(*variance, (double)sum / length + added, weight);
}

static __device__ __forceinline__ void tiny_variances(const hr_adafactor_config &config,
                                                      const adafactor_tensor &t, int64_t from,
                                                      int64_t to, double weight)
{
    const double added = adafactor_added(&config, adafactor_eps1(&config, t.param_dtype));
    const float factor = step_grad_factor(&config.step);
    const int rows = (int)t.shape.rows, cols = (int)t.shape.cols, numel = rows * cols;
    for (int64_t m = from / numel + threadIdx.x; m < to / numel; m += THREADS) {
        for (int r = 0; r < rows; r++)
            tiny_line(&t.row_var[m * rows + r], t, m * numel + r * cols, cols, 1, factor, added,
                      weight);
        for (int c = 0; c < cols; c++)
            tiny_line(&t.col_var[m * cols + c], t, m * numel + c, rows, cols, factor, added,
                      weight);
    }
}

static __global__ void __launch_bounds__(THREADS, 3)
    adafactor_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
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

/* What tiny matrices need besides. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_tiny_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ double weight;
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    int64_t from, to;
    adafactor_run_of(&record.t.shape, &record.t.cut, blockIdx.x - record.first_block, &from, &to);
    if (threadIdx.x == 0)
        weight = adafactor_weight(&args.config, adafactor_time(&record.t, &args.config));
    __syncthreads();
    tiny_variances(args.config, record.t, from, to, weight);
}

/* ---- Rows and columns ------------------------------------------------------------------------ */

/* THREADS / STRANDS lines of all rows, then all columns, of a tensor of matrices. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_lines_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ double sums[THREADS];
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    const adafactor_tensor &t = record.t;
    const int64_t rows = t.shape.batch * t.shape.rows, lines = adafactor_lines(&t);
    const int64_t line = (int64_t)(blockIdx.x - record.first_block) * (THREADS / STRANDS) +
                         threadIdx.x % (THREADS / STRANDS);
    const int strand = (int)threadIdx.x / (THREADS / STRANDS);
    const bool is_row = line < rows;
    const int64_t c = line - rows;
    double *const total = is_row ? t.row_sums + line : t.col_sums + c;
    if (args.config.phases & HR_ADAFACTOR_SUMS) {
        const int64_t parts = is_row ? t.cut.col_blocks : t.cut.row_blocks;
        const int64_t stride = is_row ? 1 : t.shape.cols;
        const double *const part =
            is_row ? t.row_parts + line * parts
                   : t.col_parts + c / t.shape.cols * parts * stride + c % t.shape.cols;
        double sum = 0.0;
        for (int64_t i = strand; i < parts && line < lines; i += STRANDS)
            sum += part[i * stride];
        sums[threadIdx.x] = sum;
        for (int width = THREADS / 2; width >= THREADS / STRANDS; width /= 2) {
            __syncthreads();
            if ((int)threadIdx.x < width)
                sums[threadIdx.x] += sums[threadIdx.x + width];
        }
        if (strand == 0 && line < lines)
            *total = sums[threadIdx.x];
    }
    if (!(args.config.phases & HR_ADAFACTOR_STATES) || strand != 0 || line >= lines)
        return;
    const double added = adafactor_added(&args.config, adafactor_eps1(&args.config, t.param_dtype));
    const double weight = adafactor_weight(&args.config, adafactor_time(&t, &args.config));
    const double length = (double)(is_row ? t.shape.whole_cols : t.shape.whole_rows);
    float *const variance = is_row ? t.row_var + line : t.col_var + c;
    *variance = adafactor_variance(*variance, *total / length + added, weight);
    if (!is_row)
        t.col_factors[c] = adafactor_column_factor(*variance);
}

/* A block per matrix, and the first of a tensor for its parameters too. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_means_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    const adafactor_tensor &t = record.t;
    const int64_t matrix = blockIdx.x - record.first_block;
    if (t.kind == ADAFACTOR_MATRIX && t.shape.batch > 0 &&
        args.config.phases & HR_ADAFACTOR_STATES) {
        double sum = 0.0;
        for (int64_t r = threadIdx.x; r < t.shape.rows; r += THREADS)
            sum += (double)t.row_var[matrix * t.shape.rows + r];
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            t.means[matrix] = sum;
    }
    if (matrix == 0 && args.config.phases & HR_ADAFACTOR_SUMS) {
        double sum = 0.0;
        for (int64_t i = threadIdx.x; i < t.cut.blocks; i += THREADS)
            sum += t.blocks_of_params[i];
        __syncthreads(); /* before the sums of the block are used again */
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            *t.squared_param = sum;
    }
}

/* ---- Updates --------------------------------------------------------------------------------- */

/* What the elements of a block have in common. */
typedef struct block_constants {
    adafactor_step step;
    double mean;
    float bound, grad_factor;
    float weight, keep, added; /* of the variances of a vector */
} block_constants;

/* By one thread, which hands them to the others. */
static __device__ __forceinline__ block_constants constants_of(const hr_adafactor_config &config,
                                                               const adafactor_tensor &t,
                                                               int64_t matrix, bool is_norm)
{
    const double eps1 = adafactor_eps1(&config, t.param_dtype);
    const double time = adafactor_time(&t, &config);
    block_constants c;
    c.bound = adafactor_bound(&config, eps1);
    c.grad_factor = step_grad_factor(&config.step);
    c.mean = t.kind == ADAFACTOR_MATRIX ? adafactor_mean_of(&t, &config, eps1, matrix)
                                        : adafactor_least_mean(&config, eps1);
    c.added = (float)adafactor_added(&config, eps1);
    c.weight = c.keep = 0.0f;
    if (!is_norm) {
        c.step = adafactor_step_of(&config, adafactor_fold(&config, time), *t.squared_param,
                                   *t.squared_update, (double)t.shape.whole_numel);
    } else if (t.kind == ADAFACTOR_VECTOR) {
        const double weight = adafactor_weight(&config, time);
        c.weight = (float)weight;
        c.keep = (float)(1.0 - weight);
    }
    return c;
}

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
    const adafactor_record &record = list_find(args.tensors, args.count);
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

/* A thread takes a matrix. Unrolled, the loops would take more registers than there are. */
template <bool is_norm>
static __device__ __forceinline__ double tiny_updates(const adafactor_tensor &t, int64_t from,
                                                      int64_t to, const block_constants &c)
{
    const int rows = (int)t.shape.rows, cols = (int)t.shape.cols, numel = rows * cols;
    double sum = 0.0;
    for (int64_t m = from / numel + threadIdx.x; m < to / numel; m += THREADS) {
        const float *const row_var = t.row_var + m * rows, *const col_var = t.col_var + m * cols;
        double mean = 0.0;
        float squares = 0.0f;
#pragma unroll 1
        for (int r = 0; r < rows; r++)
            mean += (double)row_var[r];
        mean /= rows;
        mean = mean < c.mean ? c.mean : mean;
#pragma unroll 1
        for (int r = 0; r < rows; r++) {
            const adafactor_row row =
                adafactor_row_of(adafactor_row_factor(row_var[r], mean), c.bound, c.grad_factor);
#pragma unroll 1
            for (int e = 0; e < cols; e++) {
                const int64_t i = m * numel + r * cols + e;
                const float update = adafactor_update(row, hr_load(t.grad, i, t.grad_dtype),
                                                      adafactor_column_factor(col_var[e]));
                squares += update * update;
                if (is_norm)
                    continue;
                const float x = hr_load(t.param, i, t.param_dtype);
                hr_store(t.param, i,
                         adafactor_apply(c.step, x, update, t.exp_avg ? t.exp_avg + i : nullptr),
                         t.param_dtype);
            }
        }
        sum += (double)squares;
    }
    return sum;
}

/* Their own kernels, because more registers would be in use at once than there are. */
template <bool is_norm>
static __device__ __forceinline__ void updates_of_tiny_block(const adafactor_launch &args)
{
    __shared__ block_constants shared;
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    if (threadIdx.x == 0)
        shared = constants_of(args.config, t, 0, is_norm);
    __syncthreads();
    int64_t from, to;
    adafactor_run_of(&t.shape, &t.cut, block, &from, &to);
    double sum = tiny_updates<is_norm>(t, from, to, shared);
    if (is_norm) {
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            t.blocks_of_updates[block] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_tiny_norm_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_tiny_block<true>(args);
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_tiny_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_tiny_block<false>(args);
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_norm_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_block<true>(args);
}

/* ---- Weights that are not plain, one by one -------------------------------------------------- */

/* Element `l` of the block, and how many there are. */
static __device__ __forceinline__ int64_t element_of_block(const adafactor_tensor &t,
                                                           const adafactor_place &place,
                                                           int64_t from, int64_t l)
{
    if (t.kind != ADAFACTOR_MATRIX)
        return from + l;
    return place.first + l / place.cols * t.shape.cols + l % place.cols;
}

static __device__ __forceinline__ int64_t count_of_block(const adafactor_tensor &t,
                                                         const adafactor_place &place, int64_t from,
                                                         int64_t to)
{
    return t.kind == ADAFACTOR_MATRIX ? place.rows * place.cols : to - from;
}

/* The sum of the squares of the weights, joined. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_weights_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    adafactor_place place = {};
    int64_t from = 0, to = 0;
    if (t.kind == ADAFACTOR_MATRIX)
        place = adafactor_place_of(&t.shape, &t.cut, block);
    else
        adafactor_run_of(&t.shape, &t.cut, block, &from, &to);
    double sum = 0.0;
    for (int64_t l = threadIdx.x; l < count_of_block(t, place, from, to); l += THREADS) {
        const float x = weights_join(weights_bits_at(t.param, record.weights.residual,
                                                     element_of_block(t, place, from, l),
                                                     t.param_dtype, args.mode),
                                     t.param_dtype, args.mode);
        sum += (double)(x * x);
    }
    sum = sum_of_block(sum);
    if (threadIdx.x == 0)
        t.blocks_of_params[block] = sum;
}

/* The row and the column factor of element i of tiny matrices. */
static __device__ __forceinline__ float tiny_row_factor(const adafactor_tensor &t, int64_t i,
                                                        double least)
{
    const int64_t rows = t.shape.rows, cols = t.shape.cols;
    const float *const row_var = t.row_var + i / (rows * cols) * rows;
    double mean = 0.0;
#pragma unroll 1
    for (int64_t r = 0; r < rows; r++)
        mean += (double)row_var[r];
    mean /= (double)rows;
    return adafactor_row_factor(row_var[i / cols % rows], mean < least ? least : mean);
}

static __device__ __forceinline__ float tiny_column_factor(const adafactor_tensor &t, int64_t i)
{
    const int64_t numel = t.shape.rows * t.shape.cols;
    return adafactor_column_factor(t.col_var[i / numel * t.shape.cols + i % t.shape.cols]);
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_weights_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ block_constants shared;
    __shared__ float row_factors[ROWS * THREADS];
    __shared__ double time;
    if (is_skipped(args))
        return;
    const adafactor_record &record = list_find(args.tensors, args.count);
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    const bool is_matrix = t.kind == ADAFACTOR_MATRIX;
    adafactor_place place = {};
    int64_t from = 0, to = 0;
    if (is_matrix)
        place = adafactor_place_of(&t.shape, &t.cut, block);
    else
        adafactor_run_of(&t.shape, &t.cut, block, &from, &to);
    if (threadIdx.x == 0) {
        shared = constants_of(args.config, t, place.matrix, false);
        time = adafactor_time(&t, &args.config);
    }
    __syncthreads();
    if (is_matrix) {
        const float *const variances = t.row_var + place.matrix * t.shape.rows + place.row;
        for (int r = (int)threadIdx.x; r < place.rows; r += THREADS)
            row_factors[r] = adafactor_row_factor(variances[r], shared.mean);
        __syncthreads();
    }
    void *const residual = record.weights.residual;
    uint32_t stalled = 0;
    for (int64_t l = threadIdx.x; l < count_of_block(t, place, from, to); l += THREADS) {
        const int64_t i = element_of_block(t, place, from, l);
        const float row = is_matrix                  ? row_factors[l / place.cols]
                          : t.kind == ADAFACTOR_TINY ? tiny_row_factor(t, i, shared.mean)
                                                     : 1.0f;
        const float column =
            is_matrix ? t.col_factors[place.matrix * t.shape.cols + place.col + l % place.cols]
            : t.kind == ADAFACTOR_TINY ? tiny_column_factor(t, i)
                                       : 1.0f / sqrtf(t.variance[i]);
        const float update =
            adafactor_update(adafactor_row_of(row, shared.bound, shared.grad_factor),
                             hr_load(t.grad, i, t.grad_dtype), column);
        const weights_bits before = weights_bits_at(t.param, residual, i, t.param_dtype, args.mode);
        const float was = weights_join(before, t.param_dtype, args.mode);
        const float is =
            adafactor_apply(shared.step, was, update, t.exp_avg ? t.exp_avg + i : nullptr);
        const uint32_t random =
            weights_are_random(args.mode)
                ? weights_random_at(record.weights, weights_start_of(record.weights.place, i), time,
                                    0)
                : 0;
        const weights_bits after = weights_split(is, t.param_dtype, args.mode, random);
        weights_put_bits(t.param, residual, i, after, t.param_dtype, args.mode);
        stalled += weights_stall(before, after, was, is);
    }
    if (args.stalled)
        weights_add_stalled(args.stalled, stalled);
}

/* A block per tensor. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_total_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_tensor &t = args.tensors[blockIdx.x].t;
    double sum = 0.0;
    for (int64_t i = threadIdx.x; i < t.cut.blocks; i += THREADS)
        sum += t.blocks_of_updates[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0)
        *t.squared_update = sum;
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_block<false>(args);
}

/* A thread per tensor. A launch of its own, after the update: every block of a tensor reads its
 * counter. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_count_kernel(const adafactor_launch __grid_constant__ args)
{
    const uint32_t k = blockIdx.x * THREADS + threadIdx.x;
    if (k >= args.count || is_skipped(args))
        return;
    const adafactor_tensor &t = args.tensors[k].t;
    if (t.rms && t.shape.whole_numel > 0 && adafactor_is_scaled(&args.config))
        hr_store(t.rms, 0, (float)sqrt(*t.squared_param / (double)t.shape.whole_numel), HR_F32);
    if (t.step)
        step_count(t.step, t.step_dtype);
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
