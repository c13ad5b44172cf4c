/*
 * adafactor_cpu.c: the CPU step of Adafactor. A tensor that fits in the cache goes through all
 * phases on one thread before the next tensor. A larger one is cut into blocks, which all threads
 * share, pass by pass. The passes read parameters backwards, gradients forwards, gradients
 * backwards, and both forwards, so that each begins with elements that are still in the cache.
 */
#include "kernels/optim/adafactor_cpu_rows.h"
#include "kernels/optim/adafactor_cpu_tiny.h"

/* Most elements of a tensor that one thread takes through all phases. */
#define SMALL (1 << 17)

typedef struct adafactor_job {
    const adafactor_args *args;
    adafactor_extent all;
} adafactor_job;

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

/* The rows, or the columns, of all matrices of a tensor. */
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

/* Adds the partial sums of the blocks and updates the variances, for lines [begin, end) of a tensor
 * of matrices: all rows, then all columns. */
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

/* Adds the sums over a tensor, and the variances of the rows of each matrix, in a fixed order. */
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

/* The share of a small tensor when small tensors are dealt to threads: at least 1, so that an empty
 * one is dealt too. 0 for a large tensor. */
static int64_t small_weight(const adafactor_args *a, int64_t k)
{
    return a->params->numel[k] <= SMALL ? a->params->numel[k] + 1 : 0;
}

typedef struct adafactor_blocks {
    const adafactor_pass *pass;
    stage stage;
} adafactor_blocks;

/* Runs one phase for the blocks [begin, end) of a tensor. */
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

/* Runs the phases of a tensor that the config asks for. */
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

/* Runs all phases of the small tensors that begin in [begin, end), with their shares laid end to
 * end. */
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
