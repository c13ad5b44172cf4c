/* adafactor_cpu_tiny.h: the phases of tiny matrices, LANES of them side by side. */
#ifndef HR_ADAFACTOR_CPU_TINY_H
#define HR_ADAFACTOR_CPU_TINY_H

#include "kernels/optim/adafactor_cpu.h"

typedef struct tiny_matrices {
    int64_t first;                             /* the first matrix */
    int count;                                 /* how many matrices */
    int rows, cols;                            /* of each matrix */
    float grads[ADAFACTOR_TINY_NUMEL * LANES]; /* [rows, cols, LANES] */
    float row_factors[ADAFACTOR_TINY_NUMEL * LANES], col_factors[ADAFACTOR_TINY_NUMEL * LANES];
} tiny_matrices;

/* Loads element e of each matrix to out[e]; lanes without a matrix get 0. */
HR_INLINE void tiny_load(const void *restrict x, int64_t first, int count, int numel, float factor,
                         float *restrict out, hr_dtype dtype)
{
    for (int e = 0; e < numel; e++)
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t matrix = first + (lane < count ? lane : 0);
            const float value = hr_load(x, matrix * numel + e, dtype) * factor;
            out[e * LANES + lane] = lane < count ? value : 0.0f;
        }
}

/* Updates the variances of the rows, or of the columns, from the gradients. Line l has elements
 * l * line_stride + e * stride. */
HR_INLINE void tiny_variances(const adafactor_pass *p, const tiny_matrices *m, float *variances,
                              int lines, int line_stride, int length, int stride)
{
    const double added = adafactor_added(p->config, p->eps1);
    for (int l = 0; l < lines; l++) {
        float sums[LANES] = {0};
        for (int e = 0; e < length; e++)
            square_few(m->grads + (l * line_stride + e * stride) * LANES, LANES, sums);
        for (int lane = 0; lane < m->count; lane++) {
            float *const variance = variances + (m->first + lane) * lines + l;
            *variance =
                adafactor_variance(*variance, (double)sums[lane] / length + added, p->weight);
        }
    }
}

HR_INLINE void tiny_factors(const adafactor_pass *p, tiny_matrices *m)
{
    const double least = adafactor_least_mean(p->config, p->eps1);
    double means[LANES] = {0};
    float *const rows = m->row_factors, *const cols = m->col_factors;
    tiny_load(p->t.row_var, m->first, m->count, m->rows, 1.0f, rows, HR_F32);
    tiny_load(p->t.col_var, m->first, m->count, m->cols, 1.0f, cols, HR_F32);
    for (int r = 0; r < m->rows; r++)
        for (int lane = 0; lane < LANES; lane++)
            means[lane] += (double)rows[r * LANES + lane];
    for (int lane = 0; lane < LANES; lane++) {
        means[lane] /= m->rows;
        means[lane] = means[lane] < least ? least : means[lane];
    }
    float roots[LANES];
    for (int lane = 0; lane < LANES; lane++)
        roots[lane] = sqrtf((float)means[lane]);
    for (int r = 0; r < m->rows; r++)
        for (int lane = 0; lane < LANES; lane++)
            rows[r * LANES + lane] = adafactor_tiny_row_factor(rows[r * LANES + lane], roots[lane]);
    for (int i = 0; i < m->cols * LANES; i++)
        cols[i] = adafactor_tiny_column_factor(cols[i]);
}

/* Turns the gradients into updates. */
HR_INLINE void tiny_updates(const adafactor_pass *p, tiny_matrices *m)
{
    const float bound = adafactor_bound(p->config, p->eps1), factor = p->rates.grad_factor;
    for (int r = 0; r < m->rows; r++)
        for (int c = 0; c < m->cols; c++)
            for (int lane = 0; lane < LANES; lane++) {
                float *const grad = &m->grads[(r * m->cols + c) * LANES + lane];
                const adafactor_row row =
                    adafactor_row_of(m->row_factors[r * LANES + lane], bound, factor);
                *grad = adafactor_update(row, *grad, m->col_factors[c * LANES + lane]);
            }
}

HR_INLINE void tiny_apply(const adafactor_pass *p, const tiny_matrices *m, adafactor_step s)
{
    const int numel = m->rows * m->cols;
    float tile[ADAFACTOR_TINY_NUMEL], before[ADAFACTOR_TINY_NUMEL];
    for (int lane = 0; lane < m->count; lane++) {
        const int64_t i = (m->first + lane) * numel;
        float *const params = load_params(p, i, numel, tile);
        memcpy(before, params, (size_t)numel * sizeof before[0]);
        for (int e = 0; e < numel; e++) {
            const float x = adafactor_apply(s, params[e], m->grads[e * LANES + lane],
                                            p->t.exp_avg ? p->t.exp_avg + i + e : NULL);
            hr_store(params, e, x, HR_F32);
        }
        store_params(p, i, numel, params, before);
    }
}

/* Runs one phase for the elements [begin, end), which are entire matrices. STAGE_NORM returns the
 * sum of the squares of the updates. */
HR_INLINE double tiny_run(const adafactor_pass *p, stage stage, adafactor_step s, int64_t begin,
                          int64_t end)
{
    const int rows = (int)p->t.shape.rows, cols = (int)p->t.shape.cols, numel = rows * cols;
    const float factor = stage == STAGE_SUMS ? p->rates.grad_factor : 1.0f;
    double sum = 0.0;
    tiny_matrices m;
    for (int64_t first = begin / numel; first < end / numel; first += LANES) {
        const int64_t left = end / numel - first;
        m.first = first;
        m.count = left < LANES ? (int)left : LANES;
        m.rows = rows;
        m.cols = cols;
        FOR_DTYPE(p->t.grad_dtype, G,
                  tiny_load(p->t.grad, first, m.count, numel, factor, m.grads, G))
        if (stage == STAGE_SUMS) {
            tiny_variances(p, &m, p->t.row_var, rows, cols, cols, 1);
            tiny_variances(p, &m, p->t.col_var, cols, 1, rows, cols);
            continue;
        }
        tiny_factors(p, &m);
        tiny_updates(p, &m);
        if (stage == STAGE_APPLY) {
            tiny_apply(p, &m, s);
            continue;
        }
        float lanes[LANES] = {0};
        for (int e = 0; e < numel; e++)
            square_few(m.grads + e * LANES, m.count, lanes);
        sum += sum_of_lanes(lanes);
    }
    return sum;
}

#endif
