/* norm.c: hr_norm_forward, _backward and the size of its workspace: checks, then the kernel of the
 * device. */
#include "kernels/nn/norm.h"

#include <math.h>

#include "capi/check/rows.h"

static hr_status check_config(const char *function, hr_norm_config *own,
                              const hr_norm_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_norm_config, offset) + sizeof own->offset,
                          "HR_NORM_CONFIG_INIT"));
    HR_REQUIRE(own->kind == HR_NORM_RMS || own->kind == HR_NORM_LAYER,
               "%s: config->kind is %d, wanted HR_NORM_RMS (0) or HR_NORM_LAYER (1)", function,
               (int)own->kind);
    HR_REQUIRE(own->casting >= HR_NORM_ONCE && own->casting <= HR_NORM_NARROW,
               "%s: config->casting is %d, wanted 0, 1 or 2", function, (int)own->casting);
    HR_REQUIRE(own->casting == HR_NORM_ONCE || own->kind == HR_NORM_RMS,
               "%s: config->casting is %d, wanted HR_NORM_ONCE (0) with HR_NORM_LAYER", function,
               (int)own->casting);
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_TRY(hr_check_float(function, "config->weight_dtype", own->weight_dtype));
    HR_REQUIRE(own->eps >= 0 && isfinite((float)own->eps),
               "%s: config->eps is %g, wanted a finite binary32 of 0 or more", function, own->eps);
    HR_REQUIRE(isfinite((float)own->offset), "%s: config->offset is %g, wanted a finite binary32",
               function, own->offset);
    return HR_OK;
}

/* What both directions have alike. */
static hr_status check_input(const char *function, const hr_rows *x, const void *weight,
                             const void *bias, int64_t rows, int64_t cols,
                             const hr_norm_config *own)
{
    HR_REQUIRE(x, "%s: x is NULL", function);
    HR_TRY(hr_check_rows(function, "x", x, rows, cols, own->dtype));
    HR_TRY(hr_check_vector(function, "weight", weight, own->weight_dtype));
    HR_TRY(hr_check_vector(function, "bias", bias, own->weight_dtype));
    HR_REQUIRE(!bias || own->kind == HR_NORM_LAYER,
               "%s: bias is given, but only HR_NORM_LAYER has one", function);
    return HR_OK;
}

hr_status hr_norm_forward(const hr_rows *y, const hr_rows *sum, float *mean, float *rstd,
                          const hr_rows *x, const hr_rows *residual, const void *weight,
                          const void *bias, int64_t rows, int64_t cols,
                          const hr_norm_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_norm_forward";
    hr_norm_config own = HR_NORM_CONFIG_INIT;
    HR_TRY(hr_check_sizes(function, rows, cols));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(check_input(function, x, weight, bias, rows, cols, &own));
    HR_REQUIRE(y, "%s: y is NULL", function);
    HR_TRY(hr_check_rows(function, "y", y, rows, cols, own.dtype));
    HR_REQUIRE(!residual == !sum, "%s: %s is NULL, but %s is not; give both or neither", function,
               sum ? "residual" : "sum", sum ? "sum" : "residual");
    HR_TRY(hr_check_rows(function, "sum", sum, rows, cols, own.dtype));
    HR_TRY(hr_check_rows(function, "residual", residual, rows, cols, own.dtype));
    HR_TRY(hr_check_vector(function, "mean", mean, HR_F32));
    HR_TRY(hr_check_vector(function, "rstd", rstd, HR_F32));
    HR_REQUIRE(!mean || own.kind == HR_NORM_LAYER,
               "%s: mean is given, but only HR_NORM_LAYER has one", function);
    const norm_args args = {.y = *y,
                            .sum = hr_rows_or_none(sum),
                            .x = *x,
                            .residual = hr_rows_or_none(residual),
                            .weight = weight,
                            .bias = bias,
                            .mean = mean,
                            .rstd = rstd,
                            .rows = rows,
                            .cols = cols,
                            .config = own};
    if (exec->device == HR_CPU)
        return norm_forward_cpu(&args);
    HR_RETURN_CUDA(norm_forward_cuda(&args, exec), exec);
}

static size_t workspace_bytes_of(int64_t rows, int64_t cols, hr_norm_kind kind)
{
    return sizeof(float) * (size_t)(norm_groups(rows) * norm_sums(kind) * cols);
}

hr_status hr_norm_workspace(size_t *bytes, int64_t rows, int64_t cols, const hr_norm_config *config)
{
    static const char function[] = "hr_norm_workspace";
    hr_norm_config own = HR_NORM_CONFIG_INIT;
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(hr_check_vector(function, "bytes", bytes, HR_F64));
    HR_TRY(hr_check_sizes(function, rows, cols));
    HR_TRY(check_config(function, &own, config));
    *bytes = workspace_bytes_of(rows, cols, own.kind);
    return HR_OK;
}

hr_status hr_norm_backward(const hr_rows *dx, void *dweight, void *dbias, const hr_rows *y,
                           const hr_rows *dy, const hr_rows *dsum, const hr_rows *x,
                           const void *weight, const void *bias, const float *mean,
                           const float *rstd, int64_t rows, int64_t cols,
                           const hr_norm_config *config, void *workspace, size_t workspace_bytes,
                           const hr_exec *exec)
{
    static const char function[] = "hr_norm_backward";
    hr_norm_config own = HR_NORM_CONFIG_INIT;
    HR_TRY(hr_check_sizes(function, rows, cols));
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(check_input(function, x, weight, bias, rows, cols, &own));
    HR_REQUIRE(dx || dweight || dbias || y,
               "%s: dx, dweight, dbias and y are NULL, so there is nothing to do", function);
    HR_REQUIRE(dy || !(dx || dweight || dbias), "%s: dy is NULL, which only y can do without",
               function);
    HR_TRY(hr_check_rows(function, "dx", dx, rows, cols, own.dtype));
    HR_TRY(hr_check_rows(function, "y", y, rows, cols, own.dtype));
    HR_TRY(hr_check_rows(function, "dy", dy, rows, cols, own.dtype));
    HR_TRY(hr_check_rows(function, "dsum", dsum, rows, cols, own.dtype));
    HR_TRY(hr_check_vector(function, "dweight", dweight, own.weight_dtype));
    HR_TRY(hr_check_vector(function, "dbias", dbias, own.weight_dtype));
    HR_REQUIRE(!dbias || own.kind == HR_NORM_LAYER,
               "%s: dbias is given, but only HR_NORM_LAYER has a bias", function);
    HR_REQUIRE(rstd || rows == 0, "%s: rstd is NULL", function);
    HR_TRY(hr_check_vector(function, "rstd", rstd, HR_F32));
    HR_REQUIRE(!mean == (own.kind == HR_NORM_RMS) || rows == 0, "%s: mean is %s, wanted %s",
               function, mean ? "given" : "NULL",
               mean ? "NULL with HR_NORM_RMS" : "that of hr_norm_forward with HR_NORM_LAYER");
    HR_TRY(hr_check_vector(function, "mean", mean, HR_F32));
    const int sums = dweight || dbias;
    const size_t needed = sums ? workspace_bytes_of(rows, cols, own.kind) : 0;
    HR_REQUIRE(workspace_bytes >= needed, "%s: workspace_bytes is %zu, wanted %zu", function,
               workspace_bytes, needed);
    HR_REQUIRE(needed == 0 || (workspace && (uintptr_t)workspace % 8 == 0),
               "%s: workspace is at %p, wanted a multiple of 8 bytes", function, workspace);
    const norm_args args = {.x = *x,
                            .y = hr_rows_or_none(y),
                            .dx = hr_rows_or_none(dx),
                            .dy = hr_rows_or_none(dy),
                            .dsum = hr_rows_or_none(dsum),
                            .dweight = dweight,
                            .dbias = dbias,
                            .weight = weight,
                            .bias = bias,
                            .mean = (float *)(uintptr_t)mean,
                            .rstd = (float *)(uintptr_t)rstd,
                            .rows = rows,
                            .cols = cols,
                            .config = own,
                            .partials = sums ? (float *)workspace : NULL};
    if (exec->device == HR_CPU)
        return norm_backward_cpu(&args);
    HR_RETURN_CUDA(norm_backward_cuda(&args, exec), exec);
}
