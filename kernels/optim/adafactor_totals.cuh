/*
 * adafactor_totals.cuh: the small kernels, which add up what the blocks of the others left, update the
 * variances of rows and columns, and count the step.
 */
#ifndef HR_ADAFACTOR_TOTALS_CUH
#define HR_ADAFACTOR_TOTALS_CUH

#include "kernels/optim/adafactor.cuh"

#define STRANDS 8 /* threads that add up the parts of one row or column */

/* THREADS / STRANDS lines of all rows, then all columns, of a tensor of matrices. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_lines_kernel(const adafactor_launch __grid_constant__ args)
{
    __shared__ double sums[THREADS];
    if (is_skipped(args))
        return;
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
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
#pragma unroll 4
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
    const adafactor_record &record = args.tensors[list_find(args.tensors, args.count, blockIdx.x)];
    const adafactor_tensor &t = record.t;
    const int64_t matrix = blockIdx.x - record.first_block;
    if (t.kind == ADAFACTOR_MATRIX && t.shape.batch > 0 &&
        args.config.phases & HR_ADAFACTOR_STATES) {
        double sum = 0.0;
#pragma unroll 4
        for (int64_t r = threadIdx.x; r < t.shape.rows; r += THREADS)
            sum += (double)t.row_var[matrix * t.shape.rows + r];
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            t.means[matrix] = sum;
    }
    if (matrix == 0 && args.config.phases & HR_ADAFACTOR_SUMS) {
        double sum = 0.0;
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < t.cut.blocks; i += THREADS)
            sum += t.blocks_of_params[i];
        __syncthreads(); /* before the sums of the block are used again */
        sum = sum_of_block(sum);
        if (threadIdx.x == 0)
            *t.squared_param = sum;
    }
}

/* A block per tensor. */
static __global__ void __launch_bounds__(THREADS)
    adafactor_total_kernel(const adafactor_launch __grid_constant__ args)
{
    if (is_skipped(args))
        return;
    const adafactor_tensor &t = args.tensors[blockIdx.x].t;
    double sum = 0.0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < t.cut.blocks; i += THREADS)
        sum += t.blocks_of_updates[i];
    sum = sum_of_block(sum);
    if (threadIdx.x == 0)
        *t.squared_update = sum;
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

#endif
