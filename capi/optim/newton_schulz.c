/* newton_schulz.c: hr_newton_schulz and the size of its workspace: checks, then products and the
 * kernels between them. */
#include "kernels/optim/newton_schulz.h"

#include <inttypes.h>
#include <stdatomic.h>

#include "capi/check/rows.h"

#define MOST    (INT64_C(1) << 59) /* elements */
#define RESTART 2                  /* the iteration before which HR_NEWTON_SCHULZ_GRAM restarts */

/* On the CPU: bytes of matrices with their workspace that a thread iterates on at a time, so that its
 * cache holds them, and of one matrix that is small enough for a thread of its own. */
#define SHARE (INT64_C(4) << 20)
#define SMALL (INT64_C(1) << 20)

/* On the CPU a symmetric product is computed in blocks of rows, up to the diagonal: 4, or fewer than
 * that of so many rows. Products of 16 bits lose more by smaller blocks than they save. */
#define BLOCKS        4
#define BLOCK_ROWS    128
#define BLOCK_ROWS_16 256

/* What a call computes with. */
typedef struct iteration {
    const hr_newton_schulz_config *config;
    int64_t batch, m, n;
    char *x, *other;      /* [batch, m, n] */
    const float *squares; /* [batch], of the elements of each x */
    char *square[4];      /* [batch, m, m] */
    void *workspace;      /* of products */
    size_t workspace_bytes;
    const hr_exec *exec;
} iteration;

static size_t round_up(size_t bytes)
{
    return (bytes + 255) / 256 * 256;
}

static int64_t squares_of(const hr_newton_schulz_config *config)
{
    return config->variant == HR_NEWTON_SCHULZ_GRAM ? 4 : 2;
}

static size_t bytes_of(int64_t batch, int64_t rows, int64_t cols, hr_dtype dtype)
{
    return round_up((size_t)(batch * rows * cols * hr_element_size(dtype)));
}

static hr_status check_sizes(const char *function, int64_t batch, int64_t m, int64_t n)
{
    HR_REQUIRE(batch >= 0, "%s: batch is %" PRId64 ", wanted 0 or more", function, batch);
    HR_REQUIRE(m >= 0 && m <= n, "%s: m is %" PRId64 " and n %" PRId64 ", wanted 0 <= m <= n",
               function, m, n);
    HR_REQUIRE(batch == 0 || m == 0 || n <= MOST / 16 / batch / m,
               "%s: batch is %" PRId64 ", m %" PRId64 " and n %" PRId64
               ", wanted at most 2^55 elements",
               function, batch, m, n);
    return HR_OK;
}

static hr_status check_config(const char *function, hr_newton_schulz_config *own,
                              const hr_newton_schulz_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config, sizeof *own,
                          "HR_NEWTON_SCHULZ_CONFIG_INIT"));
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_REQUIRE(own->variant == HR_NEWTON_SCHULZ_STANDARD || own->variant == HR_NEWTON_SCHULZ_GRAM,
               "%s: config->variant is %d, wanted 0 or 1", function, (int)own->variant);
    HR_REQUIRE(own->steps >= 1 && own->steps <= 100,
               "%s: config->steps is %" PRId64 ", wanted 1 to 100", function, own->steps);
    HR_REQUIRE(isfinite(own->eps) && own->eps > 0,
               "%s: config->eps is %g, wanted a finite number > 0", function, own->eps);
    for (int64_t i = 0; own->coefficients && i < 3 * own->steps; i++)
        HR_REQUIRE(isfinite((float)own->coefficients[i]),
                   "%s: config->coefficients[%" PRId64 "] is %g, wanted a finite binary32",
                   function, i, own->coefficients[i]);
    HR_TRY(hr_check_flag(function, "allow_tf32", own->allow_tf32));
    HR_TRY(hr_check_flag(function, "allow_reduced_precision_reduction",
                         own->allow_reduced_precision_reduction));
    HR_TRY(hr_check_flag(function, "deterministic", own->deterministic));
    return HR_OK;
}

/* ---- Steps ----------------------------------------------------------------------------------- */

/* c = alpha * a * b + beta * addend, with b as it is stored, or transposed, in `terms` columns of a;
 * rows of b and of c have `cols` elements. */
typedef struct product {
    char *c;
    const char *a, *b, *addend;
    int transpose;
    int64_t cols, terms;
    double alpha, beta;
} product;

static char *row_of(const iteration *it, const char *matrix, int64_t row, int64_t cols)
{
    return matrix ? (char *)matrix + row * cols * hr_element_size(it->config->dtype) : NULL;
}

/* Rows [first, first + rows) of c, in their first columns. */
static hr_status multiply_rows(const iteration *it, const product *p, int64_t first, int64_t rows,
                               int64_t columns)
{
    const hr_newton_schulz_config *const own = it->config;
    const hr_rows to = {row_of(it, p->c, first, p->cols), p->cols},
                  left = {row_of(it, p->a, first, p->terms), p->terms},
                  right = {(char *)p->b, p->transpose ? p->terms : p->cols};
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = own->dtype;
    config.transpose_b = p->transpose;
    config.alpha = p->alpha;
    config.beta = p->beta;
    config.batch = it->batch;
    config.batch_stride_a = it->m * p->terms;
    config.batch_stride_b = p->terms * p->cols;
    config.batch_stride_c = it->m * p->cols;
    config.allow_tf32 = own->allow_tf32;
    config.allow_reduced_precision_reduction = own->allow_reduced_precision_reduction;
    config.deterministic = own->deterministic;
    config.addend = (hr_rows){row_of(it, p->addend, first, p->cols), p->addend ? p->cols : 0};
    return hr_gemm(&to, &left, &right, NULL, rows, columns, p->terms, &config, it->workspace,
                   it->workspace_bytes, it->exec);
}

/* A product that is symmetric, [m, m]. On the CPU what is above the diagonal is copied from below, but
 * for the blocks on it. */
static hr_status multiply_symmetric(const iteration *it, const product *p)
{
    const int64_t rows = it->config->dtype == HR_F32 ? BLOCK_ROWS : BLOCK_ROWS_16;
    const int64_t m = it->m, block = (m + BLOCKS * rows - 1) / (BLOCKS * rows) * rows;
    if (it->exec->device != HR_CPU || m <= block)
        return multiply_rows(it, p, 0, m, m);
    for (int64_t first = 0; first < m; first += block) {
        const int64_t end = first + block < m ? first + block : m;
        HR_RUN(multiply_rows(it, p, first, end - first, end));
    }
    const newton_schulz_mirror args = {p->c, it->batch, m, block, it->config->dtype};
    return newton_schulz_mirror_cpu(&args);
}

/* X X^T. */
static hr_status gram_of_x(const iteration *it, char *to)
{
    const product p = {to, it->x, it->x, NULL, 1, it->m, it->n, 1.0, 0.0};
    return multiply_symmetric(it, &p);
}

/* alpha * a * b + beta * addend of matrices [m, m] that are polynomials of one symmetric matrix. */
static hr_status multiply_squares(const iteration *it, char *to, const char *a, const char *b,
                                  const char *addend, double alpha, double beta)
{
    const product p = {to, a, b, addend, 0, it->m, it->m, alpha, beta};
    return multiply_symmetric(it, &p);
}

/* X = q X + beta X. */
static hr_status apply(iteration *it, const char *q, double beta)
{
    char *const x = it->x;
    const product p = {it->other, q, x, beta != 0.0 ? x : NULL, 0, it->n, it->m, 1.0, beta};
    HR_RUN(multiply_rows(it, &p, 0, it->m, it->n));
    it->x = it->other;
    it->other = x;
    return HR_OK;
}

static const double *step_of(const hr_newton_schulz_config *config, int64_t k)
{
    static const double jordan[] = {3.4445, -4.7750, 2.0315};
    return config->coefficients ? config->coefficients + 3 * k : jordan;
}

static hr_status iterate(iteration *it)
{
    char *const a = it->square[0], *const b = it->square[1];
    for (int64_t k = 0; k < it->config->steps; k++) {
        const double *const by = step_of(it->config, k);
        HR_RUN(gram_of_x(it, a));
        HR_RUN(multiply_squares(it, b, a, a, a, by[2], by[1]));
        HR_RUN(apply(it, b, by[0]));
    }
    return HR_OK;
}

static hr_status shift(const iteration *it, char *to, const char *z, double a)
{
    const newton_schulz_shift args = {to, z, it->batch, it->m, (float)a, it->config->dtype};
    HR_ON_DEVICE(it->exec, newton_schulz_shift, &args);
    return HR_OK;
}

static int is_last(const hr_newton_schulz_config *config, int64_t k)
{
    return k + 1 == config->steps || k + 1 == RESTART;
}

static hr_status iterate_on_gram(iteration *it)
{
    char *const r = it->square[0], *const z = it->square[1];
    char *q = it->square[2], *s = it->square[3];
    for (int64_t k = 0; k < it->config->steps; k++) {
        const double *const by = step_of(it->config, k);
        const int is_first = k == 0 || k == RESTART, ends = is_last(it->config, k);
        if (is_first)
            HR_RUN(gram_of_x(it, r));
        HR_RUN(multiply_squares(it, z, r, r, r, by[2], by[1]));
        if (!ends) {
            HR_RUN(multiply_squares(it, s, r, z, r, 1.0, by[0]));
            HR_RUN(multiply_squares(it, r, z, s, s, 1.0, by[0]));
        }
        if (is_first) {
            HR_RUN(shift(it, q, z, by[0]));
        } else {
            char *const before = q;
            HR_RUN(multiply_squares(it, s, q, z, q, 1.0, by[0]));
            q = s, s = before;
        }
        if (ends)
            HR_RUN(apply(it, q, 0.0));
    }
    return HR_OK;
}

/* How often X is multiplied. */
static int64_t applications(const hr_newton_schulz_config *config)
{
    if (config->variant == HR_NEWTON_SCHULZ_STANDARD)
        return config->steps;
    return config->steps > RESTART ? 2 : 1;
}

/* Iterates on `count` matrices from `first`, with the workspace of as many from `space`. */
static hr_status run_part(const iteration *whole, int64_t first, int64_t count, int64_t space)
{
    const hr_newton_schulz_config *const config = whole->config;
    const int64_t numel = whole->m * whole->n, size = hr_element_size(config->dtype);
    char *const x = whole->x + first * numel * size;
    iteration it = *whole;
    it.batch = count;
    it.x = x;
    it.other += space * numel * size;
    for (int64_t i = 0; i < squares_of(config); i++)
        it.square[i] += space * whole->m * whole->m * size;
    if (applications(config) % 2 != 0) { /* so that the last result is written to x */
        it.x = it.other;
        it.other = x;
    }
    const newton_schulz_scale scale = {it.x,  x,           whole->squares + first, count,
                                       numel, config->eps, config->dtype};
    HR_ON_DEVICE(whole->exec, newton_schulz_scale, &scale);
    return config->variant == HR_NEWTON_SCHULZ_GRAM ? iterate_on_gram(&it) : iterate(&it);
}

/* Small matrices on the CPU: a thread iterates on its own, a few at a time. */
typedef struct shared_run {
    const iteration *whole;
    int64_t count;     /* of matrices at a time */
    atomic_int status; /* hr_status of the last that failed */
} shared_run;

static void run_range(void *context, int64_t begin, int64_t end)
{
    shared_run *const run = (shared_run *)context;
    for (int64_t i = begin; i < end; i += run->count) {
        const int64_t count = end - i < run->count ? end - i : run->count;
        const hr_status status = run_part(run->whole, i, count, begin);
        if (status != HR_OK)
            atomic_store(&run->status, (int)status);
    }
}

static hr_status run_all(const iteration *it)
{
    const int64_t matrix = (it->m * it->n + it->m * it->m) * 2 * hr_element_size(it->config->dtype);
    if (it->exec->device != HR_CPU || matrix > SMALL)
        return run_part(it, 0, it->batch, 0);
    shared_run run = {it, SHARE / matrix, HR_OK};
    hr_parallel_for(0, it->batch, 1, run_range, &run);
    return (hr_status)atomic_load(&run.status);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* The workspace in front of that of products. */
static size_t matrices_bytes(int64_t batch, int64_t m, int64_t n,
                             const hr_newton_schulz_config *config)
{
    return bytes_of(batch, m, n, config->dtype) +
           (size_t)squares_of(config) * bytes_of(batch, m, m, config->dtype);
}

hr_status hr_newton_schulz_workspace(size_t *bytes, int64_t batch, int64_t m, int64_t n,
                                     const hr_newton_schulz_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_newton_schulz_workspace";
    hr_newton_schulz_config own = HR_NEWTON_SCHULZ_CONFIG_INIT;
    hr_gemm_config product = HR_GEMM_CONFIG_INIT;
    size_t of_products = 0;
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(hr_check_vector(function, "bytes", bytes, HR_F64));
    HR_TRY(check_sizes(function, batch, m, n));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    product.dtype = product.out_dtype = own.dtype;
    HR_RUN(hr_gemm_workspace(&of_products, m, n, m, &product, exec));
    *bytes = matrices_bytes(batch, m, n, &own) + of_products;
    return HR_OK;
}

hr_status hr_newton_schulz(void *x, const float *squares, int64_t batch, int64_t m, int64_t n,
                           const hr_newton_schulz_config *config, void *workspace,
                           size_t workspace_bytes, const hr_exec *exec)
{
    static const char function[] = "hr_newton_schulz";
    hr_newton_schulz_config own = HR_NEWTON_SCHULZ_CONFIG_INIT;
    HR_TRY(check_sizes(function, batch, m, n));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    if (batch == 0 || m == 0)
        return HR_OK;
    HR_REQUIRE(x, "%s: x is NULL", function);
    HR_TRY(hr_check_vector(function, "x", x, own.dtype));
    HR_TRY(hr_check_given(function, "squares", squares, batch));
    const size_t wanted = matrices_bytes(batch, m, n, &own);
    HR_REQUIRE(workspace_bytes >= wanted, "%s: workspace_bytes is %zu, wanted %zu or more",
               function, workspace_bytes, wanted);
    const uintptr_t alignment = exec->device == HR_CPU ? 64 : 256;
    HR_REQUIRE(workspace && (uintptr_t)workspace % alignment == 0,
               "%s: workspace is at %p, wanted a multiple of %d bytes", function, workspace,
               (int)alignment);
    iteration it = {.config = &own,
                    .batch = batch,
                    .m = m,
                    .n = n,
                    .x = (char *)x,
                    .other = (char *)workspace,
                    .squares = squares,
                    .workspace = (char *)workspace + wanted,
                    .workspace_bytes = workspace_bytes - wanted,
                    .exec = exec};
    for (int64_t i = 0; i < squares_of(&own); i++)
        it.square[i] = (char *)workspace + bytes_of(batch, m, n, own.dtype) +
                       (size_t)i * bytes_of(batch, m, m, own.dtype);
    return run_all(&it);
}
