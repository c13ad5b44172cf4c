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

hr_adamw_config config_of(const Options &o, const Tensor &like)
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
    if (o.lr_tensor->numel() != 1)
        fail("lr_tensor has " + std::to_string(o.lr_tensor->numel()) + " elements, wanted 1");
    config.lr_dtype = dtype_of(*o.lr_tensor, "lr_tensor", 0);
    const void *const lr = o.lr_tensor->const_data_ptr();
    if (same_device(*o.lr_tensor, like))
        config.lr_ptr = lr;
    else if (o.lr_tensor->is_cpu() && config.lr_dtype == HR_F64)
        config.lr = *static_cast<const double *>(lr);
    else if (o.lr_tensor->is_cpu() && config.lr_dtype == HR_F32)
        config.lr = *static_cast<const float *>(lr);
    else
        fail("lr_tensor is on " + device_name(*o.lr_tensor) + ", but params[0] is on " +
             device_name(like) + "; wanted that device or the CPU, float32 or float64");
    return config;
}

void run(const Lists &lists, const Options &options, const Tensor &like)
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
        fail(std::string(name) + " has " + std::to_string(list.size()) +
             " tensors, but params has " + std::to_string(count));
}

void check_like(const Tensor &tensor, const Tensor &param, const Tensor &first, const char *name,
                size_t k)
{
    if (!same_sizes(tensor, param))
        fail(entry(name, k) + " has another shape than " + entry("params", k));
    if (!same_device(tensor, first))
        fail(entry(name, k) + " is on " + device_name(tensor) + ", but params[0] is on " +
             device_name(first));
}

// Lays a tensor of parameter k out as its kernel wants it, and remembers which copies to keep alive
// and which to write back.
class Staging
{
  public:
    void add(List &list, const Tensor &tensor, const Layout *layout, const char *name, size_t k,
             bool written)
    {
        if (!layout || layout->matches(tensor)) {
            list.add(tensor, name, k);
            return;
        }
        if (written)
            Layout(tensor, name, k); // fails now, not when the copy is written back
        copies_.push_back(layout->copy_of(tensor));
        list.add(copies_.back(), name, k);
        if (written)
            write_back_.emplace_back(tensor, copies_.size() - 1);
    }

    void write_back()
    {
        for (auto &[tensor, copy] : write_back_)
            torch::stable::copy_(tensor, copies_[copy]);
    }

  private:
    Tensors copies_;
    std::vector<std::pair<Tensor, size_t>> write_back_;
};

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
    for (size_t k = 0; k < count; k++) {
        const Tensor &param = params[k];
        std::vector<const Tensor *> members{&grads[k], &exp_avgs[k], &exp_avg_sqs[k]};
        const char *const names[] = {"grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"};
        if (amsgrad)
            members.push_back(&max_exp_avg_sqs[k]);
        bool contiguous = param.is_contiguous();
        for (size_t i = 0; i < members.size(); i++) {
            check_like(*members[i], param, params[0], names[i], k);
            contiguous = contiguous && members[i]->is_contiguous();
        }
        if (!same_device(param, params[0]) || !same_device(state_steps[k], params[0]))
            fail(entry("params", k) + " and " + entry("state_steps", k) + " are on " +
                 device_name(param) + " and " + device_name(state_steps[k]) +
                 ", but params[0] is on " + device_name(params[0]));
        std::optional<Layout> layout;
        if (!contiguous)
            layout.emplace(param, "params", k);
        const Layout *const order = contiguous ? nullptr : &*layout;
        staging.add(lists.params, param, order, "params", k, true);
        staging.add(lists.grads, grads[k], order, "grads", k, false);
        staging.add(lists.exp_avgs, exp_avgs[k], order, "exp_avgs", k, true);
        staging.add(lists.exp_avg_sqs, exp_avg_sqs[k], order, "exp_avg_sqs", k, true);
        if (amsgrad)
            staging.add(lists.max_exp_avg_sqs, max_exp_avg_sqs[k], order, "max_exp_avg_sqs", k,
                        true);
        lists.steps.add(state_steps[k], "state_steps", k);
    }
    const Options options{lr,       beta1,     beta2,     weight_decay, eps,       amsgrad,
                          maximize, decoupled, lr_tensor, grad_scale,   found_inf, clip_coef};
    run(lists, options, params[0]);
    staging.write_back();
}

// The rows of the table that _adamw_states() writes, int64 [ROWS, count].
enum Row { EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, STEP, NUMEL, SHAPE, STATE_DTYPE, STEP_DTYPE, ROWS };

// Tells shapes of equal size apart: a polynomial in the sizes.
int64_t shape_of(const Tensor &tensor)
{
    uint64_t shape = 0;
    for (const int64_t size : tensor.sizes())
        shape = shape * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(size) + 1;
    return static_cast<int64_t>(shape);
}

Tensor adamw_states(const Tensors &exp_avgs, const Tensors &exp_avg_sqs,
                    const Tensors &max_exp_avg_sqs, const Tensors &state_steps)
{
    const size_t count = exp_avgs.size();
    check_count(exp_avg_sqs, "exp_avg_sqs", count);
    check_count(max_exp_avg_sqs, "max_exp_avg_sqs", max_exp_avg_sqs.empty() ? 0 : count);
    check_count(state_steps, "state_steps", count);
    const bool amsgrad = !max_exp_avg_sqs.empty();
    const std::vector<int64_t> shape{ROWS, static_cast<int64_t>(count)};
    Tensor table =
        torch::stable::empty({shape.data(), shape.size()}, torch::headeronly::ScalarType::Long);
    auto *const out = static_cast<int64_t *>(table.mutable_data_ptr());
    const auto address = [](const Tensor &t) {
        return reinterpret_cast<int64_t>(t.const_data_ptr());
    };
    for (size_t k = 0; k < count; k++) {
        for (const Tensor *t :
             {&exp_avgs[k], &exp_avg_sqs[k], amsgrad ? &max_exp_avg_sqs[k] : &exp_avgs[k]}) {
            check_like(*t, exp_avgs[k], exp_avgs[0], "states", k);
            if (!t->is_contiguous() || t->scalar_type() != exp_avgs[k].scalar_type())
                fail(entry("states", k) + " must be contiguous and of one dtype");
        }
        if (state_steps[k].numel() != 1 || !same_device(state_steps[k], exp_avgs[0]))
            fail(entry("state_steps", k) + " must have one element, on the device of the states");
        out[EXP_AVG * count + k] = address(exp_avgs[k]);
        out[EXP_AVG_SQ * count + k] = address(exp_avg_sqs[k]);
        out[MAX_EXP_AVG_SQ * count + k] = amsgrad ? address(max_exp_avg_sqs[k]) : 0;
        out[STEP * count + k] = address(state_steps[k]);
        out[NUMEL * count + k] = exp_avgs[k].numel();
        out[SHAPE * count + k] = shape_of(exp_avgs[k]);
        out[STATE_DTYPE * count + k] = dtype_of(exp_avgs[k], "exp_avgs", k);
        out[STEP_DTYPE * count + k] = dtype_of(state_steps[k], "state_steps", k);
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
    for (size_t k = 0; k < count; k++) {
        const Tensor &param = params[k], &grad = grads[k];
        check_like(grad, param, params[0], "grads", k);
        if (shape_of(param) != table[SHAPE * count + k])
            fail(entry("exp_avgs", k) + " has another shape than " + entry("params", k));
        if (k > 0 && !same_device(param, params[0]))
            fail(entry("params", k) + " is on " + device_name(param) + ", but params[0] is on " +
                 device_name(params[0]));
        if (!param.is_contiguous())
            fail(entry("params", k) + " is not contiguous, but its states are");
        std::optional<Layout> layout;
        if (!grad.is_contiguous())
            layout.emplace(param, "params", k);
        lists.params.add(param, "params", k);
        staging.add(lists.grads, grad, layout ? &*layout : nullptr, "grads", k, false);
    }
    const Options options{lr,       beta1,     beta2,     weight_decay, eps,       amsgrad,
                          maximize, decoupled, lr_tensor, grad_scale,   found_inf, clip_coef};
    run(lists, options, params[0]);
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
