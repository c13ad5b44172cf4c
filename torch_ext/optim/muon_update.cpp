// muon_update.cpp: registers headroom::muon_update_.
#include "torch_ext/core/step.h"
#include "torch_ext/optim/muon.h"
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

void add_row_var(List &list, const Tensor &tensor, const View &first, size_t k)
{
    const View view(tensor);
    check_device(view, first, "row_vars", k);
    if (dtype_of(view.torch_dtype) != HR_F32 || !view.is_contiguous())
        fail(entry("row_vars", k) + " must be float32 and contiguous");
    list.add(view, "row_vars", k);
}

void muon_update_(const Tensors &params, const Tensors &updates, const Tensors &row_vars,
                  const Tensors &state_steps, const Tensors &residuals, double lr,
                  double weight_decay, double beta2, const std::vector<double> &scales,
                  const OptionalTensor &lr_tensor, const OptionalTensor &found_inf,
                  int64_t weights_mode, const Integers &weight_seeds, const Integers &places,
                  const OptionalTensor &stalled)
{
    const size_t count = params.size();
    check_count(updates, "updates", count);
    check_count(row_vars, "row_vars", row_vars.empty() ? 0 : count);
    check_count(state_steps, "state_steps", state_steps.empty() ? 0 : count);
    check_count(residuals, "residuals", residuals.empty() ? 0 : count);
    check_count(scales, "scales", count);
    if (count == 0)
        return;
    List all_params, all_updates, all_row_vars, all_residuals, steps;
    Matrices matrices;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        const View param(params[k]);
        check_like(param, param, first, "params", k);
        add_row_major(all_params, param, staging, "params", k, true);
        add_update(all_updates, matrices, updates[k], param, first, "params", k);
        if (!residuals.empty()) {
            const View residual(residuals[k]);
            check_like(residual, param, first, "residuals", k);
            add_row_major(all_residuals, residual, staging, "residuals", k, true);
        }
        if (!row_vars.empty())
            add_row_var(all_row_vars, row_vars[k], first, k);
        if (!state_steps.empty())
            add_step(steps, state_steps[k], first, k);
    }
    const OptionalTensor none;
    const Weights weights({weights_mode, weight_seeds, places, stalled}, all_residuals.view(),
                          count, first);
    hr_muon_update_config config = HR_MUON_UPDATE_CONFIG_INIT;
    set_step(config.step, {lr, false, false, lr_tensor, none, found_inf, none}, first);
    config.step.t = 1; // where there are no counters
    config.step.weights = weights.get();
    config.weight_decay = weight_decay;
    config.beta2 = beta2;
    size_t bytes = 0;
    Tensor workspace;
    if (!row_vars.empty())
        workspace = muon_workspace(matrices, params[0], &bytes);
    const hr_tensor_list views[] = {all_params.view(), all_row_vars.view(), steps.view(),
                                    all_updates.view()};
    const Exec exec(first);
    check(hr_muon_update(
        &views[0], row_vars.empty() ? nullptr : &views[1],
        state_steps.empty() ? nullptr : &views[2], &views[3], matrices.data(), scales.data(),
        &config, row_vars.empty() ? nullptr : workspace.mutable_data_ptr(), bytes, &exec.exec));
    staging.write_back();
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("muon_update_(Tensor(a!)[] params, Tensor[] updates, Tensor(b!)[] row_vars, "
          "Tensor(c!)[] state_steps, Tensor(d!)[] residuals, *, float lr, float weight_decay, "
          "float beta2, float[] scales, Tensor? lr_tensor=None, "
          "Tensor? found_inf=None, " HR_WEIGHT_OPTIONS ") -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("muon_update_", TORCH_BOX(&muon_update_));
}
