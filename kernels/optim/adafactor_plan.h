/*
 * adafactor_plan.h: how a call of Adafactor is cut into blocks, and what the passes leave in the
 * workspace.
 *
 * A step has four phases, because each needs sums over whole rows, columns and tensors of what the
 * previous phase computed:
 *
 *     sums    reads grad and param: sum of grad^2 per row and per column, sum of param^2
 *     states  updates the variances of rows and columns: no pass over elements
 *     norm    reads grad: sum of update^2
 *     apply   reads grad and param, writes param
 *
 * Blocks write partial sums to the workspace, which are then added in a fixed order. There are
 * three kinds of tensors. A matrix [batch, rows, cols] is cut into blocks of rows and columns. Tiny
 * matrices, such as those of convolutions, are too many to have sums in memory: the first phase
 * sums their rows and columns and updates the variances at once. A vector has a variance per
 * element.
 */
#ifndef HR_ADAFACTOR_PLAN_H
#define HR_ADAFACTOR_PLAN_H

#include "kernels/optim/adafactor.h"

/* ---- Tensors, and how they are cut ----------------------------------------------------------- */

typedef enum adafactor_kind { ADAFACTOR_VECTOR, ADAFACTOR_TINY, ADAFACTOR_MATRIX } adafactor_kind;

#define ADAFACTOR_TINY_NUMEL 64 /* the most elements of a tiny matrix */

HR_INLINE adafactor_kind adafactor_kind_of(const hr_adafactor_shape *shape)
{
    if (!shape->factored)
        return ADAFACTOR_VECTOR;
    const int is_whole = shape->whole_rows == 0 && shape->whole_cols == 0;
    return is_whole && shape->rows * shape->cols <= ADAFACTOR_TINY_NUMEL ? ADAFACTOR_TINY
                                                                         : ADAFACTOR_MATRIX;
}

/* How a tensor is cut. A block of a matrix has block_rows x block_cols elements; a block of a
 * vector, or of tiny matrices, is a run of block_cols elements. */
typedef struct adafactor_cut {
    int64_t block_rows, block_cols;
    int64_t row_blocks, col_blocks; /* of each matrix */
    int64_t blocks;                 /* of the tensor */
} adafactor_cut;

HR_INLINE int64_t adafactor_ceil(int64_t n, int64_t step)
{
    return (n + step - 1) / step;
}

HR_INLINE int64_t adafactor_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Cuts a vector or tiny matrices into blocks of about `size` elements. */
HR_INLINE adafactor_cut adafactor_cut_run(const hr_adafactor_shape *shape, int64_t size)
{
    const int64_t matrix = shape->factored ? adafactor_max(shape->rows * shape->cols, 1) : 1;
    adafactor_cut cut = {1, size / matrix * matrix, 0, 0, 0};
    cut.blocks = adafactor_ceil(shape->batch * shape->rows * shape->cols, cut.block_cols);
    return cut;
}

HR_INLINE adafactor_cut adafactor_cut_matrix(const hr_adafactor_shape *shape, int64_t block_rows,
                                             int64_t block_cols)
{
    adafactor_cut cut = {block_rows, block_cols, 0, 0, 0};
    cut.row_blocks = adafactor_ceil(shape->rows, block_rows);
    cut.col_blocks = adafactor_ceil(shape->cols, block_cols);
    cut.blocks = shape->batch * cut.row_blocks * cut.col_blocks;
    return cut;
}

#define ADAFACTOR_CPU_COLS 4096

/* Blocks have at least 32,768 elements, and a matrix has at most 64 blocks of rows, so that the
 * partial sums of columns are few compared with the elements. */
HR_INLINE adafactor_cut adafactor_cut_cpu(const hr_adafactor_shape *shape)
{
    if (adafactor_kind_of(shape) != ADAFACTOR_MATRIX)
        return adafactor_cut_run(shape, 65536);
    const int64_t cols =
        shape->cols < ADAFACTOR_CPU_COLS ? adafactor_max(shape->cols, 1) : ADAFACTOR_CPU_COLS;
    const int64_t rows =
        adafactor_max(adafactor_ceil(shape->rows, 64), adafactor_ceil(32768, cols));
    return adafactor_cut_matrix(shape, (rows + 3) / 4 * 4, cols);
}

/* A CUDA block has 256 threads, which take 8 rows of 8 columns each; `lanes` of them are side by
 * side. */
HR_INLINE int64_t adafactor_lanes(int64_t cols)
{
    int64_t lanes = 1;
    while (lanes < 32 && lanes * 8 < cols)
        lanes *= 2;
    return lanes;
}

HR_INLINE adafactor_cut adafactor_cut_cuda(const hr_adafactor_shape *shape)
{
    if (adafactor_kind_of(shape) != ADAFACTOR_MATRIX)
        return adafactor_cut_run(shape, 16384);
    const int64_t lanes = adafactor_lanes(shape->cols);
    return adafactor_cut_matrix(shape, 256 / lanes * 8, lanes * 8);
}

/* Where a block of a matrix lies. */
typedef struct adafactor_place {
    int64_t matrix, row_block, row, rows, col_block, col, cols;
    int64_t first; /* element */
} adafactor_place;

HR_INLINE adafactor_place adafactor_place_at(const hr_adafactor_shape *shape,
                                             const adafactor_cut *cut, int64_t matrix,
                                             int64_t row_block, int64_t col_block)
{
    adafactor_place b;
    b.col_block = col_block;
    b.row_block = row_block;
    b.matrix = matrix;
    b.row = b.row_block * cut->block_rows;
    b.col = b.col_block * cut->block_cols;
    b.rows = shape->rows - b.row < cut->block_rows ? shape->rows - b.row : cut->block_rows;
    b.cols = shape->cols - b.col < cut->block_cols ? shape->cols - b.col : cut->block_cols;
    b.first = (b.matrix * shape->rows + b.row) * shape->cols + b.col;
    return b;
}

HR_INLINE adafactor_place adafactor_place_of(const hr_adafactor_shape *shape,
                                             const adafactor_cut *cut, int64_t i)
{
    const int64_t row_block = i / cut->col_blocks;
    return adafactor_place_at(shape, cut, row_block / cut->row_blocks, row_block % cut->row_blocks,
                              i % cut->col_blocks);
}

/* The elements [*from, *to) of block i of a vector or of tiny matrices. */
HR_INLINE void adafactor_run_of(const hr_adafactor_shape *shape, const adafactor_cut *cut,
                                int64_t i, int64_t *from, int64_t *to)
{
    const int64_t numel = shape->batch * shape->rows * shape->cols;
    *from = i * cut->block_cols;
    *to = numel - *from < cut->block_cols ? numel : *from + cut->block_cols;
}

/* ---- The workspace --------------------------------------------------------------------------- */

/* Sizes that add up over tensors. The workspace holds these arrays, in binary64 and in this order;
 * the first five are documented at hr_adafactor, for callers that add them over ranks:
 *
 *     [tensors]  sum of param^2
 *     [tensors]  sum of update^2
 *     [matrices] sum of the row variances
 *     [rows]     sum of grad^2
 *     [cols]     sum of grad^2
 *     [blocks]   partial sums of param^2
 *     [blocks]   partial sums of update^2
 *     [row_parts], [col_parts]  partial sums of grad^2 of rows and columns
 *     [cols]     factors of columns, in binary32
 */
typedef struct adafactor_extent {
    int64_t matrices, rows, cols, blocks, row_parts, col_parts;
} adafactor_extent;

HR_INLINE void adafactor_add(adafactor_extent *extent, const hr_adafactor_shape *shape,
                             const adafactor_cut *cut)
{
    extent->blocks += cut->blocks;
    if (adafactor_kind_of(shape) != ADAFACTOR_MATRIX)
        return;
    extent->matrices += shape->batch;
    extent->rows += shape->batch * shape->rows;
    extent->cols += shape->batch * shape->cols;
    extent->row_parts += shape->batch * shape->rows * cut->col_blocks;
    extent->col_parts += shape->batch * shape->cols * cut->row_blocks;
}

HR_INLINE adafactor_extent adafactor_extent_of(const hr_adafactor_shape *shapes, int64_t count,
                                               adafactor_cut (*cut_of)(const hr_adafactor_shape *))
{
    adafactor_extent extent = {0, 0, 0, 0, 0, 0};
    for (int64_t k = 0; k < count; k++) {
        const adafactor_cut cut = cut_of(&shapes[k]);
        adafactor_add(&extent, &shapes[k], &cut);
    }
    return extent;
}

HR_INLINE size_t adafactor_bytes(const adafactor_extent *all, int64_t count)
{
    return 8 * (size_t)(2 * count + all->matrices + all->rows + all->cols + 2 * all->blocks +
                        all->row_parts + all->col_parts + (all->cols + 1) / 2);
}

/* One tensor of a call, and its part of the workspace. */
typedef struct adafactor_tensor {
    void *param;
    const void *grad;
    float *row_var, *col_var, *variance;
    float *exp_avg; /* or NULL */
    float *rms;     /* or NULL */
    void *step;     /* or NULL */
    hr_dtype param_dtype, grad_dtype, step_dtype;
    adafactor_kind kind;
    hr_adafactor_shape shape; /* its whole_* members are never 0, except for an empty tensor */
    adafactor_cut cut;
    double *squared_param, *squared_update;       /* [1] */
    double *means;                                /* [batch]: sums of row variances */
    double *row_sums, *col_sums;                  /* [batch, rows], [batch, cols] */
    double *blocks_of_params, *blocks_of_updates; /* [blocks] */
    double *row_parts;                            /* [batch, rows, col_blocks] */
    double *col_parts;                            /* [batch, row_blocks, cols] */
    float *col_factors;                           /* [batch, cols] */
} adafactor_tensor;

/* The number of the step, counted from 1. */
HR_INLINE double adafactor_time(const adafactor_tensor *t, const hr_adafactor_config *config)
{
    return step_number(&config->step, t->step, t->step_dtype);
}

HR_INLINE double adafactor_mean_of(const adafactor_tensor *t, const hr_adafactor_config *config,
                                   double eps1, int64_t matrix)
{
    const double mean = t->means[matrix] / (double)t->shape.whole_rows;
    const double least = adafactor_least_mean(config, eps1);
    return mean < least ? least : mean;
}

HR_INLINE int64_t adafactor_lines(const adafactor_tensor *t)
{
    return t->kind == ADAFACTOR_MATRIX ? t->shape.batch * (t->shape.rows + t->shape.cols) : 0;
}

static inline void *adafactor_data(const hr_tensor_list *list, int64_t k)
{
    return list && list->numel[k] > 0 ? list->data[k] : NULL;
}

/* Describes tensor k. `before` is the extent of the tensors before it, `all` that of all
 * tensors. */
static inline adafactor_tensor adafactor_tensor_of(const adafactor_args *a, int64_t k,
                                                   adafactor_cut cut,
                                                   const adafactor_extent *before,
                                                   const adafactor_extent *all)
{
    const int64_t count = a->params->count;
    double *next = (double *)a->workspace;
    adafactor_tensor t;
    t.param = a->params->data[k];
    t.grad = a->grads->data[k];
    t.row_var = (float *)adafactor_data(a->row_vars, k);
    t.col_var = (float *)adafactor_data(a->col_vars, k);
    t.variance = (float *)adafactor_data(a->variances, k);
    t.exp_avg = (float *)adafactor_data(a->exp_avgs, k);
    t.rms = (float *)adafactor_data(a->rms_values, k);
    t.step = step_counter(a->steps, k);
    t.param_dtype = a->params->dtype[k];
    t.grad_dtype = a->grads->dtype[k];
    t.step_dtype = step_counter_dtype(a->steps, k);
    t.kind = adafactor_kind_of(&a->shapes[k]);
    t.shape = a->shapes[k];
    t.shape.whole_rows = t.shape.whole_rows ? t.shape.whole_rows : t.shape.rows;
    t.shape.whole_cols = t.shape.whole_cols ? t.shape.whole_cols : t.shape.cols;
    t.shape.whole_numel =
        t.shape.whole_numel ? t.shape.whole_numel : t.shape.batch * t.shape.rows * t.shape.cols;
    t.cut = cut;
    t.squared_param = next + k;
    t.squared_update = (next += count) + k;
    t.means = (next += count) + before->matrices;
    t.row_sums = (next += all->matrices) + before->rows;
    t.col_sums = (next += all->rows) + before->cols;
    t.blocks_of_params = (next += all->cols) + before->blocks;
    t.blocks_of_updates = (next += all->blocks) + before->blocks;
    t.row_parts = (next += all->blocks) + before->row_parts;
    t.col_parts = (next += all->row_parts) + before->col_parts;
    t.col_factors = (float *)(next += all->col_parts) + before->cols;
    return t;
}

#endif
