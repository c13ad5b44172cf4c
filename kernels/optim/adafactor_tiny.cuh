/* adafactor_tiny.cuh: the kernels of tiny matrices, a thread each. */
#ifndef HR_ADAFACTOR_TINY_CUH
#define HR_ADAFACTOR_TINY_CUH

#include "kernels/optim/adafactor.cuh"

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

/* What tiny matrices need besides. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_tiny_sums_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ double weight;
    if (is_skipped(args))
        return;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    int64_t from, to;
    adafactor_run_of(&record.t.shape, &record.t.cut, blockIdx.x - record.first_block, &from, &to);
    if (threadIdx.x == 0)
        weight = adafactor_weight(&args.config, adafactor_time(&record.t, &args.config));
    __syncthreads();
    tiny_variances(args.config, record.t, from, to, weight);
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
        const float root = sqrtf((float)(mean < c.mean ? c.mean : mean));
#pragma unroll 1
        for (int r = 0; r < rows; r++) {
            const adafactor_row row = adafactor_row_of(adafactor_tiny_row_factor(row_var[r], root),
                                                       c.bound, c.grad_factor);
#pragma unroll 1
            for (int e = 0; e < cols; e++) {
                const int64_t i = m * numel + r * cols + e;
                const float update = adafactor_update(row, hr_load(t.grad, i, t.grad_dtype),
                                                      adafactor_tiny_column_factor(col_var[e]));
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
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
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

static __global__ void __launch_bounds__(THREADS, 3)
    adafactor_tiny_norm_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_tiny_block<true>(args);
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_tiny_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    updates_of_tiny_block<false>(args);
}

#endif
