/* lora.c: hr_lora_forward, hr_lora_backward and the norms of DoRA: checks, then products with the
 * adapters, to which those with the matrix are added. */
#include "kernels/nn/lora.h"

#include <inttypes.h>
#include <math.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "kernels/nn/linear.h"

#define ALIGNMENT 256 /* of what lies in the workspace */

/* A call, and where in the workspace what it makes lies: copies of A and B, dt, what hr_gemm can use,
 * and parts of drop(x). What comes after dt is the matrix's in its turn. */
typedef struct lora_call {
    const char *function;
    hr_matrix matrix;
    hr_lora_config config;
    int64_t m;
    int32_t backward;
    const hr_exec *exec;
    uint32_t threshold;              /* of what is dropped */
    size_t b_at, dt_at, rest, bytes; /* A is at 0 */
    size_t product;                  /* bytes for hr_gemm */
    int64_t part;                    /* rows, in backward columns, of a part of drop(x) */
    char *workspace;
} lora_call;

static int is_rounded(const lora_call *call)
{
    return call->config.adapter_dtype != call->matrix.dtype;
}

static hr_linear_config linear_config_of(const lora_call *call, hr_rows addend)
{
    hr_linear_config config = HR_LINEAR_CONFIG_INIT;
    config.allow_tf32 = call->config.allow_tf32;
    config.allow_reduced_precision_reduction = call->config.allow_reduced_precision_reduction;
    config.deterministic = call->config.deterministic;
    config.addend = addend;
    return config;
}

/* A product of rows of x's type. */
static hr_gemm_config gemm_config_of(const lora_call *call, double alpha)
{
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = call->matrix.dtype;
    config.alpha = alpha;
    config.allow_tf32 = call->config.allow_tf32;
    config.allow_reduced_precision_reduction = call->config.allow_reduced_precision_reduction;
    config.deterministic = call->config.deterministic;
    return config;
}

/* What is not dropped is divided by 1 - p. */
static double kept_factor(const lora_call *call)
{
    return LORA_PARTS / (LORA_PARTS - (double)call->threshold);
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static hr_status check_config(lora_call *call, const hr_lora_config *config)
{
    const char *const function = call->function;
    hr_lora_config *const own = &call->config;
    HR_REQUIRE(config, "%s: config is NULL", function);
    *own = (hr_lora_config)HR_LORA_CONFIG_INIT;
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config, sizeof *own,
                          "HR_LORA_CONFIG_INIT"));
    const int64_t longer =
        call->matrix.rows > call->matrix.cols ? call->matrix.rows : call->matrix.cols;
    const int64_t most = (INT64_C(1) << 59) / longer;
    HR_REQUIRE(call->m >= 0 && call->m <= most,
               "%s: m is %" PRId64 ", wanted 0 or more, and at most 2^59 elements in each matrix",
               function, call->m);
    HR_REQUIRE(own->rank >= 1 && own->rank <= most &&
                   own->rank <= (INT64_C(1) << 59) / (call->m + 1),
               "%s: config->rank is %" PRId64
               ", wanted 1 or more, and at most 2^59 elements in each matrix",
               function, own->rank);
    HR_REQUIRE(isfinite((float)own->scale), "%s: config->scale is %g, wanted a finite binary32",
               function, own->scale);
    HR_REQUIRE(own->dropout >= 0.0 && own->dropout < 1.0,
               "%s: config->dropout is %g, wanted 0 or more, and less than 1", function,
               own->dropout);
    HR_REQUIRE(own->seed || own->dropout == 0.0,
               "%s: config->seed is NULL, but config->dropout is %g", function, own->dropout);
    HR_TRY(hr_check_vector(function, "config->seed", own->seed, HR_F64));
    HR_REQUIRE(own->adapter_dtype == HR_F32 || own->adapter_dtype == call->matrix.dtype,
               "%s: config->adapter_dtype is %s, wanted f32 or matrix->dtype (%s)", function,
               hr_dtype_name(own->adapter_dtype), hr_dtype_name(call->matrix.dtype));
    HR_TRY(hr_check_flag(function, "allow_tf32", own->allow_tf32));
    HR_TRY(hr_check_flag(function, "allow_reduced_precision_reduction",
                         own->allow_reduced_precision_reduction));
    return hr_check_flag(function, "deterministic", own->deterministic);
}

static hr_status begin_call(lora_call *call, const hr_matrix *matrix, const hr_lora_config *config)
{
    HR_TRY(hr_check_exec(call->function, call->exec));
    HR_TRY(hr_check_matrix(call->function, &call->matrix, matrix, 0));
    HR_TRY(check_config(call, config));
    const double nearest = floor(call->config.dropout * LORA_PARTS + 0.5);
    call->threshold = (uint32_t)(nearest < LORA_PARTS ? nearest : LORA_PARTS - 1.0);
    return HR_OK;
}

static size_t aligned(size_t bytes)
{
    return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

/* How many rows of drop(x) are a part, or in backward columns: whole groups of them. */
static int64_t lines_per_part(const lora_call *call)
{
    const size_t limit = linear_part_bytes(call->exec);
    const int64_t lines = call->backward ? call->matrix.cols : call->m;
    const int64_t length = call->backward ? call->m : call->matrix.cols;
    const int64_t most = (int64_t)(limit / hr_dtype_size(call->matrix.dtype)) / length;
    const int64_t fit = most / LORA_GROUP * LORA_GROUP;
    return lines <= most ? lines : fit > 0 ? fit : LORA_GROUP;
}

/* Lays out the workspace, which takes a device. */
static hr_status plan(lora_call *call)
{
    const hr_matrix *const w = &call->matrix;
    if (call->m == 0 && !call->backward)
        return HR_OK;
    const int64_t rank = call->config.rank, copied = is_rounded(call) ? rank : 0;
    const size_t element = hr_dtype_size(w->dtype);
    const hr_gemm_config gemm = gemm_config_of(call, 1.0);
    const hr_linear_config linear = linear_config_of(call, (hr_rows){NULL, 0});
    hr_linear_needs needs;
    HR_RUN(hr_gemm_workspace(&call->product, call->m, w->rows, rank, &gemm, call->exec));
    HR_RUN(hr_linear_query(&needs, call->m, w, call->backward, &linear, call->exec));
    call->b_at = aligned((size_t)(copied * w->cols) * element);
    call->dt_at = call->b_at + aligned((size_t)(copied * w->rows) * element);
    call->rest = call->dt_at + (call->backward ? aligned((size_t)(call->m * rank) * element) : 0);
    size_t dropped = 0;
    if (call->threshold && call->m > 0) {
        call->part = lines_per_part(call);
        dropped = (size_t)(call->part * (call->backward ? call->m : w->cols)) * element;
    }
    const size_t products = aligned(call->product) + dropped;
    call->bytes = call->rest + (needs.best > products ? needs.best : products);
    return HR_OK;
}

static hr_status check_workspace(lora_call *call, void *workspace, size_t bytes)
{
    HR_REQUIRE(bytes >= call->bytes, "%s: workspace_bytes is %zu, wanted %zu or more",
               call->function, bytes, call->bytes);
    const unsigned alignment = call->exec->device == HR_CPU ? 64 : 256;
    HR_REQUIRE(bytes == 0 || (workspace && (uintptr_t)workspace % alignment == 0),
               "%s: workspace is at %p, wanted a multiple of %u bytes", call->function, workspace,
               alignment);
    call->workspace = workspace;
    call->bytes = bytes;
    return HR_OK;
}

/* A matrix that a call cannot do without. */
static hr_status check_needed(const lora_call *call, const char *name, const hr_rows *rows,
                              int64_t count, int64_t cols, hr_dtype dtype)
{
    HR_REQUIRE(rows, "%s: %s is NULL", call->function, name);
    return hr_check_rows(call->function, name, rows, count, cols, dtype);
}

static hr_status check_adapters(const lora_call *call, const hr_rows *a, const hr_rows *b)
{
    const int64_t rank = call->config.rank;
    const hr_dtype dtype = call->config.adapter_dtype;
    HR_TRY(check_needed(call, "a", a, rank, call->matrix.cols, dtype));
    return check_needed(call, "b", b, call->matrix.rows, rank, dtype);
}

hr_status hr_lora_workspace(size_t *bytes, int64_t m, const hr_matrix *matrix, int32_t backward,
                            const hr_lora_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_lora_workspace";
    lora_call call = {.function = function, .m = m, .backward = backward, .exec = exec};
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(hr_check_flag(function, "backward", backward));
    HR_TRY(begin_call(&call, matrix, config));
    HR_RUN(plan(&call));
    *bytes = call.bytes;
    return HR_OK;
}

/* ---- Steps ----------------------------------------------------------------------------------- */

static hr_status product(const lora_call *call, const hr_rows *c, const hr_rows *a,
                         const hr_rows *b, const void *bias, int64_t m, int64_t n, int64_t k,
                         const hr_gemm_config *config)
{
    return hr_gemm(c, a, b, bias, m, n, k, config, call->workspace + call->rest, call->product,
                   call->exec);
}

/* An adapter [rows, cols] in the type of x: itself, or a copy in the workspace. */
static hr_status in_type_of_x(const lora_call *call, hr_rows *out, const hr_rows *adapter,
                              size_t at, int64_t rows, int64_t cols)
{
    *out = *adapter;
    if (!is_rounded(call) || rows == 0)
        return HR_OK;
    *out = (hr_rows){call->workspace + at, cols};
    lora_rows_args args = {
        .out = *out, .x = *adapter, .out_dtype = call->matrix.dtype, .rows = rows, .cols = cols};
    if (rows == 1 || adapter->stride == cols) { /* one long row */
        args.rows = 1;
        args.cols = rows * cols;
    }
    HR_ON_DEVICE(call->exec, lora_rows, &args);
    return HR_OK;
}

static hr_rows from(const hr_rows *rows, int64_t row, int64_t col, hr_dtype dtype)
{
    const int64_t size = (int64_t)hr_dtype_size(dtype);
    return (hr_rows){(char *)rows->data + (row * rows->stride + col) * size, rows->stride};
}

/* out = x with zeros for what drop() drops from a part of a matrix of m rows that begins at (row,
 * col). */
static hr_status drop(const lora_call *call, const hr_rows *out, const hr_rows *x, int64_t row,
                      int64_t rows, int64_t col, int64_t cols)
{
    const lora_rows_args args = {.out = *out,
                                 .x = *x,
                                 .out_dtype = call->matrix.dtype,
                                 .rows = rows,
                                 .cols = cols,
                                 .row = row,
                                 .col = col,
                                 .threshold = call->threshold,
                                 .seed = call->config.seed};
    HR_ON_DEVICE(call->exec, lora_rows, &args);
    return HR_OK;
}

static hr_rows dropped_part(const lora_call *call, int64_t cols)
{
    return (hr_rows){call->workspace + call->rest + aligned(call->product), cols};
}

/* t = drop(x) A^T, rows of it at a time. */
static hr_status multiply_down(const lora_call *call, const hr_rows *t, const hr_rows *x,
                               const hr_rows *a)
{
    const int64_t cols = call->matrix.cols, rank = call->config.rank;
    hr_gemm_config gemm = gemm_config_of(call, kept_factor(call));
    gemm.transpose_b = 1;
    if (!call->threshold)
        return product(call, t, x, a, NULL, call->m, rank, cols, &gemm);
    const hr_rows part = dropped_part(call, cols);
    for (int64_t row = 0; row < call->m; row += call->part) {
        const int64_t rows = call->m - row < call->part ? call->m - row : call->part;
        const hr_rows x_part = from(x, row, 0, call->matrix.dtype);
        const hr_rows t_part = from(t, row, 0, call->matrix.dtype);
        HR_RUN(drop(call, &part, &x_part, row, rows, 0, cols));
        HR_RUN(product(call, &t_part, &part, a, NULL, rows, rank, cols, &gemm));
    }
    return HR_OK;
}

/* dA = dt^T drop(x), columns of it at a time. */
static hr_status gradient_of_a(const lora_call *call, const hr_rows *da, const hr_rows *dt,
                               const hr_rows *x)
{
    const int64_t cols = call->matrix.cols, rank = call->config.rank;
    hr_gemm_config gemm = gemm_config_of(call, kept_factor(call));
    gemm.out_dtype = call->config.adapter_dtype;
    gemm.transpose_a = 1;
    if (!call->threshold || call->m == 0)
        return product(call, da, dt, x, NULL, rank, cols, call->m, &gemm);
    for (int64_t col = 0; col < cols; col += call->part) {
        const int64_t width = cols - col < call->part ? cols - col : call->part;
        const hr_rows part = dropped_part(call, width);
        const hr_rows x_part = from(x, 0, col, call->matrix.dtype);
        const hr_rows da_part = from(da, 0, col, gemm.out_dtype);
        HR_RUN(drop(call, &part, &x_part, 0, call->m, col, width));
        HR_RUN(product(call, &da_part, dt, &part, NULL, rank, width, call->m, &gemm));
    }
    return HR_OK;
}

/* dB = scale dy^T t. */
static hr_status gradient_of_b(const lora_call *call, const hr_rows *db, const hr_rows *dy,
                               const hr_rows *t)
{
    hr_gemm_config gemm = gemm_config_of(call, call->config.scale);
    gemm.out_dtype = call->config.adapter_dtype;
    gemm.transpose_a = 1;
    return product(call, db, dy, t, NULL, call->matrix.rows, call->config.rank, call->m, &gemm);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

hr_status hr_lora_forward(const hr_rows *y, const hr_rows *t, const hr_rows *x,
                          const hr_matrix *matrix, const hr_rows *a, const hr_rows *b,
                          const void *bias, int64_t m, const hr_lora_config *config,
                          void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    static const char function[] = "hr_lora_forward";
    lora_call call = {.function = function, .m = m, .exec = exec};
    HR_TRY(begin_call(&call, matrix, config));
    const hr_matrix *const w = &call.matrix;
    const int64_t rank = call.config.rank;
    HR_TRY(check_needed(&call, "y", y, w->rows > 0 ? m : 0, w->rows, w->dtype));
    HR_TRY(check_needed(&call, "t", t, m, rank, w->dtype));
    HR_TRY(check_needed(&call, "x", x, m, w->cols, w->dtype));
    HR_TRY(check_adapters(&call, a, b));
    HR_TRY(hr_check_vector(function, "bias", bias, w->dtype));
    HR_RUN(plan(&call));
    HR_TRY(check_workspace(&call, workspace, workspace_bytes));
    if (m == 0)
        return HR_OK;
    hr_rows own_a, own_b;
    HR_RUN(in_type_of_x(&call, &own_a, a, 0, rank, w->cols));
    HR_RUN(in_type_of_x(&call, &own_b, b, call.b_at, w->rows, rank));
    HR_RUN(multiply_down(&call, t, x, &own_a));
    if (w->rows == 0)
        return HR_OK;
    hr_gemm_config gemm = gemm_config_of(&call, call.config.scale);
    gemm.transpose_b = 1;
    HR_RUN(product(&call, y, t, &own_b, bias, m, w->rows, rank, &gemm));
    const hr_linear_config linear = linear_config_of(&call, *y);
    return hr_linear_forward(y, x, w, NULL, m, &linear, call.workspace + call.rest,
                             call.bytes - call.rest, exec);
}

/* What is computed, NULL where it is not. */
typedef struct lora_gradients {
    const hr_rows *dx, *da, *db;
} lora_gradients;

static hr_status check_backward(const lora_call *call, const lora_gradients *grads,
                                const hr_rows *dy, const hr_rows *x, const hr_rows *t)
{
    const char *const function = call->function;
    const hr_matrix *const w = &call->matrix;
    const int64_t m = call->m, rank = call->config.rank;
    const hr_dtype dtype = call->config.adapter_dtype;
    HR_TRY(check_needed(call, "dy", dy, w->rows > 0 ? m : 0, w->rows, w->dtype));
    HR_TRY(hr_check_rows(function, "dx", grads->dx, m, w->cols, w->dtype));
    HR_TRY(hr_check_rows(function, "da", grads->da, rank, w->cols, dtype));
    HR_TRY(hr_check_rows(function, "db", grads->db, w->rows, rank, dtype));
    if (grads->da)
        HR_TRY(check_needed(call, "x", x, m, w->cols, w->dtype));
    if (grads->db)
        HR_TRY(check_needed(call, "t", t, m, rank, w->dtype));
    return HR_OK;
}

static hr_status run_backward(const lora_call *call, const lora_gradients *grads, const hr_rows *dy,
                              const hr_rows *x, const hr_rows *t, const hr_rows *a,
                              const hr_rows *b)
{
    const hr_matrix *const w = &call->matrix;
    const int64_t m = call->m, rank = call->config.rank;
    hr_rows own_a, own_b;
    const hr_rows dt = {call->workspace + call->dt_at, rank};
    if (grads->db)
        HR_RUN(gradient_of_b(call, grads->db, dy, t));
    if (!grads->da && !grads->dx)
        return HR_OK;
    HR_RUN(in_type_of_x(call, &own_b, b, call->b_at, w->rows, rank));
    const hr_gemm_config of_dt = gemm_config_of(call, call->config.scale);
    HR_RUN(product(call, &dt, dy, &own_b, NULL, m, rank, w->rows, &of_dt));
    if (grads->da)
        HR_RUN(gradient_of_a(call, grads->da, &dt, x));
    if (!grads->dx || m == 0)
        return HR_OK;
    HR_RUN(in_type_of_x(call, &own_a, a, 0, rank, w->cols));
    const hr_gemm_config of_dx = gemm_config_of(call, kept_factor(call));
    HR_RUN(product(call, grads->dx, &dt, &own_a, NULL, m, w->cols, rank, &of_dx));
    if (call->threshold)
        HR_RUN(drop(call, grads->dx, grads->dx, 0, m, 0, w->cols));
    if (w->rows == 0)
        return HR_OK;
    const hr_linear_config linear = linear_config_of(call, *grads->dx);
    return hr_linear_backward(grads->dx, dy, w, m, &linear, call->workspace + call->rest,
                              call->bytes - call->rest, call->exec);
}

hr_status hr_lora_backward(const hr_rows *dx, const hr_rows *da, const hr_rows *db,
                           const hr_rows *dy, const hr_rows *x, const hr_rows *t,
                           const hr_matrix *matrix, const hr_rows *a, const hr_rows *b, int64_t m,
                           const hr_lora_config *config, void *workspace, size_t workspace_bytes,
                           const hr_exec *exec)
{
    lora_call call = {.function = "hr_lora_backward", .m = m, .backward = 1, .exec = exec};
    const lora_gradients grads = {dx, da, db};
    HR_TRY(begin_call(&call, matrix, config));
    HR_TRY(check_backward(&call, &grads, dy, x, t));
    HR_TRY(check_adapters(&call, a, b));
    HR_RUN(plan(&call));
    HR_TRY(check_workspace(&call, workspace, workspace_bytes));
    return run_backward(&call, &grads, dy, x, t, a, b);
}

/* ---- Norms ----------------------------------------------------------------------------------- */

/* Where A A^T, W A^T of a part, what hr_gemm can use and the part lie; copies of A and B come first.
 * `rows` is those of a part. */
typedef struct norms_plan {
    size_t gram, products, gemm, part, bytes;
    int64_t rows;
} norms_plan;

static hr_status plan_norms(lora_call *call, norms_plan *own)
{
    const hr_matrix *const w = &call->matrix;
    const int64_t rank = call->config.rank, copied = is_rounded(call) ? rank : 0;
    const size_t element = hr_dtype_size(w->dtype), line = (size_t)w->cols * element;
    const hr_gemm_config gemm = gemm_config_of(call, 1.0);
    HR_RUN(hr_gemm_workspace(&call->product, w->rows, rank, w->cols, &gemm, call->exec));
    const size_t fit = linear_part_bytes(call->exec) / line;
    own->rows = fit < 1 ? 1 : fit < (size_t)w->rows ? (int64_t)fit : w->rows;
    call->b_at = aligned((size_t)(copied * w->cols) * element);
    own->gram = call->b_at + aligned((size_t)(copied * w->rows) * element);
    own->products = own->gram + aligned((size_t)(rank * rank) * sizeof(float));
    own->gemm = own->products + aligned((size_t)(own->rows * rank) * sizeof(float));
    own->part = own->gemm + aligned(call->product);
    own->bytes = own->part + (w->format == HR_DENSE ? 0 : (size_t)own->rows * line);
    call->rest = own->gemm;
    call->bytes = own->bytes;
    return HR_OK;
}

static hr_status norms_of_part(const lora_call *call, const norms_plan *own, float *norms,
                               const hr_rows *a, const hr_rows *b, int64_t row, int64_t rows)
{
    const hr_matrix *const w = &call->matrix;
    const int64_t rank = call->config.rank;
    hr_rows part = {call->workspace + own->part, w->cols};
    if (w->format == HR_DENSE) {
        const hr_rows all = {w->data, w->stride};
        part = from(&all, row, 0, w->dtype);
    } else {
        HR_RUN(hr_dequantize_matrix(&part, w, row, rows, 0, w->cols, call->exec));
    }
    const hr_rows products = {call->workspace + own->products, rank};
    hr_gemm_config gemm = gemm_config_of(call, 1.0);
    gemm.out_dtype = HR_F32;
    gemm.transpose_b = 1;
    HR_RUN(product(call, &products, &part, a, NULL, rows, rank, w->cols, &gemm));
    const lora_norms_args args = {.norms = norms + row,
                                  .w = part,
                                  .b = from(b, row, 0, w->dtype),
                                  .dtype = w->dtype,
                                  .products = products.data,
                                  .gram = (const float *)(call->workspace + own->gram),
                                  .rows = rows,
                                  .cols = w->cols,
                                  .rank = rank,
                                  .scale = call->config.scale};
    HR_ON_DEVICE(call->exec, lora_norms, &args);
    return HR_OK;
}

static hr_status begin_norms(lora_call *call, const hr_matrix *matrix, const hr_lora_config *config)
{
    HR_TRY(begin_call(call, matrix, config));
    HR_REQUIRE(call->config.rank <= INT64_C(1) << 28,
               "%s: config->rank is %" PRId64 ", wanted at most 2^28", call->function,
               call->config.rank);
    return HR_OK;
}

hr_status hr_lora_norms_workspace(size_t *bytes, const hr_matrix *matrix,
                                  const hr_lora_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_lora_norms_workspace";
    lora_call call = {.function = function, .exec = exec};
    norms_plan own;
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(begin_norms(&call, matrix, config));
    HR_RUN(plan_norms(&call, &own));
    *bytes = own.bytes;
    return HR_OK;
}

hr_status hr_lora_norms(float *norms, const hr_matrix *matrix, const hr_rows *a, const hr_rows *b,
                        const hr_lora_config *config, void *workspace, size_t workspace_bytes,
                        const hr_exec *exec)
{
    static const char function[] = "hr_lora_norms";
    lora_call call = {.function = function, .exec = exec};
    norms_plan own;
    HR_TRY(begin_norms(&call, matrix, config));
    const hr_matrix *const w = &call.matrix;
    const int64_t rank = call.config.rank;
    HR_TRY(hr_check_given(function, "norms", norms, w->rows));
    HR_TRY(check_adapters(&call, a, b));
    HR_RUN(plan_norms(&call, &own));
    HR_TRY(check_workspace(&call, workspace, workspace_bytes));
    if (w->rows == 0)
        return HR_OK;
    hr_rows own_a, own_b;
    HR_RUN(in_type_of_x(&call, &own_a, a, 0, rank, w->cols));
    HR_RUN(in_type_of_x(&call, &own_b, b, call.b_at, w->rows, rank));
    const hr_rows gram = {call.workspace + own.gram, rank};
    hr_gemm_config gemm = gemm_config_of(&call, 1.0);
    gemm.out_dtype = HR_F32;
    gemm.transpose_b = 1;
    HR_RUN(product(&call, &gram, &own_a, &own_a, NULL, rank, rank, w->cols, &gemm));
    for (int64_t row = 0; row < w->rows; row += own.rows)
        HR_RUN(norms_of_part(&call, &own, norms, &own_a, &own_b, row,
                             w->rows - row < own.rows ? w->rows - row : own.rows));
    return HR_OK;
}
