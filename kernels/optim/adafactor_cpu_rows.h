/* adafactor_cpu_rows.h: the phases of rows of a matrix, and of a vector, which is one row. */
#ifndef HR_ADAFACTOR_CPU_ROWS_H
#define HR_ADAFACTOR_CPU_ROWS_H

#include "kernels/optim/adafactor_cpu.h"

/* ---- Sums ------------------------------------------------------------------------------------ */

/* The sum of the squares of the parameters in up to TOGETHER rows. */
HR_INLINE double sum_of_squares(const adafactor_pass *p, int64_t first, int rows, int64_t cols)
{
    double sum = 0.0;
    float tile[CPU_STEP];
    IN_RUNS(cols, from, to)
    {
        float lanes[TOGETHER * LANES] = {0};
        IN_STEPS(from, to, at, n)
        {
            for (int r = 0; r < rows; r++) {
                const int64_t begin = first + r * p->t.shape.cols;
                prefetch_params(p, begin + at, begin + cols);
                const float *const values = load_params(p, begin + at, n, tile);
                IN_LANES(n, square_few(values + i, count, lanes + r * LANES));
            }
        }
        for (int r = 0; r < rows; r++)
            sum += sum_of_lanes(lanes + r * LANES);
    }
    return sum;
}

HR_INLINE void square_row_few(const float *restrict x, int count, float factor,
                              float *restrict lanes, float *restrict columns)
{
    for (int lane = 0; lane < count; lane++) {
        const float a = x[lane] * factor;
        lanes[lane] += a * a;
        columns[lane] += a * a;
    }
}

HR_INLINE void square_4_rows_few(const float *restrict xa, const float *restrict xb,
                                 const float *restrict xc, const float *restrict xd, int count,
                                 float factor, float *restrict lanes, float *restrict columns)
{
    for (int lane = 0; lane < count; lane++) {
        const float a = xa[lane] * factor, b = xb[lane] * factor;
        const float c = xc[lane] * factor, d = xd[lane] * factor;
        lanes[lane] += a * a;
        lanes[lane + LANES] += b * b;
        lanes[lane + 2 * LANES] += c * c;
        lanes[lane + 3 * LANES] += d * d;
        columns[lane] += (a * a + b * b) + (c * c + d * d);
    }
}

/* Writes the sum of squares of each of one or four rows, and adds to the sums of the columns. */
HR_INLINE void square_rows(const adafactor_pass *p, int64_t first, int rows, int64_t cols,
                           double *sums, float *columns)
{
    const int64_t stride = p->t.shape.cols;
    const float factor = p->rates.grad_factor;
    double totals[4] = {0};
    float tiles[4][CPU_STEP];
    const float *x[4];
    IN_RUNS(cols, from, to)
    {
        float lanes[4 * LANES] = {0};
        IN_STEPS(from, to, at, n)
        {
            for (int r = 0; r < rows; r++) {
                const int64_t begin = first + r * stride;
                cpu_prefetch(p->t.grad, begin + at, CPU_STEP, begin + cols, p->t.grad_dtype);
                x[r] = as_floats(p->t.grad, begin + at, n, tiles[r], p->t.grad_dtype);
            }
            if (rows == 1)
                IN_LANES(n, square_row_few(x[0] + i, count, factor, lanes, columns + at + i));
            else
                IN_LANES(n, square_4_rows_few(x[0] + i, x[1] + i, x[2] + i, x[3] + i, count, factor,
                                              lanes, columns + at + i));
        }
        for (int r = 0; r < rows; r++)
            totals[r] += sum_of_lanes(lanes + r * LANES);
    }
    for (int r = 0; r < rows; r++)
        sums[r * p->t.cut.col_blocks] = totals[r];
}

HR_INLINE void sums_of_block(const adafactor_pass *p, adafactor_place b)
{
    const adafactor_tensor *const t = &p->t;
    const int64_t stride = t->shape.cols, parts = t->cut.col_blocks;
    double *const rows = t->row_parts + (b.matrix * t->shape.rows + b.row) * parts + b.col_block;
    double *const cols =
        t->col_parts + (b.matrix * t->cut.row_blocks + b.row_block) * stride + b.col;
    float columns[ADAFACTOR_CPU_COLS];
    for (int64_t c = 0; c < b.cols; c++)
        cols[c] = 0.0;
    for (int64_t first = 0; first < b.rows; first += ROWS) {
        const int64_t end = b.rows - first < ROWS ? b.rows : first + ROWS;
        memset(columns, 0, (size_t)b.cols * sizeof columns[0]);
        int64_t r = first;
        for (; end - r >= 4; r += 4)
            square_rows(p, b.first + r * stride, 4, b.cols, rows + r * parts, columns);
        for (; r < end; r++)
            square_rows(p, b.first + r * stride, 1, b.cols, rows + r * parts, columns);
        for (int64_t c = 0; c < b.cols; c++)
            cols[c] += (double)columns[c];
    }
}

/* ---- Updates --------------------------------------------------------------------------------- */

/* The constants of a tensor's elements. */
typedef struct tensor_constants {
    adafactor_step step;
    float bound, grad_factor;
    float weight, keep, added; /* of the variances of a vector */
} tensor_constants;

HR_INLINE void norm_few(adafactor_row row, const float *restrict grad,
                        const float *restrict col_factors, int count, float *restrict lanes)
{
    for (int lane = 0; lane < count; lane++) {
        const float update = adafactor_update(row, grad[lane], col_factors[lane]);
        lanes[lane] += update * update;
    }
}

/* norm_few() for a vector, whose variances it updates too. */
HR_INLINE void vector_norm_few(tensor_constants c, adafactor_row row, const float *restrict grad,
                               float *restrict variance, int count, float *restrict lanes)
{
    for (int lane = 0; lane < count; lane++) {
        const float x = grad[lane] * c.grad_factor;
        const float v =
            adafactor_element_variance(variance[lane], x * x + c.added, c.weight, c.keep);
        hr_store(variance, lane, v, HR_F32);
        const float update = adafactor_update(row, grad[lane], 1.0f / sqrtf(v));
        lanes[lane] += update * update;
    }
}

/* The sum of the squares of the updates of up to TOGETHER rows. `factors`: those of the columns, or
 * NULL for a vector, whose variances are updated. */
HR_INLINE double norm_of_rows(const adafactor_tensor *t, tensor_constants c,
                              const adafactor_row *of_rows, int64_t first, int rows, int64_t cols,
                              const float *factors)
{
    const int64_t stride = t->shape.cols;
    double sum = 0.0;
    float tile[CPU_STEP];
    IN_RUNS(cols, from, to)
    {
        float lanes[TOGETHER * LANES] = {0};
        IN_STEPS(from, to, at, n)
        {
            for (int r = 0; r < rows; r++) {
                const int64_t begin = first + r * stride;
                cpu_prefetch(t->grad, begin + at, CPU_STEP, begin + cols, t->grad_dtype);
                const float *const grad = as_floats(t->grad, begin + at, n, tile, t->grad_dtype);
                if (factors)
                    IN_LANES(n, norm_few(of_rows[r], grad + i, factors + at + i, count,
                                         lanes + r * LANES));
                else
                    IN_LANES(n, vector_norm_few(c, of_rows[r], grad + i,
                                                t->variance + first + at + i, count, lanes));
            }
        }
        for (int r = 0; r < rows; r++)
            sum += sum_of_lanes(lanes + r * LANES);
    }
    return sum;
}

/* `factors`: those of the columns, or the variances of a vector. */
HR_INLINE void apply_few(adafactor_step s, adafactor_row row, float *restrict param,
                         const float *restrict grad, float *restrict exp_avg,
                         const float *restrict factors, int64_t count, int is_vector, int momentum)
{
    for (int64_t i = 0; i < count; i++) {
        const float column = is_vector ? 1.0f / sqrtf(factors[i]) : factors[i];
        float average = momentum ? exp_avg[i] : 0.0f;
        const float x = adafactor_apply(s, param[i], adafactor_update(row, grad[i], column),
                                        momentum ? &average : NULL);
        hr_store(param, i, x, HR_F32);
        if (momentum)
            hr_store(exp_avg, i, average, HR_F32);
    }
}

HR_INLINE void apply_any(adafactor_step s, adafactor_row row, float *param, const float *grad,
                         float *exp_avg, const float *factors, int64_t count, int is_vector)
{
    if (is_vector)
        apply_few(s, row, param, grad, exp_avg, factors, count, 1, exp_avg != NULL);
    else if (exp_avg)
        apply_few(s, row, param, grad, exp_avg, factors, count, 0, 1);
    else if (count == CPU_STEP)
        apply_few(s, row, param, grad, NULL, factors, CPU_STEP, 0, 0);
    else
        apply_few(s, row, param, grad, NULL, factors, count, 0, 0);
}

/* Updates the parameters of up to TOGETHER rows. `factors`: those of the columns, or the variances
 * of a vector. */
HR_INLINE void apply_rows(const adafactor_pass *p, adafactor_step s, const adafactor_row *of_rows,
                          int64_t first, int rows, int64_t cols, const float *factors,
                          int is_vector)
{
    const adafactor_tensor *const t = &p->t;
    const int counts = p->config->step.weights && p->weights.stalled;
    float grads[CPU_STEP], params[CPU_STEP], before[CPU_STEP];
    IN_STEPS(0, cols, at, n)
    {
        for (int r = 0; r < rows; r++) {
            const int64_t begin = first + r * t->shape.cols, i = begin + at;
            prefetch_params(p, i, begin + cols);
            cpu_prefetch(t->grad, i, CPU_STEP, begin + cols, t->grad_dtype);
            const float *const grad = as_floats(t->grad, i, n, grads, t->grad_dtype);
            float *const param = load_params(p, i, n, params);
            if (counts)
                memcpy(before, param, (size_t)n * sizeof before[0]);
            apply_any(s, of_rows[r], param, grad, t->exp_avg ? t->exp_avg + i : NULL, factors + at,
                      n, is_vector);
            store_params(p, i, n, param, before);
        }
    }
}

#endif
