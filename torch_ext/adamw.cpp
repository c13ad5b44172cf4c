// adamw.cpp: headroom::adamw_, and its form for tensors that are described already (describe.cpp).
#include "layout.h"

namespace
{

using namespace headroom;

struct Options {
    double lr, beta1, beta2, weight_decay, eps;
    bool amsgrad, maximize, decoupled;
    const OptionalTensor &lr_tensor, &grad_scale, &found_inf, &clip_coef;
};

struct Lists {
    List params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

struct Views {
    hr_tensor_list params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
};

hr_adamw_config config_of(const Options &o, const View &like)
{
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.lr = o.lr;
    config.beta1 = o.beta1;
    config.beta2 = o.beta2;
    config.weight_decay = o.weight_decay;
    config.eps = o.eps;
    config.amsgrad = o.amsgrad;
    config.maximize = o.maximize;
    config.decoupled = o.decoupled;
    config.grad_scale = scalar_of(o.grad_scale, like, "grad_scale");
    config.found_inf = scalar_of(o.found_inf, like, "found_inf");
    config.clip_coef = scalar_of(o.clip_coef, like, "clip_coef");
    if (!o.lr_tensor)
        return config;
    const View lr(*o.lr_tensor);
    const int dtype = dtype_of(lr.torch_dtype);
    if (lr.numel() != 1)
        fail("lr_tensor has " + std::to_string(lr.numel()) + " elements, wanted 1");
    if (dtype != HR_F32 && dtype != HR_F64)
        fail("lr_tensor must be float32 or float64");
    config.lr_dtype = static_cast<hr_dtype>(dtype);
    if (lr.is_with(like))
        config.lr_ptr = lr.data;
    else if (lr.is_cpu())
        config.lr = dtype == HR_F64 ? *static_cast<const double *>(lr.data)
                                    : *static_cast<const float *>(lr.data);
    else
        fail("lr_tensor is on " + lr.device_name() + ", but params[0] is on " + like.device_name() +
             "; wanted that device or the CPU");
    return config;
}

void run(const Views &lists, const Options &options, const View &like)
{
    const hr_adamw_config config = config_of(options, like);
    const Exec exec(like);
    check(hr_adamw(&lists.params, &lists.exp_avgs, &lists.exp_avg_sqs,
                   options.amsgrad ? &lists.max_exp_avg_sqs : nullptr, &lists.steps, &lists.grads,
                   &config, &exec.exec));
}

void check_count(const Tensors &list, const char *name, size_t count)
{
    if (list.size() != count)
        fail(std::string(name) + " has " + std::to_string(list.size()) + " tensors, wanted " +
             std::to_string(count));
}

void check_like(const View &view, const View &param, const View &first, const char *name, size_t k)
{
    if (!view.has_sizes_of(param))
        fail(entry(name, k) + " has another shape than " + entry("params", k));
    if (!view.is_with(first))
        fail(entry(name, k) + " is on " + view.device_name() + ", but params[0] is on " +
             first.device_name());
}

void adamw_(const Tensors &params, const Tensors &grads, const Tensors &exp_avgs,
            const Tensors &exp_avg_sqs, const Tensors &max_exp_avg_sqs, const Tensors &state_steps,
            double lr, double beta1, double beta2, double weight_decay, double eps, bool amsgrad,
            bool maximize, bool decoupled, const OptionalTensor &lr_tensor,
            const OptionalTensor &grad_scale, const OptionalTensor &found_inf,
            const OptionalTensor &clip_coef)
{
    const size_t count = params.size();
    if (count == 0)
        return;
    check_count(grads, "grads", count);
    check_count(exp_avgs, "exp_avgs", count);
    check_count(exp_avg_sqs, "exp_avg_sqs", count);
    check_count(max_exp_avg_sqs, "max_exp_avg_sqs", amsgrad ? count : 0);
    check_count(state_steps, "state_steps", count);
    Lists lists;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        struct Member {
            View view;
            List &list;
            const char *name;
            bool written;
        };
        std::vector<Member> members{{View(params[k]), lists.params, "params", true},
                                    {View(grads[k]), lists.grads, "grads", false},
                                    {View(exp_avgs[k]), lists.exp_avgs, "exp_avgs", true},
                                    {View(exp_avg_sqs[k]), lists.exp_avg_sqs, "exp_avg_sqs", true}};
        if (amsgrad)
            members.push_back(
                {View(max_exp_avg_sqs[k]), lists.max_exp_avg_sqs, "max_exp_avg_sqs", true});
        const View &param = members[0].view, step(state_steps[k]);
        bool contiguous = true;
        for (const Member &member : members) {
            check_like(member.view, param, first, member.name, k);
            contiguous = contiguous && member.view.is_contiguous();
        }
        if (!step.is_with(first))
            fail(entry("state_steps", k) + " is on " + step.device_name() +
                 ", but params[0] is on " + first.device_name());
        std::optional<Layout> layout;
        if (!contiguous)
            layout.emplace(param, "params", k);
        for (const Member &member : members)
            staging.add(member.list, member.view, layout ? &*layout : nullptr, member.name, k,
                        member.written);
        lists.steps.add(step, "state_steps", k);
    }
    const Options options{lr,       beta1,     beta2,     weight_decay, eps,       amsgrad,
                          maximize, decoupled, lr_tensor, grad_scale,   found_inf, clip_coef};
    run({lists.params.view(), lists.grads.view(), lists.exp_avgs.view(), lists.exp_avg_sqs.view(),
         lists.max_exp_avg_sqs.view(), lists.steps.view()},
        options, first);
    staging.write_back();
}

// The lists of the table: params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs if amsgrad, steps.
void adamw_table_(const Tensor &first, const Tensor &table, double lr, double beta1, double beta2,
                  double weight_decay, double eps, bool amsgrad, bool maximize, bool decoupled,
                  const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
                  const OptionalTensor &found_inf, const OptionalTensor &clip_coef)
{
    check_table(table, amsgrad ? 6 : 5);
    const Options options{lr,       beta1,     beta2,     weight_decay, eps,       amsgrad,
                          maximize, decoupled, lr_tensor, grad_scale,   found_inf, clip_coef};
    const hr_tensor_list maxima = amsgrad ? list_of(table, 4) : hr_tensor_list{};
    run({list_of(table, 0), list_of(table, 1), list_of(table, 2), list_of(table, 3), maxima,
         list_of(table, amsgrad ? 5 : 4)},
        options, View(first));
}

#define OPTIONS                                                                            \
    "*, float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, " \
    "bool maximize, bool decoupled, Tensor? lr_tensor=None, Tensor? grad_scale=None, "     \
    "Tensor? found_inf=None, Tensor? clip_coef=None) -> ()"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("adamw_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
          "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] "
          "state_steps, " OPTIONS);
    m.def("_adamw_table_(Tensor(a!) first, Tensor table, " OPTIONS);
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CPU, m)
{
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("_adamw_table_", TORCH_BOX(&adamw_table_));
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CUDA, m)
{
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("_adamw_table_", TORCH_BOX(&adamw_table_));
}
