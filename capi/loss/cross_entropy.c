#include "kernels/loss/cross_entropy.h"

#include <inttypes.h>
#include <math.h>

#include "capi/check/rows.h"

static hr_status check_config(const char *function, hr_cross_entropy_config *own,
                              const hr_cross_entropy_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_cross_entropy_config, z_loss) + sizeof own->z_loss,
                          "HR_CROSS_ENTROPY_CONFIG_INIT"));
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_TRY(hr_check_float(function, "config->grad_dtype", own->grad_dtype));
    HR_REQUIRE(own->grad_dtype == own->dtype || own->dtype == HR_F32,
               "%s: config->grad_dtype is %s, wanted %s, the type of logits", function,
               hr_dtype_name(own->grad_dtype), hr_dtype_name(own->dtype));
    HR_REQUIRE(own->target_bytes == 4 || own->target_bytes == 8,
               "%s: config->target_bytes is %d, wanted 4 or 8", function, (int)own->target_bytes);
    HR_REQUIRE(own->reduction >= HR_REDUCE_SUM && own->reduction <= HR_REDUCE_MEAN_OR_ZERO,
               "%s: config->reduction is %d, wanted 0, 1 or 2", function, (int)own->reduction);
    HR_REQUIRE(own->label_smoothing >= 0 && own->label_smoothing <= 1,
               "%s: config->label_smoothing is %g, wanted a number from 0 to 1", function,
               own->label_smoothing);
    HR_REQUIRE(own->softcap >= 0 && isfinite((float)own->softcap) &&
                   (own->softcap == 0 || (float)own->softcap > 0),
               "%s: config->softcap is %g, wanted a finite binary32 of 0 or more", function,
               own->softcap);
    HR_REQUIRE(own->z_loss >= 0 && isfinite((float)own->z_loss),
               "%s: config->z_loss is %g, wanted a finite binary32 of 0 or more", function,
               own->z_loss);
    return HR_OK;
}

/* An address that has to be given where there are rows. */
static hr_status check_given(const char *function, const char *name, const void *vector,
                             int64_t rows)
{
    HR_REQUIRE(vector || rows == 0, "%s: %s is NULL", function, name);
    return hr_check_vector(function, name, vector, HR_F32);
}

static hr_status check_targets(const char *function, const cross_entropy_args *a,
                               const hr_exec *exec)
{
    HR_REQUIRE(a->target || a->rows == 0, "%s: target is NULL", function);
    HR_REQUIRE((uintptr_t)a->target % (size_t)a->config.target_bytes == 0,
               "%s: target is at %p, which is not a multiple of %d bytes", function, a->target,
               (int)a->config.target_bytes);
    if (exec->device != HR_CPU)
        return HR_OK; /* they are there, and nobody waits for them */
    for (int64_t row = 0; row < a->rows; row++) {
        const int64_t target = ce_target(a, row);
        HR_REQUIRE(ce_is_class(a, target) || ce_is_ignored(a, target),
                   "%s: target[%" PRId64 "] is %" PRId64 ", wanted a class from 0 to %" PRId64
                   ", or ignore_index, %" PRId64,
                   function, row, target, a->classes - 1, a->config.ignore_index);
    }
    return HR_OK;
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

static hr_status check_logits(const char *function, cross_entropy_args *a, const hr_rows *logits)
{
    HR_REQUIRE(logits, "%s: logits is NULL", function);
    HR_TRY(hr_check_rows(function, "logits", logits, a->rows, a->classes, a->config.dtype));
    a->logits = *logits;
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
    HR_TRY(check_logits(function, &args, logits));
    HR_TRY(check_given(function, "loss", loss, rows));
    HR_TRY(check_given(function, "lse", lse, rows));
    HR_TRY(hr_check_vector(function, "lse_low", lse_low, HR_F32));
    HR_TRY(hr_check_vector(function, "argmax", argmax, HR_F64));
    HR_TRY(check_targets(function, &args, exec));
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
    HR_TRY(check_logits(function, &args, logits));
    const hr_dtype grad_dtype = args.config.grad_dtype;
    HR_REQUIRE(grad, "%s: grad is NULL", function);
    HR_TRY(hr_check_rows(function, "grad", grad, rows, classes, grad_dtype));
    const int64_t ratio = grad_dtype == args.config.dtype ? 1 : 2; /* of the sizes of elements */
    HR_REQUIRE(grad->data != logits->data || rows <= 1 || grad->stride == logits->stride * ratio,
               "%s: grad is written over logits, but grad->stride is %" PRId64 ", wanted %" PRId64,
               function, grad->stride, logits->stride * ratio);
    args.grad = *grad;
    HR_TRY(check_given(function, "dloss", dloss, rows));
    HR_REQUIRE(dloss_stride >= 0 && (rows == 0 || dloss_stride <= (INT64_C(1) << 59) / rows),
               "%s: dloss_stride is %" PRId64 ", wanted 0 or more, and at most 2^59 elements from "
               "the first row to the last",
               function, dloss_stride);
    HR_TRY(hr_check_vector(function, "factors", factors, HR_F32));
    HR_TRY(check_given(function, "lse", lse, rows));
    HR_TRY(hr_check_vector(function, "lse_low", lse_low, HR_F32));
    HR_TRY(check_targets(function, &args, exec));
    if (exec->device == HR_CPU)
        return cross_entropy_backward_cpu(&args);
    HR_RETURN_CUDA(cross_entropy_backward_cuda(&args, exec), exec);
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
    HR_TRY(check_given(function, "loss", loss, result ? rows : 0));
    HR_TRY(check_given(function, "lse", lse, result && args.config.z_loss != 0 ? rows : 0));
    HR_TRY(check_targets(function, &args, exec));
    if (exec->device == HR_CPU)
        return cross_entropy_reduce_cpu(&args);
    HR_RETURN_CUDA(cross_entropy_reduce_cuda(&args, exec), exec);
}
