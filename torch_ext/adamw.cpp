// adamw.cpp: headroom::adamw_, and the form of it that an optimizer repeats every step.
//
// Reading a tensor through the dispatcher costs more than updating a small one. The states of an
// optimizer rarely move, so _adamw_states() writes their addresses down once and _adamw_cached_()
// takes them from there; parameters and gradients are read afresh every time.
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

void run(const Lists &lists, const Options &options, const View &like)
{
    const hr_adamw_config config = config_of(options, like);
    const hr_tensor_list params = lists.params.view(), grads = lists.grads.view();
    const hr_tensor_list exp_avgs = lists.exp_avgs.view(), exp_avg_sqs = lists.exp_avg_sqs.view();
    const hr_tensor_list maxima = lists.max_exp_avg_sqs.view(), steps = lists.steps.view();
    const Exec exec(like);
    check(hr_adamw(&params, &exp_avgs, &exp_avg_sqs, options.amsgrad ? &maxima : nullptr, &steps,
                   &grads, &config, &exec.exec));
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
    run(lists, options, first);
    staging.write_back();
}

// The rows of the table that _adamw_states() writes, int64 [ROWS, count].
enum Row { EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, NUMEL, SHAPE, STATE_DTYPE, STEP_DTYPE, ROWS };

// Tells shapes and devices apart: a polynomial in the sizes.
int64_t shape_of(const View &view)
{
    uint64_t shape = static_cast<uint64_t>(view.device_type * 1024 + view.device_index);
    for (int64_t d = 0; d < view.dim; d++)
        shape = shape * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(view.sizes[d]) + 1;
    return static_cast<int64_t>(shape);
}

Tensor adamw_states(const Tensors &exp_avgs, const Tensors &exp_avg_sqs,
                    const Tensors &max_exp_avg_sqs, const Tensors &state_steps)
{
    const size_t count = exp_avgs.size();
    check_count(exp_avg_sqs, "exp_avg_sqs", count);
    check_count(max_exp_avg_sqs, "max_exp_avg_sqs", max_exp_avg_sqs.empty() ? 0 : count);
    check_count(state_steps, "state_steps", count);
    const std::vector<int64_t> shape{ROWS, static_cast<int64_t>(count)};
    Tensor table =
        torch::stable::empty({shape.data(), shape.size()}, torch::headeronly::ScalarType::Long);
    auto *const out = static_cast<int64_t *>(table.mutable_data_ptr());
    for (size_t k = 0; k < count; k++) {
        const View like(exp_avgs[k]), step(state_steps[k]);
        const auto add = [&](const Tensor &tensor, Row row) {
            const View view(tensor);
            check_like(view, like, View(exp_avgs[0]), "states", k);
            if (!view.is_contiguous() || view.torch_dtype != like.torch_dtype)
                fail(entry("states", k) + " must be contiguous and of one dtype");
            out[row * count + k] = reinterpret_cast<int64_t>(view.data);
        };
        add(exp_avgs[k], EXP_AVG);
        add(exp_avg_sqs[k], EXP_AVG_SQ);
        if (!max_exp_avg_sqs.empty())
            add(max_exp_avg_sqs[k], MAX_EXP_AVG_SQ);
        if (step.numel() != 1 || !step.is_with(like))
            fail(entry("state_steps", k) + " must have one element, on the device of the states");
        out[STEP * count + k] = reinterpret_cast<int64_t>(step.data);
        out[NUMEL * count + k] = like.numel();
        out[SHAPE * count + k] = shape_of(like);
        out[STATE_DTYPE * count + k] = dtype_of(like.torch_dtype);
        out[STEP_DTYPE * count + k] = dtype_of(step.torch_dtype);
    }
    return table;
}

void fill(List &list, const int64_t *table, size_t count, Row data, Row dtype)
{
    const auto *const addresses = reinterpret_cast<void *const *>(table + data * count);
    list.data.assign(addresses, addresses + count);
    list.dtype.resize(count);
    for (size_t k = 0; k < count; k++)
        list.dtype[k] = static_cast<hr_dtype>(table[dtype * count + k]);
    if (data == STEP)
        list.numel.assign(count, 1);
    else
        list.numel.assign(table + NUMEL * count, table + (NUMEL + 1) * count);
}

void adamw_cached_(const Tensors &params, const Tensors &grads, const Tensor &states, double lr,
                   double beta1, double beta2, double weight_decay, double eps, bool amsgrad,
                   bool maximize, bool decoupled, const OptionalTensor &lr_tensor,
                   const OptionalTensor &grad_scale, const OptionalTensor &found_inf,
                   const OptionalTensor &clip_coef)
{
    const size_t count = params.size();
    if (count == 0)
        return;
    check_count(grads, "grads", count);
    if (states.dim() != 2 || states.size(0) != ROWS ||
        states.size(1) != static_cast<int64_t>(count))
        fail("states is not the table of these parameters");
    const auto *const table = static_cast<const int64_t *>(states.const_data_ptr());
    Lists lists;
    fill(lists.exp_avgs, table, count, EXP_AVG, STATE_DTYPE);
    fill(lists.exp_avg_sqs, table, count, EXP_AVG_SQ, STATE_DTYPE);
    if (amsgrad)
        fill(lists.max_exp_avg_sqs, table, count, MAX_EXP_AVG_SQ, STATE_DTYPE);
    fill(lists.steps, table, count, STEP, STEP_DTYPE);
    lists.params.reserve(count);
    lists.grads.reserve(count);
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        const View param(params[k]), grad(grads[k]);
        if (shape_of(param) != table[SHAPE * count + k] || !param.is_contiguous())
            fail("stale states: " + entry("params", k) +
                 " has another shape, layout or device than they");
        check_like(param, param, first, "params", k);
        check_like(grad, param, first, "grads", k);
        std::optional<Layout> layout;
        if (!grad.is_contiguous())
            layout.emplace(param, "params", k);
        lists.params.add(param, "params", k);
        staging.add(lists.grads, grad, layout ? &*layout : nullptr, "grads", k, false);
    }
    const Options options{lr,       beta1,     beta2,     weight_decay, eps,       amsgrad,
                          maximize, decoupled, lr_tensor, grad_scale,   found_inf, clip_coef};
    run(lists, options, first);
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
    m.def("_adamw_states(Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, "
          "Tensor[] state_steps) -> Tensor");
    m.def("_adamw_cached_(Tensor(a!)[] params, Tensor[] grads, Tensor states, " OPTIONS);
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CPU, m)
{
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("_adamw_states", TORCH_BOX(&adamw_states));
    m.impl("_adamw_cached_", TORCH_BOX(&adamw_cached_));
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CUDA, m)
{
    m.impl("adamw_", TORCH_BOX(&adamw_));
    m.impl("_adamw_states", TORCH_BOX(&adamw_states));
    m.impl("_adamw_cached_", TORCH_BOX(&adamw_cached_));
}
