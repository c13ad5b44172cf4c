/* muon_update.c: hr_muon_update: checks, then the kernel of the device. */
#include "kernels/optim/muon_update.h"

#include <inttypes.h>

#include "capi/check/muon_checks.h"
#include "capi/check/step.h"
#include "capi/check/weights_checks.h"

static const char function[] = "hr_muon_update";

static hr_status check_config(const hr_muon_update_config *c, const muon_update_args *a)
{
    HR_TRY(step_check_config(function, "config->", &c->step, a->steps != NULL));
    HR_REQUIRE(!c->step.skip_nonfinite, "%s: config->step.skip_nonfinite is 1, wanted 0", function);
    HR_REQUIRE(isfinite(c->weight_decay) && c->weight_decay >= 0,
               "%s: weight_decay is %g, wanted a finite number >= 0", function, c->weight_decay);
    HR_REQUIRE(!a->row_vars || (c->beta2 >= 0 && c->beta2 < 1), "%s: beta2 is %g, wanted [0, 1)",
               function, c->beta2);
    return HR_OK;
}

static hr_status check_lists(const muon_update_args *a)
{
    HR_REQUIRE(a->params, "%s: params is NULL", function);
    const int64_t count = a->params->count;
    HR_TRY(hr_check_list(function, "params", a->params, count, NULL, HR_FLOATS));
    const int64_t *const numel = a->params->numel;
    HR_TRY(hr_check_list(function, "updates", a->updates, count, numel, HR_FLOATS));
    HR_TRY(muon_check_matrices(function, a->matrices, count, numel));
    if (a->row_vars)
        HR_TRY(hr_check_list(function, "row_vars", a->row_vars, count, NULL, HR_BIT(HR_F32)));
    for (int64_t k = 0; a->row_vars && k < count; k++)
        HR_REQUIRE(a->row_vars->numel[k] == a->matrices[k].rows,
                   "%s: row_vars[%" PRId64 "] has numel %" PRId64 ", wanted %" PRId64, function, k,
                   a->row_vars->numel[k], a->matrices[k].rows);
    for (int64_t k = 0; a->scales && k < count; k++)
        HR_REQUIRE(isfinite(a->scales[k]) && a->scales[k] >= 0,
                   "%s: scales[%" PRId64 "] is %g, wanted a finite number >= 0", function, k,
                   a->scales[k]);
    HR_TRY(step_check_steps(function, a->steps, count));
    return weights_check(function, a->config->step.weights, a->params);
}

hr_status hr_muon_update(const hr_tensor_list *params, const hr_tensor_list *row_vars,
                         const hr_tensor_list *steps, const hr_tensor_list *updates,
                         const hr_muon_matrix *matrices, const double *scales,
                         const hr_muon_update_config *config, void *workspace,
                         size_t workspace_bytes, const hr_exec *exec)
{
    hr_muon_update_config own = HR_MUON_UPDATE_CONFIG_INIT;
    hr_weights own_weights = HR_WEIGHTS_INIT;
    const muon_update_args args = {params,   row_vars, steps, updates,
                                   matrices, scales,   &own,  (double *)workspace};
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", &own, sizeof own, config, sizeof own,
                          "HR_MUON_UPDATE_CONFIG_INIT"));
    HR_TRY(check_config(&own, &args));
    HR_TRY(weights_copy(function, &own_weights, &own.step.weights));
    HR_TRY(hr_check_exec(function, exec));
    HR_TRY(check_lists(&args));
    if (row_vars)
        HR_TRY(muon_check_workspace(function, muon_workspace_bytes(matrices, params->count),
                                    workspace, workspace_bytes));
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_values(function, &own.step, steps));
        return muon_update_cpu(&args);
    }
    HR_RETURN_CUDA(muon_update_cuda(&args, exec), exec);
}
