/* linear.c: hr_linear_forward, hr_linear_backward and hr_linear_query: checks, then the loop for few
 * rows of x, or products with parts of the matrix, which are decoded into the workspace. */
#include "kernels/nn/linear.h"

#include <inttypes.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "kernels/nn/gemm.h"

#define PART_LINES 64 /* of a part at least, so that the product of one is worth its call */

/* A call. The lines of a matrix are what its parts consist of: rows in forward, columns in
 * backward. */
typedef struct linear_call {
    const char *function;
    hr_matrix matrix;
    hr_linear_config config;
    int64_t m, lines;
    size_t line;    /* bytes of one decoded */
    size_t product; /* bytes of workspace that hr_gemm can use */
    size_t few;     /* bytes of workspace for few rows of x, if is_few */
    int is_few;
    int32_t backward;
    const hr_exec *exec;
} linear_call;

/* How many products an element of the result is the sum of. */
static int64_t terms_of(const linear_call *call)
{
    return call->backward ? call->matrix.rows : call->matrix.cols;
}

/* Parts have the same number of lines, but the last: a multiple of PART_LINES where that fits. */
static int64_t lines_per_part(const linear_call *call, size_t bytes)
{
    if (call->line == 0 || bytes / call->line >= (size_t)call->lines)
        return call->lines;
    const int64_t most = (int64_t)(bytes / call->line);
    if (most < PART_LINES)
        return most;
    const int64_t groups = (call->lines + PART_LINES - 1) / PART_LINES, fit = most / PART_LINES;
    const int64_t parts = (groups + fit - 1) / fit;
    return (groups + parts - 1) / parts * PART_LINES;
}

/* The bytes of a part of the best size. */
static size_t best_part(const linear_call *call)
{
    const size_t limit = linear_part_bytes(call->exec);
    const size_t least = PART_LINES * call->line;
    return (size_t)lines_per_part(call, limit > least ? limit : least) * call->line;
}

static hr_linear_needs needs_of(const linear_call *call)
{
    if (call->is_few)
        return (hr_linear_needs){call->few, call->few, call->few};
    if (call->matrix.format == HR_DENSE)
        return (hr_linear_needs){call->product, 0, call->product};
    return (hr_linear_needs){best_part(call) + call->product, call->line,
                             (size_t)call->lines * call->line + call->product};
}

/* Checks the matrix and the config, and measures what the call takes. */
static hr_status begin_call(linear_call *call, const hr_matrix *matrix,
                            const hr_linear_config *config)
{
    const char *const function = call->function;
    HR_TRY(hr_check_exec(function, call->exec));
    HR_TRY(hr_check_matrix(function, &call->matrix, matrix, 0));
    call->config = (hr_linear_config)HR_LINEAR_CONFIG_INIT;
    if (config)
        HR_TRY(hr_copy_config(function, "config->", &call->config, sizeof call->config, config,
                              sizeof call->config, "HR_LINEAR_CONFIG_INIT"));
    HR_TRY(hr_check_flag(function, "allow_tf32", call->config.allow_tf32));
    HR_TRY(hr_check_flag(function, "allow_reduced_precision_reduction",
                         call->config.allow_reduced_precision_reduction));
    HR_TRY(hr_check_flag(function, "deterministic", call->config.deterministic));
    HR_REQUIRE(call->config.reserved == 0, "%s: config->reserved is %" PRId32 ", wanted 0",
               function, call->config.reserved);
    const hr_matrix *const own = &call->matrix;
    const int64_t longer = own->rows > own->cols ? own->rows : own->cols;
    HR_REQUIRE(call->m >= 0 && (longer == 0 || call->m <= (INT64_C(1) << 59) / longer),
               "%s: m is %" PRId64 ", wanted 0 or more, and at most 2^59 elements in each matrix",
               function, call->m);
    const size_t element = hr_dtype_size(own->dtype);
    call->lines = call->backward ? own->cols : own->rows;
    call->line = (size_t)terms_of(call) * element;
    return HR_OK;
}

static hr_gemm_config gemm_config_of(const linear_call *call)
{
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = call->matrix.dtype;
    config.transpose_b = !call->backward;
    config.beta = call->config.addend.data != NULL;
    config.addend = call->config.addend;
    config.allow_tf32 = call->config.allow_tf32;
    config.allow_reduced_precision_reduction = call->config.allow_reduced_precision_reduction;
    config.deterministic = call->config.deterministic;
    return config;
}

/* Whether x has so few rows that the matrix is decoded on the way, for which MXFP4 has no loop. */
static int is_few(const linear_call *call)
{
    const hr_format format = call->matrix.format;
    if (call->backward || format == HR_DENSE || format == HR_MXFP4 || call->m > LINEAR_FEW)
        return 0;
    return call->exec->device == HR_CPU || linear_few_is_aligned(&call->matrix);
}

/* Chooses how to compute, which takes a device. */
static hr_status choose(linear_call *call)
{
    call->is_few = call->m == 0 || call->lines == 0 || is_few(call);
    if (call->is_few) {
        call->few = call->exec->device == HR_CPU ? linear_few_bytes(call->m, call->matrix.cols) : 0;
        return HR_OK;
    }
    const hr_gemm_config config = gemm_config_of(call);
    return hr_gemm_workspace(&call->product, call->m, call->lines, terms_of(call), &config,
                             call->exec);
}

hr_status hr_linear_query(hr_linear_needs *needs, int64_t m, const hr_matrix *matrix,
                          int32_t backward, const hr_linear_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_linear_query";
    linear_call call = {.function = function, .m = m, .backward = backward, .exec = exec};
    HR_REQUIRE(needs, "%s: needs is NULL", function);
    HR_TRY(hr_check_flag(function, "backward", backward));
    HR_TRY(begin_call(&call, matrix, config));
    HR_RUN(choose(&call));
    *needs = needs_of(&call);
    return HR_OK;
}

/* ---- The products ---------------------------------------------------------------------------- */

typedef struct linear_rows {
    hr_rows out, in;
    const void *bias;
} linear_rows;

/* Multiplies with `lines` lines of the matrix from `first` on, which lie in `part`. */
static hr_status multiply(const linear_call *call, const linear_rows *rows, const hr_rows *part,
                          int64_t first, int64_t lines, void *workspace, size_t workspace_bytes)
{
    const int64_t offset = first * (int64_t)hr_dtype_size(call->matrix.dtype);
    gemm_args args = {.c = {(char *)rows->out.data + offset, rows->out.stride},
                      .a = rows->in,
                      .b = *part,
                      .bias = rows->bias ? (const char *)rows->bias + offset : NULL,
                      .m = call->m,
                      .n = lines,
                      .k = terms_of(call),
                      .config = gemm_config_of(call),
                      .workspace = workspace,
                      .workspace_bytes = workspace_bytes};
    if (args.config.addend.data)
        args.config.addend.data = (char *)args.config.addend.data + offset;
    HR_ON_DEVICE(call->exec, gemm, &args);
    return HR_OK;
}

/* Decodes `lines` lines from `first` on. */
static hr_status decode(const linear_call *call, const hr_rows *part, int64_t first, int64_t lines)
{
    const hr_matrix *const w = &call->matrix;
    return call->backward ? hr_dequantize_matrix(part, w, 0, w->rows, first, lines, call->exec)
                          : hr_dequantize_matrix(part, w, first, lines, 0, w->cols, call->exec);
}

static hr_status multiply_in_parts(const linear_call *call, const linear_rows *rows,
                                   char *workspace, size_t bytes)
{
    if (call->matrix.format == HR_DENSE) {
        const hr_rows all = {call->matrix.data, call->matrix.stride};
        return multiply(call, rows, &all, 0, call->lines, workspace, bytes);
    }
    /* What is left of a part goes to the product; it lies first, so that both are aligned. */
    const size_t part = best_part(call);
    const size_t spare = bytes > part ? (bytes - part) & ~(size_t)255 : 0;
    const size_t product = spare < call->product ? spare : call->product;
    const int64_t step = lines_per_part(call, bytes - product);
    for (int64_t first = 0; first < call->lines; first += step) {
        const int64_t lines = call->lines - first < step ? call->lines - first : step;
        const hr_rows decoded = {workspace + product, call->backward ? lines : call->matrix.cols};
        HR_RUN(decode(call, &decoded, first, lines));
        HR_RUN(multiply(call, rows, &decoded, first, lines, workspace, product));
    }
    return HR_OK;
}

static hr_status multiply_few(const linear_call *call, const linear_rows *rows, void *workspace)
{
    const linear_few_args args = {.y = rows->out,
                                  .x = rows->in,
                                  .matrix = call->matrix,
                                  .bias = rows->bias,
                                  .m = call->m,
                                  .addend = call->config.addend,
                                  .workspace = workspace};
    HR_ON_DEVICE(call->exec, linear_few, &args);
    return HR_OK;
}

/* Checks what both passes are given, and computes it. */
static hr_status run_call(linear_call *call, const char *out_name, const hr_rows *out,
                          const char *in_name, const hr_rows *in, const void *bias,
                          const hr_matrix *matrix, const hr_linear_config *config, void *workspace,
                          size_t bytes)
{
    const char *const function = call->function;
    HR_TRY(begin_call(call, matrix, config));
    const hr_matrix *const w = &call->matrix;
    HR_REQUIRE(out, "%s: %s is NULL", function, out_name);
    HR_REQUIRE(in, "%s: %s is NULL", function, in_name);
    HR_TRY(hr_check_rows(function, out_name, out, call->m, call->lines, w->dtype));
    HR_TRY(hr_check_rows(function, in_name, in, call->m, terms_of(call), w->dtype));
    HR_TRY(hr_check_vector(function, "bias", bias, w->dtype));
    if (call->config.addend.data)
        HR_TRY(hr_check_rows(function, "config->addend", &call->config.addend, call->m, call->lines,
                             w->dtype));
    HR_RUN(choose(call));
    const hr_linear_needs needs = needs_of(call);
    HR_REQUIRE(bytes >= needs.least, "%s: workspace_bytes is %zu, wanted %zu or more", function,
               bytes, needs.least);
    const unsigned alignment = call->exec->device == HR_CPU ? 64 : 256;
    HR_REQUIRE(bytes == 0 || (workspace && (uintptr_t)workspace % alignment == 0),
               "%s: workspace is at %p, wanted a multiple of %u bytes", function, workspace,
               alignment);
    if (bytes == 0)
        workspace = NULL; /* which may be at any address */
    const linear_rows rows = {*out, *in, bias};
    if (call->m == 0 || call->lines == 0)
        return HR_OK;
    return call->is_few ? multiply_few(call, &rows, workspace)
                        : multiply_in_parts(call, &rows, workspace, bytes);
}

hr_status hr_linear_forward(const hr_rows *y, const hr_rows *x, const hr_matrix *matrix,
                            const void *bias, int64_t m, const hr_linear_config *config,
                            void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    linear_call call = {.function = "hr_linear_forward", .m = m, .exec = exec};
    return run_call(&call, "y", y, "x", x, bias, matrix, config, workspace, workspace_bytes);
}

hr_status hr_linear_backward(const hr_rows *dx, const hr_rows *dy, const hr_matrix *matrix,
                             int64_t m, const hr_linear_config *config, void *workspace,
                             size_t workspace_bytes, const hr_exec *exec)
{
    linear_call call = {.function = "hr_linear_backward", .m = m, .backward = 1, .exec = exec};
    return run_call(&call, "dx", dx, "dy", dy, NULL, matrix, config, workspace, workspace_bytes);
}
