/*
 * muon_update_cpu.c: the CPU loops of Muon's last pass: sums of the squares of rows, if rows are
 * normalized, and the update of weights. A parallel region covers the whole list.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/muon_matrix_cpu.h"
#include "kernels/optim/muon_update.h"
#include "kernels/weights/weights_cpu.h"

#define MUON_TILE 512 /* elements */
#define LANES     32  /* interleaved sums */

/* ---- Sums of rows ---------------------------------------------------------------------------- */

#define ROWS 64 /* of a task, and of a column at a time */

/* The sum of the squares of a row that lies together. */
HR_INLINE double muon_row_sum(const void *update, int64_t i, int64_t cols, hr_dtype dtype,
                              half_conversions halves)
{
    double sum = 0.0;
    for (int64_t j = 0; j < cols; j += MUON_TILE) {
        _Alignas(64) float x[MUON_TILE];
        float lanes[LANES] = {0};
        const int count = cols - j < MUON_TILE ? (int)(cols - j) : MUON_TILE;
        halves_to_tile(update, i + j, count, dtype, x, halves);
        for (int e = count; e % LANES; e++)
            x[e] = 0.0f;
        for (int e = 0; e < count; e += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] += x[e + lane] * x[e + lane];
        for (int width = LANES / 2; width > 0; width /= 2)
            for (int lane = 0; lane < width; lane++)
                lanes[lane] += lanes[lane + width];
        sum += (double)lanes[0];
    }
    return sum;
}

/* The sums of the squares of the rows [row, row + count), which are columns in memory. */
HR_INLINE void muon_column_sums(const void *update, const hr_muon_matrix *m, int64_t row, int count,
                                double *restrict sums, hr_dtype dtype, half_conversions halves)
{
    for (int e = 0; e < count; e++)
        sums[e] = 0.0;
    for (int64_t col = 0; col < m->cols; col++) {
        _Alignas(64) float x[ROWS];
        halves_to_tile(update, muon_offset(m, row, col), count, dtype, x, halves);
        for (int e = 0; e < count; e++)
            sums[e] += (double)x[e] * (double)x[e];
    }
}

HR_INLINE void muon_rows_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const muon_update_args *const a = (const muon_update_args *)context;
    double *rows = a->rows;
    int64_t known = 0; /* matrices before `rows` */
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->updates, begin, end, ROWS * a->matrices[k].cols, k, from, to)
    {
        const hr_muon_matrix *const m = &a->matrices[k];
        const hr_dtype dtype = a->updates->dtype[k];
        for (; known < k; known++)
            rows += a->matrices[known].rows;
        for (int64_t row = from / m->cols; row < to / m->cols; row += ROWS) {
            const int count = m->rows - row < ROWS ? (int)(m->rows - row) : ROWS;
            if (m->transposed)
                muon_column_sums(a->updates->data[k], m, row, count, rows + row, dtype, halves);
            else
                for (int64_t r = row; r < row + count; r++)
                    rows[r] = muon_row_sum(a->updates->data[k], muon_offset(m, r, 0), m->cols,
                                           dtype, halves);
        }
    }
}

CPU_HALVES_VARIANTS(muon_rows_range)

/* Updates the variances of a matrix, and turns the sums of its rows into factors. */
static void muon_normalize(const hr_muon_matrix *m, float *row_vars, double *rows, double beta2)
{
    double before = 0.0, after = 0.0;
    for (int64_t r = 0; r < m->rows; r++) {
        const float row_var = muon_row_var(row_vars[r], rows[r], m->cols, beta2);
        const double divisor = muon_row_divisor(row_var);
        before += rows[r];
        after += rows[r] / (divisor * divisor);
        hr_store(row_vars, r, row_var, HR_F32);
    }
    const double ratio = muon_norm_ratio(before, after);
    for (int64_t r = 0; r < m->rows; r++)
        rows[r] = ratio / muon_row_divisor(row_vars[r]);
}

/* ---- The update ------------------------------------------------------------------------------ */

/* The tensors of one matrix. */
typedef struct muon_part {
    muon_update_constants constants;
    const hr_muon_matrix *matrix;
    void *param;
    hr_dtype param_dtype, update_dtype;
    const double *factors;         /* of rows; NULL: none */
    const weights_tensor *weights; /* NULL: params are plain */
} muon_part;

HR_INLINE void muon_loop(muon_update_constants c, float *restrict param,
                         const float *restrict update, float factor, int count)
{
    for (int i = 0; i < count; i++)
        hr_store(param, i, muon_update_element(c, param[i], update[i], factor), HR_F32);
}

/* Updates elements [i, i + count) in binary32, with the factor of each row. */
HR_INLINE void muon_update_rows(const muon_part *p, int64_t i, float *param, const float *update,
                                int count)
{
    if (!p->factors) {
        muon_loop(p->constants, param, update, 1.0f, count);
        return;
    }
    for (int j = 0; j < count;) {
        const int64_t row = (i + j) / p->matrix->cols, end = (row + 1) * p->matrix->cols - i;
        const int n = end < count ? (int)end - j : count - j;
        muon_loop(p->constants, param + j, update + j, (float)p->factors[row], n);
        j += n;
    }
}

/* Updates elements [i, i + count), whose updates begin at `update`, and those of the chunk end
 * `left` elements after that. */
HR_INLINE void muon_tile(const muon_part *p, int64_t i, int count, int64_t end, const void *update,
                         int64_t at, half_conversions halves)
{
    enum { PARAM, UPDATE, BEFORE, TILES };
    _Alignas(64) float tiles[TILES][MUON_TILE];
    const weights_tensor *const weights = p->weights;
    const int counts = weights && weights->stalled;
    float *param = tiles[PARAM];
    if (weights) {
        weights_prefetch(weights->param, weights->residual, i, count, end, weights->dtype,
                         weights->mode);
        for (int j = 0; j < count; j += WEIGHTS_TILE)
            weights_load(weights, i + j, count - j < WEIGHTS_TILE ? count - j : WEIGHTS_TILE,
                         param + j);
        if (counts)
            memcpy(tiles[BEFORE], param, (size_t)count * sizeof param[0]);
    } else {
        param = halves_floats(p->param, i, count, end, p->param_dtype, param, halves);
    }
    const float *const x =
        halves_floats(update, at, count, at + end - i, p->update_dtype, tiles[UPDATE], halves);
    muon_update_rows(p, i, param, x, count);
    for (int j = 0; weights && j < count; j += WEIGHTS_TILE)
        weights_store(weights, i + j, count - j < WEIGHTS_TILE ? count - j : WEIGHTS_TILE,
                      param + j, counts ? tiles[BEFORE] + j : NULL);
    if (!weights && p->param_dtype != HR_F32)
        halves_from_tile(p->param, i, count, p->param_dtype, param, halves);
}

HR_INLINE void muon_run(const muon_part *p, const void *update, int64_t i, int64_t end,
                        half_conversions halves)
{
    _Alignas(64) float dense[MUON_MOST_CHUNK]; /* of any type */
    const int lies_dense = muon_is_dense(p->matrix);
    if (!lies_dense)
        muon_copy(p->matrix, (void *)update, i, end - i, dense, p->update_dtype, 0);
    for (int64_t j = i; j < end; j += MUON_TILE)
        muon_tile(p, j, end - j < MUON_TILE ? (int)(end - j) : MUON_TILE, end,
                  lies_dense ? update : dense, lies_dense ? j : j - i, halves);
}

/* Updates the chunks whose first element is in [begin, end), with the matrices laid end to end. */
HR_INLINE void muon_update_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const muon_update_args *const a = (const muon_update_args *)context;
    muon_part part = {0};
    const double *rows = a->rows;
    int64_t known = 0; /* matrices before `rows` */
    CPU_FOR_EACH_TENSOR_IN_BLOCKS(a->params, begin, end, muon_chunk(&a->matrices[k]), k, from, to)
    {
        const double t = step_number_of(&a->config->step, a->steps, k);
        weights_tensor weights;
        part.matrix = &a->matrices[k];
        const int64_t chunk = muon_chunk(part.matrix);
        part.constants = muon_update_fold(a->config, a->scales ? a->scales[k] : 1.0);
        part.param = a->params->data[k];
        part.param_dtype = a->params->dtype[k];
        part.update_dtype = a->updates->dtype[k];
        for (; known < k; known++)
            rows += a->row_vars ? a->matrices[known].rows : 0;
        part.factors = a->row_vars ? rows : NULL;
        if (a->config->step.weights) {
            weights = weights_of(a->config->step.weights, a->params, k, t);
            part.weights = &weights;
        }
        for (int64_t i = from; i < to; i += chunk)
            muon_run(&part, a->updates->data[k], i, to - i < chunk ? to : i + chunk, halves);
    }
}

CPU_HALVES_VARIANTS(muon_update_range)

hr_status muon_update_cpu(const muon_update_args *args)
{
    if (step_is_skipped(&args->config->step))
        return HR_OK;
    if (args->row_vars) {
        double *rows = args->rows;
        hr_parallel_for(0, cpu_total(args->updates), CPU_GRAIN, CPU_BEST(muon_rows_range),
                        (void *)args);
        for (int64_t k = 0; k < args->params->count; rows += args->matrices[k++].rows)
            if (args->params->numel[k] > 0)
                muon_normalize(&args->matrices[k], (float *)args->row_vars->data[k], rows,
                               args->config->beta2);
    }
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, CPU_BEST(muon_update_range),
                    (void *)args);
    step_count_all(args->steps);
    return HR_OK;
}
