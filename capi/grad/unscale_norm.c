/* unscale_norm.c: hr_unscale_norm and the size of its workspace: checks, then the kernel of the
 * device. */
#include "kernels/grad/unscale_norm.h"

#include <inttypes.h>
#include <math.h>

#include "capi/check/step.h"

static hr_status check_config(hr_unscale_norm_config *own, const hr_unscale_norm_config *config)
{
    HR_REQUIRE(config, "hr_unscale_norm: config is NULL");
    HR_TRY(hr_copy_config("hr_unscale_norm", "config->", own, sizeof *own, config,
                          offsetof(hr_unscale_norm_config, p), "HR_UNSCALE_NORM_CONFIG_INIT"));
    HR_REQUIRE(own->p > 0, "hr_unscale_norm: p is %g, wanted > 0", own->p);
    HR_REQUIRE(own->max_norm >= 0, "hr_unscale_norm: max_norm is %g, wanted >= 0", own->max_norm);
    HR_TRY(hr_check_scalar("hr_unscale_norm", "grad_scale", own->grad_scale, HR_F32));
    HR_TRY(hr_check_scalar("hr_unscale_norm", "clip_coef", own->clip_coef, HR_F32));
    return HR_OK;
}

static size_t workspace_bytes_of(const hr_tensor_list *grads)
{
    /* A sum and the first chunk per tensor, a sum per chunk, and one that no tensor needs. */
    return 8 * (size_t)(2 * grads->count + norm_chunks_of_list(grads) + 1);
}

/* Whether every result is finite is asked of the largest magnitude, which is quicker to find than a
 * sum. */
static norm_order order_of(double p, const hr_unscale_norm_result *result)
{
    const int measures = result && (result->norm || result->norms || result->clip_coef);
    return !measures  ? NORM_INF
           : p == 2.0 ? NORM_2
           : p == 1.0 ? NORM_1
           : isinf(p) ? NORM_INF
                      : NORM_P;
}

/* Checks a list that may not have its addresses and types yet. */
static hr_status check_sizes(const hr_tensor_list *grads)
{
    HR_REQUIRE(grads, "hr_unscale_norm_workspace: grads is NULL");
    HR_REQUIRE(grads->count >= 0,
               "hr_unscale_norm_workspace: grads->count is %" PRId64 ", wanted 0 or more",
               grads->count);
    HR_REQUIRE(grads->count == 0 || grads->numel,
               "hr_unscale_norm_workspace: grads->numel is NULL");
    int64_t total = 0;
    for (int64_t k = 0; k < grads->count; k++) {
        const int64_t n = grads->numel[k];
        HR_REQUIRE(n >= 0,
                   "hr_unscale_norm_workspace: grads[%" PRId64 "] has numel %" PRId64
                   ", wanted 0 or more",
                   k, n);
        HR_REQUIRE(n <= INT64_MAX / 16 - total,
                   "hr_unscale_norm_workspace: grads has more than 2^59 elements");
        total += n;
    }
    return HR_OK;
}

hr_status hr_unscale_norm_workspace(size_t *bytes, const hr_tensor_list *grads)
{
    HR_REQUIRE(bytes, "hr_unscale_norm_workspace: bytes is NULL");
    HR_TRY(hr_check_scalar("hr_unscale_norm_workspace", "bytes", bytes, HR_F64));
    HR_TRY(check_sizes(grads));
    *bytes = workspace_bytes_of(grads);
    return HR_OK;
}

hr_status hr_unscale_norm(const hr_tensor_list *grads, const hr_unscale_norm_result *result,
                          const hr_unscale_norm_config *config, void *workspace,
                          size_t workspace_bytes, const hr_exec *exec)
{
    hr_unscale_norm_config own = HR_UNSCALE_NORM_CONFIG_INIT;
    HR_TRY(check_config(&own, config));
    HR_TRY(hr_check_exec("hr_unscale_norm", exec));
    HR_REQUIRE(grads, "hr_unscale_norm: grads is NULL");
    HR_TRY(hr_check_list("hr_unscale_norm", "grads", grads, grads->count, NULL, HR_FLOATS));
    HR_REQUIRE(result || own.write,
               "hr_unscale_norm: result is NULL and config->write is 0, so there is nothing to do");
    HR_REQUIRE(!result || (workspace && (uintptr_t)workspace % 8 == 0),
               "hr_unscale_norm: workspace is at %p, wanted a multiple of 8 bytes", workspace);
    HR_REQUIRE(!result || workspace_bytes >= workspace_bytes_of(grads),
               "hr_unscale_norm: workspace_bytes is %zu, wanted %zu", workspace_bytes,
               workspace_bytes_of(grads));
    if (result) {
        HR_TRY(hr_check_scalar("hr_unscale_norm", "result->norm", result->norm, HR_F32));
        HR_TRY(hr_check_scalar("hr_unscale_norm", "result->norms", result->norms, HR_F32));
        HR_TRY(hr_check_scalar("hr_unscale_norm", "result->found_inf", result->found_inf, HR_F32));
        HR_TRY(hr_check_scalar("hr_unscale_norm", "result->culprit", result->culprit, HR_F64));
        HR_TRY(hr_check_scalar("hr_unscale_norm", "result->clip_coef", result->clip_coef, HR_F32));
    }
    const unscale_norm_args args = {grads, result, &own, order_of(own.p, result),
                                    result ? workspace : NULL};
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_grad_scale("hr_unscale_norm", own.grad_scale));
        return unscale_norm_cpu(&args);
    }
    HR_RETURN_CUDA(unscale_norm_cuda(&args, exec), exec);
}
