/*
 * adafactor_cpu.c: the loops. A tensor that fits in the cache goes through all phases on one thread
 * before the next; a larger one is cut into blocks that all threads share, pass by pass: parameters
 * backwards, gradients forwards, backwards again, and both forwards, so that each pass begins with
 * what is still in the cache of the processor.
 *
 * Sums are binary32 in LANES interleaved lanes over RUN elements, then binary64, so that every
 * instruction set and number of threads adds in the same order.
 */
#include "kernels/optim/adafactor.h"
#include "kernels/weights/weights_cpu.h"

#define LANES 32
#define RUN   1024

/* Elements that one thread takes through all phases. */
#define SMALL (1 << 17)

/* Rows that are read at the same time: a core waits less for memory that it reads in several places. */
#define TOGETHER 4

/* Rows whose column sums are added in binary32. */
#define ROWS 32

/* Passes over the elements. */
typedef enum stage { STAGE_PARAMS, STAGE_SUMS, STAGE_NORM, STAGE_APPLY } stage;

/* A tensor in a call. */
typedef struct adafactor_pass {
    const hr_adafactor_config *config;
    adafactor_tensor t;
    adafactor_rates rates;
    double weight, eps1;
    weights_tensor weights; /* if config->step.weights */
} adafactor_pass;

typedef struct adafactor_job {
    const adafactor_args *args;
    adafactor_extent all;
} adafactor_job;

HR_INLINE double sum_of_lanes(const float *lanes)
{
    double sums[LANES];
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] = (double)lanes[lane];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] += sums[lane + width];
    return sums[0];
}

/* Runs `few`, an expression of i and count, over [0, end): LANES elements at a time. */
#define IN_LANES(end, few)                     \
    do {                                       \
        int64_t i = 0;                         \
        for (; (end)-i >= LANES; i += LANES) { \
            enum { count = LANES };            \
            few;                               \
        }                                      \
        if (i < (end)) {                       \
            const int count = (int)((end)-i);  \
            few;                               \
        }                                      \
    } while (0)

/* Runs the body for runs [from, to) of [0, end), and STEPS for steps [at, at + n) of a run. */
#define IN_RUNS(end, from, to) \
    for (int64_t from = 0, to; to = (end)-from < RUN ? (end) : from + RUN, from < (end); from = to)
#define IN_STEPS(from, to, at, n) \
    for (int64_t at = (from), n; n = (to)-at < CPU_STEP ? (to)-at : CPU_STEP, at < (to); at += n)

HR_INLINE void convert(const void *restrict x, int64_t i, int64_t count, float *restrict tile,
                       hr_dtype dtype)
{
    for (int64_t lane = 0; lane < count; lane++)
        tile[lane] = hr_load(x, i + lane, dtype);
}

/* Elements [i, i + count), at most CPU_STEP of them, as they lie in memory, or in the tile. */
HR_INLINE const float *as_floats(const void *x, int64_t i, int64_t count, float *tile,
                                 hr_dtype dtype)
{
    if (dtype == HR_F32)
        return (const float *)x + i;
    if (count == CPU_STEP)
        FOR_DTYPE(dtype, D, convert(x, i, CPU_STEP, tile, D))
    else
        convert(x, i, count, tile, dtype);
    return tile;
}

HR_INLINE void convert_back(void *restrict x, int64_t i, int64_t count, const float *restrict tile,
                            hr_dtype dtype)
{
    for (int64_t lane = 0; lane < count; lane++)
        hr_store(x, i + lane, tile[lane], dtype);
}

/* The parameters [i, i + count), at most CPU_STEP of them, to be read or updated: where they lie in
 * memory, or in the tile, and then they are to be stored. */
HR_INLINE float *load_params(const adafactor_pass *p, int64_t i, int64_t count, float *tile)
{
    if (!p->config->step.weights)
        return (float *)as_floats(p->t.param, i, count, tile, p->t.param_dtype);
    weights_load(&p->weights, i, (int)count, tile);
    return tile;
}

HR_INLINE void prefetch_params(const adafactor_pass *p, int64_t i, int64_t end)
{
    if (p->config->step.weights)
        weights_prefetch(p->weights.param, p->weights.residual, i, CPU_STEP, end, p->weights.dtype,
                         p->weights.mode);
    else
        cpu_prefetch(p->t.param, i, CPU_STEP, end, p->t.param_dtype);
}

/* `before`: what they were, if someone counts those that stall. */
HR_INLINE void store_params(const adafactor_pass *p, int64_t i, int64_t count, const float *tile,
                            const float *before)
{
    if (p->config->step.weights)
        weights_store(&p->weights, i, (int)count, tile, p->weights.stalled ? before : NULL);
    else if (p->t.param_dtype != HR_F32)
        FOR_DTYPE(p->t.param_dtype, P, convert_back(p->t.param, i, count, tile, P))
}

/* ---- Sums ------------------------------------------------------------------------------------ */

HR_INLINE void square_few(const float *restrict x, int count, float *restrict lanes)
{
    for (int lane = 0; lane < count; lane++)
        lanes[lane] += x[lane] * x[lane];
}

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

/* Writes a sum for each of one or four rows, and adds to those of the columns. */
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

/* ---- Tiny matrices, LANES of them side by side ------------------------------------------------ */

typedef struct tiny_matrices {
    int64_t first;                             /* matrix */
    int count;                                 /* of them */
    int rows, cols;                            /* of each */
    float grads[ADAFACTOR_TINY_NUMEL * LANES]; /* [rows, cols, LANES] */
    float row_factors[ADAFACTOR_TINY_NUMEL * LANES], col_factors[ADAFACTOR_TINY_NUMEL * LANES];
} tiny_matrices;

/* Element e of each matrix; of those that are not there, 0. */
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

/* Updates the variances of rows (across 1) or columns from the gradients. */
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
    for (int r = 0; r < m->rows; r++)
        for (int lane = 0; lane < LANES; lane++)
            rows[r * LANES + lane] = adafactor_row_factor(rows[r * LANES + lane], means[lane]);
    for (int i = 0; i < m->cols * LANES; i++)
        cols[i] = adafactor_column_factor(cols[i]);
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

/* One phase of elements [begin, end), which are whole matrices. Gives the sum of the squares of the
 * updates. */
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

/* ---- Updates --------------------------------------------------------------------------------- */

/* What the elements of a tensor have in common. */
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

/* Updates the variances of elements too. */
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

/* The sum of the squares of the updates of up to TOGETHER rows. `factors`: of columns; or NULL for a
 * vector, whose variances are updated. */
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

/* `factors`: of columns; of a vector, its variances. */
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

/* Up to TOGETHER rows. `factors`: of columns; of a vector, its variances. */
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

/* ---- Blocks ---------------------------------------------------------------------------------- */

HR_INLINE tensor_constants constants_of(const adafactor_pass *p)
{
    tensor_constants c;
    c.step = (adafactor_step){0};
    c.bound = adafactor_bound(p->config, p->eps1);
    c.grad_factor = p->rates.grad_factor;
    c.weight = (float)p->weight;
    c.keep = (float)(1.0 - p->weight);
    c.added = (float)adafactor_added(p->config, p->eps1);
    return c;
}

/* The sum of the squares of the parameters of block i. */
HR_INLINE void block_of_params(const adafactor_pass *p, int64_t i)
{
    const adafactor_tensor *const t = &p->t;
    adafactor_place b = {0};
    double sum = 0.0;
    if (t->kind == ADAFACTOR_MATRIX) {
        b = adafactor_place_of(&t->shape, &t->cut, i);
    } else {
        adafactor_run_of(&t->shape, &t->cut, i, &b.first, &b.cols);
        b.cols -= b.first;
        b.rows = 1;
    }
    for (int64_t r = 0; r < b.rows; r += TOGETHER) {
        const int rows = b.rows - r < TOGETHER ? (int)(b.rows - r) : TOGETHER;
        sum += sum_of_squares(p, b.first + r * t->shape.cols, rows, b.cols);
    }
    t->blocks_of_params[i] = sum;
}

HR_INLINE void block_of_sums(const adafactor_pass *p, int64_t i)
{
    int64_t from, to;
    if (p->t.kind == ADAFACTOR_MATRIX) {
        sums_of_block(p, adafactor_place_of(&p->t.shape, &p->t.cut, i));
    } else if (p->t.kind == ADAFACTOR_TINY) {
        adafactor_run_of(&p->t.shape, &p->t.cut, i, &from, &to);
        tiny_run(p, STAGE_SUMS, (adafactor_step){0}, from, to);
    }
}

/* STAGE_NORM or STAGE_APPLY of block i of a matrix. */
HR_INLINE double matrix_updates(const adafactor_pass *p, tensor_constants c, stage stage, int64_t i)
{
    const adafactor_tensor *const t = &p->t;
    const adafactor_place b = adafactor_place_of(&t->shape, &t->cut, i);
    const double mean = adafactor_mean_of(t, p->config, p->eps1, b.matrix);
    const float *const factors = t->col_factors + b.matrix * t->shape.cols + b.col;
    const float *const variances = t->row_var + b.matrix * t->shape.rows + b.row;
    const int together = stage == STAGE_NORM ? TOGETHER : 2;
    adafactor_row of_rows[TOGETHER];
    double sum = 0.0;
    for (int64_t row = 0; row < b.rows; row += together) {
        const int64_t first = b.first + row * t->shape.cols;
        const int rows = b.rows - row < together ? (int)(b.rows - row) : together;
        for (int r = 0; r < rows; r++)
            of_rows[r] = adafactor_row_of(adafactor_row_factor(variances[row + r], mean), c.bound,
                                          c.grad_factor);
        if (stage == STAGE_NORM)
            sum += norm_of_rows(t, c, of_rows, first, rows, b.cols, factors);
        else
            apply_rows(p, c.step, of_rows, first, rows, b.cols, factors, 0);
    }
    return sum;
}

HR_INLINE void block_of_norm(const adafactor_pass *p, tensor_constants c, int64_t i)
{
    const adafactor_tensor *const t = &p->t;
    const adafactor_row row = adafactor_row_of(1.0f, c.bound, c.grad_factor);
    double *const sum = &t->blocks_of_updates[i];
    int64_t from, to;
    if (t->kind == ADAFACTOR_MATRIX) {
        *sum = matrix_updates(p, c, STAGE_NORM, i);
        return;
    }
    adafactor_run_of(&t->shape, &t->cut, i, &from, &to);
    *sum = t->kind == ADAFACTOR_TINY ? tiny_run(p, STAGE_NORM, c.step, from, to)
                                     : norm_of_rows(t, c, &row, from, 1, to - from, NULL);
}

HR_INLINE void block_of_apply(const adafactor_pass *p, tensor_constants c, int64_t i)
{
    const adafactor_tensor *const t = &p->t;
    const adafactor_row row = adafactor_row_of(1.0f, c.bound, c.grad_factor);
    int64_t from, to;
    if (t->kind == ADAFACTOR_MATRIX) {
        matrix_updates(p, c, STAGE_APPLY, i);
        return;
    }
    adafactor_run_of(&t->shape, &t->cut, i, &from, &to);
    if (t->kind == ADAFACTOR_TINY)
        tiny_run(p, STAGE_APPLY, c.step, from, to);
    else
        apply_rows(p, c.step, &row, from, 1, to - from, t->variance + from, 1);
}

/* ---- Rows and columns ------------------------------------------------------------------------ */

/* Lines [begin, end) of the rows, or the columns, of all matrices of a tensor. */
typedef struct lines {
    double *sums;
    float *variances, *factors; /* NULL for rows */
    double length, added, weight;
} lines;

HR_INLINE void update_lines(lines l, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++) {
        const double mean = l.sums[i] / l.length + l.added;
        l.variances[i] = adafactor_variance(l.variances[i], mean, l.weight);
    }
    for (int64_t i = begin; i < end && l.factors; i++)
        l.factors[i] = adafactor_column_factor(l.variances[i]);
}

HR_INLINE void sum_rows(const adafactor_tensor *t, int64_t begin, int64_t end)
{
    const int64_t parts = t->cut.col_blocks;
    for (int64_t r = begin; r < end; r++) {
        t->row_sums[r] = 0.0;
        for (int64_t part = 0; part < parts; part++)
            t->row_sums[r] += t->row_parts[r * parts + part];
    }
}

HR_INLINE void sum_columns(const adafactor_tensor *t, int64_t begin, int64_t end)
{
    const int64_t blocks = t->cut.row_blocks, cols = t->shape.cols;
    for (int64_t from = begin, to; from < end; from = to) { /* the columns of one matrix */
        const int64_t matrix = from / cols;
        to = (matrix + 1) * cols < end ? (matrix + 1) * cols : end;
        for (int64_t c = from; c < to; c++)
            t->col_sums[c] = 0.0;
        for (int64_t block = 0; block < blocks; block++) {
            const double *const parts = t->col_parts + matrix * (blocks - 1) * cols + block * cols;
            for (int64_t c = from; c < to; c++)
                t->col_sums[c] += parts[c];
        }
    }
}

/* Adds up what the blocks left, and updates the variances: lines [begin, end) of all rows, then all
 * columns, of a tensor of matrices. */
HR_INLINE void adafactor_lines_range(void *context, int64_t begin, int64_t end)
{
    const adafactor_pass *const p = (const adafactor_pass *)context;
    const adafactor_tensor *const t = &p->t;
    const int64_t rows = t->shape.batch * t->shape.rows;
    const int64_t last_row = end < rows ? end : rows;
    const int64_t first_col = begin > rows ? begin - rows : 0, last_col = end - rows;
    const double added = adafactor_added(p->config, p->eps1);
    if (p->config->phases & HR_ADAFACTOR_SUMS) {
        sum_rows(t, begin, last_row);
        sum_columns(t, first_col, last_col);
    }
    if (p->config->phases & HR_ADAFACTOR_STATES) {
        const lines of_rows = {t->row_sums, t->row_var, NULL, (double)t->shape.whole_cols,
                               added,       p->weight};
        const lines of_cols = {t->col_sums, t->col_var, t->col_factors, (double)t->shape.whole_rows,
                               added,       p->weight};
        update_lines(of_rows, begin, last_row);
        update_lines(of_cols, first_col, last_col);
    }
}

CPU_VARIANTS(adafactor_lines_range)

/* The sums over a tensor, and over its rows, in order. */
static void finish_sums(const adafactor_pass *p)
{
    const adafactor_tensor *const t = &p->t;
    if (p->config->phases & HR_ADAFACTOR_SUMS) {
        *t->squared_param = 0.0;
        for (int64_t i = 0; i < t->cut.blocks && adafactor_is_scaled(p->config); i++)
            *t->squared_param += t->blocks_of_params[i];
    }
    if (!(p->config->phases & HR_ADAFACTOR_STATES) || t->kind != ADAFACTOR_MATRIX)
        return;
    for (int64_t b = 0; b < t->shape.batch; b++) {
        t->means[b] = 0.0;
        for (int64_t r = 0; r < t->shape.rows; r++)
            t->means[b] += (double)t->row_var[b * t->shape.rows + r];
    }
}

static void finish_norm(const adafactor_pass *p)
{
    *p->t.squared_update = 0.0;
    for (int64_t i = 0; i < p->t.cut.blocks; i++)
        *p->t.squared_update += p->t.blocks_of_updates[i];
}

static void finish_apply(const adafactor_pass *p)
{
    const adafactor_tensor *const t = &p->t;
    if (t->rms && adafactor_is_scaled(p->config))
        hr_store(t->rms, 0, (float)sqrt(*t->squared_param / (double)t->shape.whole_numel), HR_F32);
}

/* ---- Tensors --------------------------------------------------------------------------------- */

static adafactor_pass pass_of(const adafactor_job *job, int64_t k, adafactor_cut cut,
                              const adafactor_extent *before)
{
    const adafactor_args *const a = job->args;
    adafactor_pass p;
    p.config = a->config;
    p.t = adafactor_tensor_of(a, k, cut, before, &job->all);
    p.eps1 = adafactor_eps1(a->config, p.t.param_dtype);
    const double time = adafactor_time(&p.t, a->config);
    p.rates = adafactor_fold(a->config, time);
    p.weight = adafactor_weight(a->config, time);
    if (a->config->step.weights)
        p.weights = weights_of(a->config->step.weights, a->params, k, time);
    return p;
}

/* What a tensor that one thread takes weighs, so that even an empty one has a place; 0 for others. */
static int64_t small_weight(const adafactor_args *a, int64_t k)
{
    return a->params->numel[k] <= SMALL ? a->params->numel[k] + 1 : 0;
}

typedef struct adafactor_blocks {
    const adafactor_pass *pass;
    stage stage;
} adafactor_blocks;

/* One phase of blocks [begin, end) of a tensor. */
HR_INLINE void adafactor_blocks_range(void *context, int64_t begin, int64_t end)
{
    const adafactor_pass *const p = ((const adafactor_blocks *)context)->pass;
    tensor_constants c = constants_of(p);
    switch (((const adafactor_blocks *)context)->stage) {
    case STAGE_PARAMS:
        for (int64_t i = end; i-- > begin;)
            block_of_params(p, i);
        break;
    case STAGE_SUMS:
        for (int64_t i = begin; i < end; i++)
            block_of_sums(p, i);
        break;
    case STAGE_NORM:
        for (int64_t i = end; i-- > begin;)
            block_of_norm(p, c, i);
        break;
    case STAGE_APPLY:
        c.step = adafactor_step_of(p->config, p->rates, *p->t.squared_param, *p->t.squared_update,
                                   (double)p->t.shape.whole_numel);
        for (int64_t i = begin; i < end; i++)
            block_of_apply(p, c, i);
        break;
    }
}

CPU_VARIANTS(adafactor_blocks_range)

static void run_here(int64_t begin, int64_t end, int64_t grain, hr_range_fn range, void *context)
{
    (void)grain;
    if (begin < end)
        range(context, begin, end);
}

/* The phases of a tensor that the call asks for. */
static void run_phases(const adafactor_pass *p, hr_parallel_for_fn parallel_for)
{
    const int phases = p->t.shape.whole_numel > 0 ? p->config->phases : 0;
    const hr_range_fn range = CPU_BEST(adafactor_blocks_range);
    adafactor_blocks blocks = {p, STAGE_PARAMS};
    if (phases & HR_ADAFACTOR_SUMS && adafactor_is_scaled(p->config))
        parallel_for(0, p->t.cut.blocks, 1, range, &blocks);
    if (phases & HR_ADAFACTOR_SUMS && p->t.kind != ADAFACTOR_VECTOR) {
        blocks.stage = STAGE_SUMS;
        parallel_for(0, p->t.cut.blocks, 1, range, &blocks);
    }
    if (phases & (HR_ADAFACTOR_SUMS | HR_ADAFACTOR_STATES)) {
        parallel_for(0, adafactor_lines(&p->t), 512, CPU_BEST(adafactor_lines_range), (void *)p);
        finish_sums(p);
    }
    if (phases & HR_ADAFACTOR_NORM) {
        blocks.stage = STAGE_NORM;
        parallel_for(0, p->t.cut.blocks, 1, range, &blocks);
        finish_norm(p);
    }
    if (phases & HR_ADAFACTOR_APPLY) {
        blocks.stage = STAGE_APPLY;
        parallel_for(0, p->t.cut.blocks, 1, range, &blocks);
        finish_apply(p);
    }
}

/* All phases of the small tensors that begin in [begin, end) of their weights laid end to end. */
static void small_range(void *context, int64_t begin, int64_t end)
{
    const adafactor_job *const job = (const adafactor_job *)context;
    const adafactor_args *const a = job->args;
    adafactor_extent before = {0, 0, 0, 0, 0, 0};
    int64_t first = 0;
    for (int64_t k = 0; k < a->params->count && first < end; k++) {
        const adafactor_cut cut = adafactor_cut_cpu(&a->shapes[k]);
        const int64_t weight = small_weight(a, k);
        if (weight > 0 && first >= begin) {
            const adafactor_pass p = pass_of(job, k, cut, &before);
            run_phases(&p, run_here);
        }
        adafactor_add(&before, &a->shapes[k], &cut);
        first += weight;
    }
}

hr_status adafactor_cpu(const adafactor_args *args)
{
    const hr_adafactor_config *const config = args->config;
    const int64_t count = args->params->count;
    adafactor_extent before = {0, 0, 0, 0, 0, 0};
    int64_t small = 0;
    if (step_is_skipped(&config->step))
        return HR_OK;
    adafactor_job job = {args, adafactor_extent_of(args->shapes, count, adafactor_cut_cpu)};
    for (int64_t k = 0; k < count; k++) {
        const adafactor_cut cut = adafactor_cut_cpu(&args->shapes[k]);
        if (small_weight(args, k) == 0) {
            const adafactor_pass p = pass_of(&job, k, cut, &before);
            run_phases(&p, hr_parallel_for);
        }
        adafactor_add(&before, &args->shapes[k], &cut);
        small += small_weight(args, k);
    }
    hr_parallel_for(0, small, CPU_GRAIN, small_range, &job);
    if (config->phases & HR_ADAFACTOR_APPLY)
        step_count_all(args->steps);
    return HR_OK;
}
