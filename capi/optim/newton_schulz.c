/* newton_schulz.c: hr_newton_schulz and the size of its workspace: checks, then products and the
 * kernels between them. */
#include "kernels/optim/newton_schulz.h"

#include <inttypes.h>

#include "capi/check/rows.h"

#define MOST    (INT64_C(1) << 59) /* elements */
#define RESTART 2                  /* the iteration before which HR_NEWTON_SCHULZ_GRAM restarts */

/* What a call computes with. */
typedef struct iteration {
    const hr_newton_schulz_config *config;
    int64_t batch, m, n;
    char *x, *other; /* [batch, m, n] */
    char *square[4]; /* [batch, m, m] */
    void *workspace; /* of products */
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
static hr_status multiply(const iteration *it, char *c, const char *a, const char *b,
                          const char *addend, int transpose, int64_t cols, int64_t terms,
                          double alpha, double beta)
{
    const hr_newton_schulz_config *const own = it->config;
    const hr_rows to = {c, cols}, left = {(char *)a, terms},
                  right = {(char *)b, transpose ? terms : cols};
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = own->dtype;
    config.transpose_b = transpose;
    config.alpha = alpha;
    config.beta = beta;
    config.batch = it->batch;
    config.batch_stride_a = it->m * terms;
    config.batch_stride_b = terms * cols;
    config.batch_stride_c = it->m * cols;
    config.allow_tf32 = own->allow_tf32;
    config.allow_reduced_precision_reduction = own->allow_reduced_precision_reduction;
    config.deterministic = own->deterministic;
    config.addend = (hr_rows){(char *)addend, addend ? cols : 0};
    return hr_gemm(&to, &left, &right, NULL, it->m, cols, terms, &config, it->workspace,
                   it->workspace_bytes, it->exec);
}

/* X X^T. */
static hr_status gram_of_x(const iteration *it, char *to)
{
    return multiply(it, to, it->x, it->x, NULL, 1, it->m, it->n, 1.0, 0.0);
}

/* alpha * a * b + beta * addend of matrices [m, m]. */
static hr_status multiply_squares(const iteration *it, char *to, const char *a, const char *b,
                                  const char *addend, double alpha, double beta)
{
    return multiply(it, to, a, b, addend, 0, it->m, it->m, alpha, beta);
}

/* X = q X + beta X. */
static hr_status apply(iteration *it, const char *q, double beta)
{
    char *const x = it->x;
    HR_RUN(multiply(it, it->other, q, x, beta != 0.0 ? x : NULL, 0, it->n, it->m, 1.0, beta));
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
                    .workspace = (char *)workspace + wanted,
                    .workspace_bytes = workspace_bytes - wanted,
                    .exec = exec};
    for (int64_t i = 0; i < squares_of(&own); i++)
        it.square[i] = (char *)workspace + bytes_of(batch, m, n, own.dtype) +
                       (size_t)i * bytes_of(batch, m, m, own.dtype);
    if (applications(&own) % 2 != 0) { /* so that the last result is written to x */
        it.x = it.other;
        it.other = (char *)x;
    }
    const newton_schulz_scale scale = {it.x, x, squares, batch, m * n, own.eps, own.dtype};
    HR_ON_DEVICE(exec, newton_schulz_scale, &scale);
    return own.variant == HR_NEWTON_SCHULZ_GRAM ? iterate_on_gram(&it) : iterate(&it);
}
