// momentum.cpp: registers headroom::momentum_, and headroom::_momentum_table_, the fast path that
// takes a table of addresses (describe.cpp) instead of lists of tensors.
//
// Codes have the parameter's shape. Blocks are counted in the parameter's memory order.
#include "torch_ext/core/members.h"
#include "torch_ext/core/step.h"
#include "torch_ext/optim/codes.h"
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

struct Lists {
    List params, grads, moments, absmaxs, residuals, steps;
};

struct Views {
    hr_tensor_list params, grads, moments, absmaxs, residuals, steps;
};

struct Options {
    StepOptions step;
    int64_t rule;
    double momentum, dampening, beta1, beta2, weight_decay;
    bool nesterov;
    int64_t block_size;
};

void run(const Views &lists, const Options &o, const WeightOptions &weight_options,
         const View &like)
{
    const Weights weights(weight_options, lists.residuals, static_cast<size_t>(lists.params.count),
                          like);
    hr_momentum_config config = HR_SGD_CONFIG_INIT;
    set_step(config.step, o.step, like);
    config.step.t = 1; // where there are no counters
    config.step.weights = weights.get();
    config.rule = static_cast<hr_momentum_rule>(o.rule);
    config.nesterov = o.nesterov;
    config.momentum = o.momentum;
    config.dampening = o.dampening;
    config.beta1 = o.beta1;
    config.beta2 = o.beta2;
    config.weight_decay = o.weight_decay;
    config.block_size = static_cast<int32_t>(o.block_size);
    const auto given = [](const hr_tensor_list &list) { return list.count ? &list : nullptr; };
    const Exec exec(like);
    check(hr_momentum(&lists.params, given(lists.moments), given(lists.absmaxs), given(lists.steps),
                      &lists.grads, &config, &exec.exec));
}

void momentum_(const Tensors &params, const Tensors &grads, const Tensors &moments,
               const Tensors &absmaxs, const Tensors &state_steps, const Tensors &residuals,
               int64_t rule, double lr, double momentum, double dampening, double beta1,
               double beta2, double weight_decay, bool nesterov, bool maximize, int64_t block_size,
               bool skip_nonfinite, const OptionalTensor &lr_tensor,
               const OptionalTensor &grad_scale, const OptionalTensor &found_inf,
               const OptionalTensor &clip_coef, int64_t weights_mode, const Integers &weight_seeds,
               const Integers &places, const OptionalTensor &stalled)
{
    const size_t count = params.size();
    check_count(grads, "grads", count);
    check_count(moments, "moments", moments.empty() ? 0 : count);
    check_count(absmaxs, "absmaxs", absmaxs.empty() ? 0 : count);
    check_count(state_steps, "state_steps", state_steps.empty() ? 0 : count);
    check_count(residuals, "residuals", residuals.empty() ? 0 : count);
    if (count == 0)
        return;
    Lists lists;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        std::vector<Member> members{{View(params[k]), lists.params, "params", true},
                                    {View(grads[k]), lists.grads, "grads", false}};
        if (!moments.empty()) {
            members.push_back({View(moments[k]), lists.moments, "moments", true});
            if (!absmaxs.empty())
                check_codes(members.back().view, "moments", k);
        }
        if (!residuals.empty())
            members.push_back({View(residuals[k]), lists.residuals, "residuals", true});
        add_members(members, first, staging, k);
        if (!absmaxs.empty())
            add_absmax(lists.absmaxs, absmaxs[k], first, "absmaxs", k);
        if (!state_steps.empty())
            add_step(lists.steps, state_steps[k], first, k);
    }
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    const Options options{step,  rule,         momentum, dampening, beta1,
                          beta2, weight_decay, nesterov, block_size};
    run({lists.params.view(), lists.grads.view(), lists.moments.view(), lists.absmaxs.view(),
         lists.residuals.view(), lists.steps.view()},
        options, {weights_mode, weight_seeds, places, stalled}, first);
    staging.write_back();
}

// The table holds params, grads, and of moments, residuals, absmaxs and steps those that there are:
// moments unless it is SGD without momentum, residuals if the mode has them, absmaxs if `codes`, and
// steps if `counted`.
void momentum_table_(const Tensor &first, const Tensor &table, bool codes, bool counted,
                     int64_t rule, double lr, double momentum, double dampening, double beta1,
                     double beta2, double weight_decay, bool nesterov, bool maximize,
                     int64_t block_size, bool skip_nonfinite, const OptionalTensor &lr_tensor,
                     const OptionalTensor &grad_scale, const OptionalTensor &found_inf,
                     const OptionalTensor &clip_coef, int64_t weights_mode,
                     const Integers &weight_seeds, const Integers &places,
                     const OptionalTensor &stalled)
{
    const bool has_moments = rule != HR_SGD || momentum != 0,
               has_rest = has_residuals(weights_mode);
    check_table(table, 2 + has_moments + has_rest + codes + counted);
    int64_t row = 2;
    const auto next = [&](bool there) { return there ? list_of(table, row++) : hr_tensor_list{}; };
    Views lists{list_of(table, 0), list_of(table, 1), {}, {}, {}, {}};
    lists.moments = next(has_moments);
    lists.residuals = next(has_rest);
    lists.absmaxs = next(codes);
    lists.steps = next(counted);
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    run(lists, {step, rule, momentum, dampening, beta1, beta2, weight_decay, nesterov, block_size},
        {weights_mode, weight_seeds, places, stalled}, View(first));
}

#define OPTIONS                                                                       \
    "int rule, float lr, float momentum, float dampening, float beta1, float beta2, " \
    "float weight_decay, bool nesterov, bool maximize, int block_size=256, "          \
    "bool skip_nonfinite=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, "    \
    "Tensor? found_inf=None, Tensor? clip_coef=None, " HR_WEIGHT_OPTIONS ") -> ()"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("momentum_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] moments, "
          "Tensor(c!)[] absmaxs, Tensor(d!)[] state_steps, Tensor(e!)[] residuals, *, " OPTIONS);
    m.def("_momentum_table_(Tensor(a!) first, Tensor table, *, bool codes, bool counted, " OPTIONS);
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("momentum_", TORCH_BOX(&momentum_));
    m.impl("_momentum_table_", TORCH_BOX(&momentum_table_));
}
