/* muon_momentum.c: hr_muon_momentum, and the size of the workspace of both passes of Muon: checks,
 * then the kernel of the device. */
#include "kernels/optim/muon_momentum.h"

#include <inttypes.h>

#include "capi/check/muon_checks.h"
#include "capi/check/quant.h"
#include "capi/check/rows.h"
#include "capi/check/step.h"

static hr_status check_config(const hr_muon_momentum_config *c, int has_codes)
{
    HR_TRY(step_check_config("hr_muon_momentum", "config->", &c->step, 0));
    HR_REQUIRE(!c->step.skip_nonfinite,
               "hr_muon_momentum: config->step.skip_nonfinite is 1, wanted 0");
    HR_REQUIRE(isfinite(c->momentum) && c->momentum >= 0,
               "hr_muon_momentum: momentum is %g, wanted a finite number >= 0", c->momentum);
    HR_TRY(hr_check_flag("hr_muon_momentum", "nesterov", c->nesterov));
    const int32_t size = c->block_size;
    HR_REQUIRE(!has_codes || size == 64 || size == 128 || size == 256 || size == 512,
               "hr_muon_momentum: block_size is %" PRId32 ", wanted 64, 128, 256 or 512", size);
    return HR_OK;
}

static hr_status check_lists(const muon_momentum_args *a)
{
    static const char function[] = "hr_muon_momentum";
    HR_REQUIRE(a->updates, "%s: updates is NULL", function);
    const int64_t count = a->updates->count;
    HR_TRY(hr_check_list(function, "updates", a->updates, count, NULL, HR_FLOATS));
    const int64_t *const numel = a->updates->numel;
    HR_TRY(hr_check_list(function, "moments", a->moments, count, numel,
                         a->absmaxs ? HR_BIT(HR_U8) : HR_FLOATS));
    if (a->absmaxs)
        HR_TRY(quant_check_absmaxs(function, "absmaxs", a->absmaxs, a->updates,
                                   a->config->block_size));
    HR_TRY(hr_check_list(function, "grads", a->grads, count, numel, HR_FLOATS));
    HR_TRY(muon_check_matrices(function, a->matrices, count, numel));
    return hr_check_given(function, "squares", a->squares, count);
}

hr_status hr_muon_momentum(const hr_tensor_list *updates, float *squares,
                           const hr_tensor_list *moments, const hr_tensor_list *absmaxs,
                           const hr_tensor_list *grads, const hr_muon_matrix *matrices,
                           const hr_muon_momentum_config *config, void *workspace,
                           size_t workspace_bytes, const hr_exec *exec)
{
    static const char function[] = "hr_muon_momentum";
    hr_muon_momentum_config own = HR_MUON_MOMENTUM_CONFIG_INIT;
    const muon_momentum_args args = {updates, squares,  moments, absmaxs,
                                     grads,   matrices, &own,    (double *)workspace};
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", &own, sizeof own, config, sizeof own,
                          "HR_MUON_MOMENTUM_CONFIG_INIT"));
    HR_TRY(check_config(&own, absmaxs != NULL));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(check_lists(&args));
    HR_TRY(muon_check_workspace(function, muon_workspace_bytes(matrices, updates->count), workspace,
                                workspace_bytes));
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_grad_scale(function, own.step.grad_scale));
        return muon_momentum_cpu(&args);
    }
    HR_RETURN_CUDA(muon_momentum_cuda(&args, exec), exec);
}

hr_status hr_muon_workspace(size_t *bytes, const hr_muon_matrix *matrices, int64_t count)
{
    static const char function[] = "hr_muon_workspace";
    HR_REQUIRE(bytes, "%s: bytes is NULL", function);
    HR_TRY(hr_check_vector(function, "bytes", bytes, HR_F64));
    HR_REQUIRE(count >= 0, "%s: count is %" PRId64 ", wanted 0 or more", function, count);
    HR_TRY(muon_check_matrices(function, matrices, count, NULL));
    *bytes = muon_workspace_bytes(matrices, count);
    return HR_OK;
}
