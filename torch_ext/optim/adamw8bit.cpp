// adamw8bit.cpp: registers headroom::adamw8bit_, and headroom::_adamw8bit_table_, the fast path
// that takes a table of addresses (describe.cpp) instead of lists of tensors.
//
// The codes of a moment have the parameter's shape. Blocks are counted in the parameter's memory
// order.
#include "torch_ext/core/members.h"
#include "torch_ext/optim/adamw_options.h"
#include "torch_ext/optim/codes.h"
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

struct Lists {
    List params, grads, exp_avgs, exp_avg_absmaxs, exp_avg_sqs, exp_avg_sq_absmaxs, residuals,
        steps;
};

struct Views {
    hr_tensor_list params, grads, exp_avgs, exp_avg_sqs, residuals, exp_avg_absmaxs,
        exp_avg_sq_absmaxs, steps;
};

struct Options8bit {
    Options adamw;
    int64_t block_size;
    bool bnb_exact;
    const Integers &seeds;
};

void run(const Views &lists, const Options8bit &options, const WeightOptions &weight_options,
         const View &like)
{
    const Weights weights(weight_options, lists.residuals, static_cast<size_t>(lists.params.count),
                          like);
    hr_adamw8bit_config config = HR_ADAMW8BIT_CONFIG_INIT;
    config.adamw = config_of(options.adamw, like);
    config.adamw.step.weights = weights.get();
    config.block_size = static_cast<int32_t>(options.block_size);
    if (config.block_size != options.block_size)
        fail("block_size is " + std::to_string(options.block_size) +
             ", wanted 64, 128, 256 or 512");
    config.bnb_exact = options.bnb_exact;
    if (options.seeds) {
        check_count(*options.seeds, "seeds", static_cast<size_t>(lists.params.count));
        config.seeds = reinterpret_cast<const uint64_t *>(options.seeds->data());
    }
    const Exec exec(like);
    check(hr_adamw8bit(&lists.params, &lists.exp_avgs, &lists.exp_avg_absmaxs, &lists.exp_avg_sqs,
                       &lists.exp_avg_sq_absmaxs, &lists.steps, &lists.grads, &config, &exec.exec));
}

void adamw8bit_(const Tensors &params, const Tensors &grads, const Tensors &exp_avgs,
                const Tensors &exp_avg_absmaxs, const Tensors &exp_avg_sqs,
                const Tensors &exp_avg_sq_absmaxs, const Tensors &state_steps,
                const Tensors &residuals, double lr, double beta1, double beta2,
                double weight_decay, double eps, bool maximize, bool decoupled, int64_t block_size,
                bool skip_nonfinite, bool bnb_exact, const Integers &seeds,
                const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
                const OptionalTensor &found_inf, const OptionalTensor &clip_coef,
                int64_t weights_mode, const Integers &weight_seeds, const Integers &places,
                const OptionalTensor &stalled)
{
    const size_t count = params.size();
    check_count(grads, "grads", count);
    check_count(exp_avgs, "exp_avgs", count);
    check_count(exp_avg_absmaxs, "exp_avg_absmaxs", count);
    check_count(exp_avg_sqs, "exp_avg_sqs", count);
    check_count(exp_avg_sq_absmaxs, "exp_avg_sq_absmaxs", count);
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
        check_codes(members[2].view, "exp_avgs", k);
        check_codes(members[3].view, "exp_avg_sqs", k);
        if (!residuals.empty())
            members.push_back({View(residuals[k]), lists.residuals, "residuals", true});
        add_members(members, first, staging, k);
        add_absmax(lists.exp_avg_absmaxs, exp_avg_absmaxs[k], first, "exp_avg_absmaxs", k);
        add_absmax(lists.exp_avg_sq_absmaxs, exp_avg_sq_absmaxs[k], first, "exp_avg_sq_absmaxs", k);
        add_step(lists.steps, state_steps[k], first, k);
    }
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    const Options8bit options{
        {step, beta1, beta2, weight_decay, eps, false, decoupled}, block_size, bnb_exact, seeds};
    run({lists.params.view(), lists.grads.view(), lists.exp_avgs.view(), lists.exp_avg_sqs.view(),
         lists.residuals.view(), lists.exp_avg_absmaxs.view(), lists.exp_avg_sq_absmaxs.view(),
         lists.steps.view()},
        options, {weights_mode, weight_seeds, places, stalled}, first);
    staging.write_back();
}

// The table holds params, grads, exp_avgs, exp_avg_sqs, residuals if the mode has them,
// exp_avg_absmaxs, exp_avg_sq_absmaxs, steps.
void adamw8bit_table_(const Tensor &first, const Tensor &table, double lr, double beta1,
                      double beta2, double weight_decay, double eps, bool maximize, bool decoupled,
                      int64_t block_size, bool skip_nonfinite, bool bnb_exact,
                      const Integers &seeds, const OptionalTensor &lr_tensor,
                      const OptionalTensor &grad_scale, const OptionalTensor &found_inf,
                      const OptionalTensor &clip_coef, int64_t weights_mode,
                      const Integers &weight_seeds, const Integers &places,
                      const OptionalTensor &stalled)
{
    const int64_t more = has_residuals(weights_mode);
    check_table(table, 7 + more);
    const StepOptions step{lr,         maximize,  skip_nonfinite, lr_tensor,
                           grad_scale, found_inf, clip_coef};
    const Options8bit options{
        {step, beta1, beta2, weight_decay, eps, false, decoupled}, block_size, bnb_exact, seeds};
    run({list_of(table, 0), list_of(table, 1), list_of(table, 2), list_of(table, 3),
         more ? list_of(table, 4) : hr_tensor_list{}, list_of(table, 4 + more),
         list_of(table, 5 + more), list_of(table, 6 + more)},
        options, {weights_mode, weight_seeds, places, stalled}, View(first));
}

#define OPTIONS                                                                                    \
    "*, float lr, float beta1, float beta2, float weight_decay, float eps, bool maximize, "        \
    "bool decoupled, int block_size=256, bool skip_nonfinite=False, bool bnb_exact=False, "        \
    "int[]? seeds=None, Tensor? lr_tensor=None, Tensor? grad_scale=None, Tensor? found_inf=None, " \
    "Tensor? clip_coef=None, " HR_WEIGHT_OPTIONS ") -> ()"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("adamw8bit_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
          "Tensor(c!)[] exp_avg_absmaxs, Tensor(d!)[] exp_avg_sqs, "
          "Tensor(e!)[] exp_avg_sq_absmaxs, Tensor(f!)[] state_steps, "
          "Tensor(g!)[] residuals, " OPTIONS);
    m.def("_adamw8bit_table_(Tensor(a!) first, Tensor table, " OPTIONS);
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("adamw8bit_", TORCH_BOX(&adamw8bit_));
    m.impl("_adamw8bit_table_", TORCH_BOX(&adamw8bit_table_));
}
