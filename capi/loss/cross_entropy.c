/* cross_entropy.c: hr_cross_entropy_forward, _backward and _reduce: checks, then the kernel of the
 * device. */
#include "capi/check/rows.h"
#include "capi/loss/cross_entropy_checks.h"

static hr_status check_config(const char *function, hr_cross_entropy_config *own,
                              const hr_cross_entropy_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_cross_entropy_config, z_loss) + sizeof own->z_loss,
                          "HR_CROSS_ENTROPY_CONFIG_INIT"));
    HR_TRY(hr_check_logit_dtypes(function, own->dtype, own->grad_dtype));
    return ce_check_options(function, own);
}

/* The arguments that all functions have. */
static hr_status check_common(const char *function, cross_entropy_args *a,
                              const hr_cross_entropy_config *config, const hr_exec *exec)
{
    HR_TRY(hr_check_sizes(function, a->rows, a->classes));
    HR_TRY(check_config(function, &a->config, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(hr_check_vector(function, "weight", a->weight, HR_F32));
    return HR_OK;
}

hr_status hr_cross_entropy_forward(float *loss, float *lse, float *lse_low, int64_t *argmax,
                                   const hr_rows *logits, const void *target, const float *weight,
                                   int64_t rows, int64_t classes,
                                   const hr_cross_entropy_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_cross_entropy_forward";
    cross_entropy_args args = {.target = target,
                               .weight = weight,
                               .loss = loss,
                               .lse = lse,
                               .lse_low = lse_low,
                               .argmax = argmax,
                               .rows = rows,
                               .classes = classes,
                               .all = classes,
                               .config = HR_CROSS_ENTROPY_CONFIG_INIT};
    HR_TRY(check_common(function, &args, config, exec));
    HR_TRY(hr_check_logits(function, "logits", logits, rows, classes, args.config.dtype));
    args.logits = *logits;
    HR_TRY(hr_check_given(function, "loss", loss, rows));
    HR_TRY(hr_check_given(function, "lse", lse, rows));
    HR_TRY(hr_check_vector(function, "lse_low", lse_low, HR_F32));
    HR_TRY(hr_check_vector(function, "argmax", argmax, HR_F64));
    HR_TRY(ce_check_targets(function, "target", &args, exec));
    if (exec->device == HR_CPU)
        return cross_entropy_forward_cpu(&args);
    HR_RETURN_CUDA(cross_entropy_forward_cuda(&args, exec), exec);
}

hr_status hr_cross_entropy_backward(const hr_rows *grad, const float *dloss, int64_t dloss_stride,
                                    const float *factors, const hr_rows *logits, const void *target,
                                    const float *weight, const float *lse, const float *lse_low,
                                    int64_t rows, int64_t classes,
                                    const hr_cross_entropy_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_cross_entropy_backward";
    cross_entropy_args args = {.target = target,
                               .weight = weight,
                               .lse = (float *)(uintptr_t)lse,
                               .lse_low = (float *)(uintptr_t)lse_low,
                               .dloss = dloss,
                               .dloss_stride = dloss_stride,
                               .factors = factors,
                               .rows = rows,
                               .classes = classes,
                               .all = classes,
                               .config = HR_CROSS_ENTROPY_CONFIG_INIT};
    HR_TRY(check_common(function, &args, config, exec));
    HR_TRY(hr_check_logits(function, "logits", logits, rows, classes, args.config.dtype));
    args.logits = *logits;
    HR_TRY(hr_check_logit_grad(function, grad, args.config.grad_dtype, "logits", logits,
                               args.config.dtype, rows, classes));
    args.grad = *grad;
    HR_TRY(hr_check_dloss(function, dloss, dloss_stride, rows));
    HR_TRY(hr_check_vector(function, "factors", factors, HR_F32));
    HR_TRY(hr_check_given(function, "lse", lse, rows));
    HR_TRY(hr_check_vector(function, "lse_low", lse_low, HR_F32));
    HR_TRY(ce_check_targets(function, "target", &args, exec));
    if (exec->device == HR_CPU)
        return cross_entropy_backward_cpu(&args);
    HR_RETURN_CUDA(cross_entropy_backward_cuda(&args, exec), exec);
}

static hr_status check_workspace(const char *function, cross_entropy_args *args)
{
    void *const workspace = args->config.workspace;
    const size_t bytes = args->config.workspace_bytes;
    HR_TRY(hr_check_vector(function, "config->workspace", workspace, HR_F64));
    HR_REQUIRE(!workspace || bytes >= HR_CROSS_ENTROPY_WORKSPACE,
               "%s: config->workspace_bytes is %zu, wanted %d", function, bytes,
               HR_CROSS_ENTROPY_WORKSPACE);
    args->parts = (ce_totals *)workspace;
    return HR_OK;
}

hr_status hr_cross_entropy_reduce(float *result, float *factors, const float *loss,
                                  const float *lse, const void *target, const float *weight,
                                  int64_t rows, int64_t classes,
                                  const hr_cross_entropy_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_cross_entropy_reduce";
    cross_entropy_args args = {.target = target,
                               .weight = weight,
                               .loss = result ? (float *)(uintptr_t)loss : NULL,
                               .lse = (float *)(uintptr_t)lse,
                               .result = result,
                               .new_factors = factors,
                               .rows = rows,
                               .classes = classes,
                               .all = classes,
                               .config = HR_CROSS_ENTROPY_CONFIG_INIT};
    HR_TRY(check_common(function, &args, config, exec));
    HR_REQUIRE(result || factors, "%s: result and factors are NULL, so there is nothing to do",
               function);
    HR_TRY(hr_check_vector(function, "result", result, HR_F32));
    HR_TRY(hr_check_vector(function, "factors", factors, HR_F32));
    HR_TRY(hr_check_given(function, "loss", loss, result ? rows : 0));
    HR_TRY(hr_check_given(function, "lse", lse, result && args.config.z_loss != 0 ? rows : 0));
    HR_TRY(check_workspace(function, &args));
    HR_TRY(ce_check_targets(function, "target", &args, exec));
    if (exec->device == HR_CPU)
        return cross_entropy_reduce_cpu(&args);
    HR_RETURN_CUDA(cross_entropy_reduce_cuda(&args, exec), exec);
}
