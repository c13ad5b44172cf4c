// adamw.cpp: registers headroom::adamw_, and headroom::_adamw_table_, the fast path that takes a
// table of addresses (describe.cpp) instead of lists of tensors.
#include "torch_ext/core/members.h"
#include "torch_ext/optim/adamw_options.h"
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

struct Lists {
    List params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, residuals, steps;
};

struct Views {
    hr_tensor_list params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, residuals, steps;
};

void run(const Views &lists, const Options &options, const WeightOptions &weight_options,
         const View &like)
{
    const Weights weights(weight_options, lists.residuals, static_cast<size_t>(lists.params.count),
                          like);
    hr_adamw_config config = config_of(options, like);
    config.step.weights = weights.get();
    const Exec exec(like);
    check(hr_adamw(&lists.params, &lists.exp_avgs, &lists.exp_avg_sqs,
                   options.amsgrad ? &lists.max_exp_avg_sqs : nullptr, &lists.steps, &lists.grads,
                   &config, &exec.exec));
}

void adamw_(const Tensors &params, const Tensors &grads, const Tensors &exp_avgs,
            const Tensors &exp_avg_sqs, const Tensors &max_exp_avg_sqs, const Tensors &state_steps,
            const Tensors &residuals, double lr, double beta1, double beta2, double weight_decay,
            double eps, bool amsgrad, bool maximize, bool decoupled,
            const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
            const OptionalTensor &found_inf, const OptionalTensor &clip_coef, bool skip_nonfinite,
            int64_t weights_mode, const Integers &weight_seeds, const Integers &places,
            const OptionalTensor &stalled)
{
    const size_t count = params.size();
    check_count(grads, "grads", count);
    check_count(exp_avgs, "exp_avgs", count);
    check_count(exp_avg_sqs, "exp_avg_sqs", count);
    check_count(max_exp_avg_sqs, "max_exp_avg_sqs", amsgrad ? count : 0);
    check_count(state_steps, "state_steps", count);
    check_count(residuals, "residuals", residuals.empty() ? 0 : count);
    if (count == 0)
        return;
    Lists lists;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        std::vector<Member> members{{View(params[k]), lists.params, "params", true},
                                    {View(grads[k]), lists.grads, "grads", false},
                                    {View(exp_avgs[k]), lists.exp_avgs, "exp_avgs", true},
                                    {View(exp_avg_sqs[k]), lists.exp_avg_sqs, "exp_avg_sqs", true}};
        if (amsgrad)
            members.push_back(
                {View(max_exp_avg_sqs[k]), lists.max_exp_avg_sqs, "max_exp_avg_sqs", true});
        if (!residuals.empty())
            members.push_back({View(residuals[k]), lists.residuals, "residuals", true});
        add_members(members, first, staging, k);
        add_step(lists.steps, state_steps[k], first, k);
    }
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    const Options options{step, beta1, beta2, weight_decay, eps, amsgrad, decoupled};
    run({lists.params.view(), lists.grads.view(), lists.exp_avgs.view(), lists.exp_avg_sqs.view(),
         lists.max_exp_avg_sqs.view(), lists.residuals.view(), lists.steps.view()},
        options, {weights_mode, weight_seeds, places, stalled}, first);
    staging.write_back();
}

// The table holds params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad, residuals if
// the mode has them, steps.
void adamw_table_(const Tensor &first, const Tensor &table, double lr, double beta1, double beta2,
                  double weight_decay, double eps, bool amsgrad, bool maximize, bool decoupled,
                  const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
                  const OptionalTensor &found_inf, const OptionalTensor &clip_coef,
                  bool skip_nonfinite, int64_t weights_mode, const Integers &weight_seeds,
                  const Integers &places, const OptionalTensor &stalled)
{
    const int64_t lists = 5 + amsgrad + has_residuals(weights_mode);
    check_table(table, lists);
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    const Options options{step, beta1, beta2, weight_decay, eps, amsgrad, decoupled};
    const hr_tensor_list none = {};
    run({list_of(table, 0), list_of(table, 1), list_of(table, 2), list_of(table, 3),
         amsgrad ? list_of(table, 4) : none,
         has_residuals(weights_mode) ? list_of(table, lists - 2) : none, list_of(table, lists - 1)},
        options, {weights_mode, weight_seeds, places, stalled}, View(first));
}

#define OPTIONS                                                                            \
    "*, float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, " \
    "bool maximize, bool decoupled, Tensor? lr_tensor=None, Tensor? grad_scale=None, "     \
    "Tensor? found_inf=None, Tensor? clip_coef=None, bool "                                \
    "skip_nonfinite=False, " HR_WEIGHT_OPTIONS ") -> ()"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
          "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] state_steps, "
          "Tensor(f!)[] residuals, " OPTIONS);
    m.def("_adamw_table_(Tensor(a!) first, Tensor table, " OPTIONS);
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("_adamw_table_", TORCH_BOX(&adamw_table_));
}
