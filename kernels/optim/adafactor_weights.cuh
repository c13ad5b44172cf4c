/*
 * adafactor_weights.cuh: the kernels that read or write weights of any mode but HR_WEIGHTS_NEAREST,
 * one element at a time.
 */
#ifndef HR_ADAFACTOR_WEIGHTS_CUH
#define HR_ADAFACTOR_WEIGHTS_CUH

#include "kernels/optim/adafactor.cuh"

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
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    adafactor_place place = {};
    int64_t from = 0, to = 0;
    if (t.kind == ADAFACTOR_MATRIX)
        place = place_of_block(t, block);
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
    return adafactor_tiny_row_factor(row_var[i / cols % rows],
                                     sqrtf((float)(mean < least ? least : mean)));
}

static __device__ __forceinline__ float tiny_column_factor(const adafactor_tensor &t, int64_t i)
{
    const int64_t numel = t.shape.rows * t.shape.cols;
    return adafactor_tiny_column_factor(t.col_var[i / numel * t.shape.cols + i % t.shape.cols]);
}

static __global__ void __launch_bounds__(THREADS)
    adafactor_weights_apply_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ block_constants shared;
    __shared__ float row_factors[ROWS * THREADS];
    __shared__ double time;
    if (is_skipped(args))
        return;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const uint32_t block = blockIdx.x - record.first_block;
    const bool is_matrix = t.kind == ADAFACTOR_MATRIX;
    adafactor_place place = {};
    int64_t from = 0, to = 0;
    if (is_matrix)
        place = place_of_block(t, block);
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

#endif
