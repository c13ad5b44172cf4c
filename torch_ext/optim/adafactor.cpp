// adafactor.cpp: registers headroom::adafactor_, headroom::_adafactor_table_, the fast path that
// takes a table of addresses (describe.cpp) instead of lists of tensors, and the sizes of their
// workspaces.
//
// Rows and columns are the last two dimensions, so tensors that are not contiguous are copied.
#include "torch_ext/core/members.h"
#include "torch_ext/core/step.h"
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

struct Lists {
    hr_tensor_list params, grads, row_vars, col_vars, variances, exp_avgs, rms_values, residuals,
        steps;
};

struct AdafactorOptions {
    StepOptions step;
    bool hf;
    double beta2_decay, eps1, eps2, clip_threshold, weight_decay, beta1;
    bool scale_parameter, relative_step, warmup_init;
};

hr_adafactor_config config_of(const AdafactorOptions &o, const View &like)
{
    const hr_adafactor_config hf = HR_ADAFACTOR_HF_INIT, torch = HR_ADAFACTOR_TORCH_INIT;
    hr_adafactor_config config = o.hf ? hf : torch;
    set_step(config.step, o.step, like);
    config.beta2_decay = o.beta2_decay;
    config.eps1 = o.eps1;
    config.eps2 = o.eps2;
    config.clip_threshold = o.clip_threshold;
    config.weight_decay = o.weight_decay;
    config.beta1 = o.beta1;
    config.scale_parameter = o.scale_parameter;
    config.relative_step = o.relative_step;
    config.warmup_init = o.warmup_init;
    return config;
}

// A list, or NULL if it is empty.
const hr_tensor_list *given(const hr_tensor_list &list)
{
    return list.count > 0 ? &list : nullptr;
}

using Shapes = std::vector<hr_adafactor_shape>;

void run(const Lists &lists, const Shapes &shapes, hr_adafactor_config config,
         const WeightOptions &weight_options, const Tensor &workspace, const View &like)
{
    const Weights weights(weight_options, lists.residuals, static_cast<size_t>(lists.params.count),
                          like);
    config.step.weights = weights.get();
    const Exec exec(like);
    check(hr_adafactor(&lists.params, given(lists.row_vars), given(lists.col_vars),
                       given(lists.variances), given(lists.exp_avgs), given(lists.rms_values),
                       &lists.steps, &lists.grads, shapes.data(), &config,
                       workspace.mutable_data_ptr(), static_cast<size_t>(workspace.numel()) * 8,
                       &exec.exec));
}

size_t workspace_bytes(const Shapes &shapes)
{
    size_t bytes = 0;
    check(hr_adafactor_workspace(&bytes, shapes.data(), static_cast<int64_t>(shapes.size())));
    return bytes;
}

hr_adafactor_shape shape_of(const View &param, const int64_t *whole)
{
    hr_adafactor_shape shape{1, 1, param.numel(), 0, 0, 0, 0};
    if (param.dim >= 2) {
        shape.factored = 1;
        shape.rows = param.sizes[param.dim - 2];
        shape.cols = param.sizes[param.dim - 1];
        for (int64_t d = 0; d < param.dim - 2; d++)
            shape.batch *= param.sizes[d];
    }
    if (whole) {
        shape.whole_rows = whole[0];
        shape.whole_cols = whole[1];
        shape.whole_numel = whole[2];
    }
    return shape;
}

const int64_t *whole_of(const Integers &wholes, size_t k, size_t count)
{
    if (!wholes)
        return nullptr;
    check_count(*wholes, "wholes", 3 * count);
    return wholes->data() + 3 * k;
}

// Adds entry k of a list of states, which may be empty.
void add_states(List &list, const Tensors &tensors, const View &first, Staging &staging,
                const char *name, size_t k)
{
    if (tensors.empty())
        return;
    const View view(tensors[k]);
    check_device(view, first, name, k);
    add_row_major(list, view, staging, name, k, true);
}

// Returns the workspace of a call, which is made if the caller gives none.
Tensor workspace_for(const Shapes &shapes, const OptionalTensor &given, const Tensor &first)
{
    const Tensor memory = given ? *given : workspace_of(workspace_bytes(shapes), first);
    const View space(memory), like(first);
    if (!space.is_with(like) || dtype_of(space.torch_dtype) != HR_F64 || !space.is_contiguous())
        fail("workspace must be a contiguous float64 tensor on " + like.device_name());
    return memory;
}

void adafactor_(const Tensors &params, const Tensors &grads, const Tensors &row_vars,
                const Tensors &col_vars, const Tensors &variances, const Tensors &exp_avgs,
                const Tensors &rms_values, const Tensors &state_steps, const Tensors &residuals,
                bool hf, double lr, double beta2_decay, double eps1, double eps2,
                double clip_threshold, double weight_decay, double beta1, bool scale_parameter,
                bool relative_step, bool warmup_init, bool maximize,
                const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
                const OptionalTensor &found_inf, const OptionalTensor &clip_coef, int64_t phases,
                const Integers &wholes, const OptionalTensor &workspace, int64_t weights_mode,
                const Integers &weight_seeds, const Integers &places, const OptionalTensor &stalled)
{
    const size_t count = params.size();
    const std::pair<const Tensors &, const char *> optional[] = {
        {row_vars, "row_vars"}, {col_vars, "col_vars"},     {variances, "variances"},
        {exp_avgs, "exp_avgs"}, {rms_values, "rms_values"}, {residuals, "residuals"}};
    check_count(grads, "grads", count);
    for (const auto &[list, name] : optional)
        check_count(list, name, list.empty() ? 0 : count);
    check_count(state_steps, "state_steps", count);
    if (count == 0)
        return;
    List all_params, all_grads, states[6], steps;
    Shapes shapes;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        const View param(params[k]), grad(grads[k]);
        check_like(param, param, first, "params", k);
        check_like(grad, param, first, "grads", k);
        if (!exp_avgs.empty())
            check_like(View(exp_avgs[k]), param, first, "exp_avgs", k);
        if (!residuals.empty())
            check_like(View(residuals[k]), param, first, "residuals", k);
        add_row_major(all_params, param, staging, "params", k, true);
        add_row_major(all_grads, grad, staging, "grads", k, false);
        for (int i = 0; i < 6; i++)
            add_states(states[i], optional[i].first, first, staging, optional[i].second, k);
        add_step(steps, state_steps[k], first, k);
        shapes.push_back(shape_of(param, whole_of(wholes, k, count)));
    }
    const StepOptions step{lr, maximize, false, lr_tensor, grad_scale, found_inf, clip_coef};
    const AdafactorOptions options{
        step,         hf,    beta2_decay,     eps1,          eps2,       clip_threshold,
        weight_decay, beta1, scale_parameter, relative_step, warmup_init};
    hr_adafactor_config config = config_of(options, first);
    if (phases < 1 || phases > HR_ADAFACTOR_ALL)
        fail("phases is " + std::to_string(phases) + ", wanted 1 to 15");
    config.phases = static_cast<int32_t>(phases);
    if (config.phases != HR_ADAFACTOR_ALL && !workspace)
        fail("phases is " + std::to_string(phases) + ", which needs a workspace");
    const Tensor memory = workspace_for(shapes, workspace, params[0]);
    run({all_params.view(), all_grads.view(), states[0].view(), states[1].view(), states[2].view(),
         states[3].view(), states[4].view(), states[5].view(), steps.view()},
        shapes, config, {weights_mode, weight_seeds, places, stalled}, memory, first);
    staging.write_back();
}

// What a table holds: params, grads, variances unless factored, exp_avgs if momentum, residuals if
// the mode has them, row_vars and col_vars if factored, rms_values if with_rms, steps. The parameters are
// contiguous, and all are factored or none is.
struct TableLists {
    Lists lists{};
    Shapes shapes;
    std::vector<int64_t> rows, cols; // sizes of the variances; 0 for an empty parameter

    TableLists(const Tensor &table, bool factored, bool momentum, bool with_rms, bool completed)
    {
        check_table(table, 3 + (factored ? 2 : 1) + momentum + completed + with_rms);
        int64_t next = 0;
        const auto take = [&](bool wanted) {
            return wanted ? list_of(table, next++) : hr_tensor_list{};
        };
        lists.params = take(true);
        lists.grads = take(true);
        lists.variances = take(!factored);
        lists.exp_avgs = take(momentum);
        lists.residuals = take(completed);
        lists.row_vars = take(factored);
        lists.col_vars = take(factored);
        lists.rms_values = take(with_rms);
        lists.steps = take(true);
        for (int64_t k = 0; k < lists.params.count; k++)
            shapes.push_back(factored
                                 ? factored_shape(k)
                                 : hr_adafactor_shape{1, 1, lists.params.numel[k], 0, 0, 0, 0});
        lists.row_vars.numel = rows.data();
        lists.col_vars.numel = cols.data();
    }

    TableLists(const TableLists &) = delete; // the lists point to its rows and cols
    TableLists &operator=(const TableLists &) = delete;

  private:
    // Solves for [batch, rows, cols], given batch * rows * cols, batch * rows and batch * cols.
    hr_adafactor_shape factored_shape(int64_t k)
    {
        const int64_t numel = lists.params.numel[k];
        rows.push_back(numel > 0 ? lists.row_vars.numel[k] : 0);
        cols.push_back(numel > 0 ? lists.col_vars.numel[k] : 0);
        const int64_t r = cols.back() ? numel / cols.back() : 0;
        const int64_t c = rows.back() ? numel / rows.back() : 0;
        return {numel > 0 && r * c > 0 ? numel / (r * c) : 0, r, c, 1, 0, 0, 0};
    }
};

void adafactor_table_(const Tensor &first, const Tensor &table, bool factored, bool momentum,
                      bool with_rms, bool hf, double lr, double beta2_decay, double eps1,
                      double eps2, double clip_threshold, double weight_decay, double beta1,
                      bool scale_parameter, bool relative_step, bool warmup_init, bool maximize,
                      const OptionalTensor &lr_tensor, const OptionalTensor &grad_scale,
                      const OptionalTensor &found_inf, const OptionalTensor &clip_coef,
                      const OptionalTensor &workspace, int64_t weights_mode,
                      const Integers &weight_seeds, const Integers &places,
                      const OptionalTensor &stalled)
{
    const TableLists given(table, factored, momentum, with_rms, has_residuals(weights_mode));
    const StepOptions step{lr, maximize, false, lr_tensor, grad_scale, found_inf, clip_coef};
    const AdafactorOptions options{
        step,         hf,    beta2_decay,     eps1,          eps2,       clip_threshold,
        weight_decay, beta1, scale_parameter, relative_step, warmup_init};
    const View like(first);
    const Tensor memory = workspace_for(given.shapes, workspace, first);
    run(given.lists, given.shapes, config_of(options, like),
        {weights_mode, weight_seeds, places, stalled}, memory, like);
}

int64_t doubles_for(const Shapes &shapes)
{
    return static_cast<int64_t>((workspace_bytes(shapes) + 7) / 8);
}

int64_t adafactor_workspace(const Tensors &params, const Integers &wholes)
{
    Shapes shapes;
    for (size_t k = 0; k < params.size(); k++)
        shapes.push_back(shape_of(View(params[k]), whole_of(wholes, k, params.size())));
    return doubles_for(shapes);
}

int64_t adafactor_table_workspace(const Tensor &table, bool factored, bool momentum, bool with_rms,
                                  int64_t weights_mode)
{
    return doubles_for(
        TableLists(table, factored, momentum, with_rms, has_residuals(weights_mode)).shapes);
}

#define OPTIONS                                                                                \
    "bool hf, float lr, float beta2_decay, float eps1, float eps2, float clip_threshold, "     \
    "float weight_decay, float beta1, bool scale_parameter, bool relative_step, "              \
    "bool warmup_init, bool maximize=False, Tensor? lr_tensor=None, Tensor? grad_scale=None, " \
    "Tensor? found_inf=None, Tensor? clip_coef=None"

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("adafactor_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] row_vars, "
          "Tensor(c!)[] col_vars, Tensor(d!)[] variances, Tensor(e!)[] exp_avgs, "
          "Tensor(f!)[] rms_values, Tensor(g!)[] state_steps, Tensor(h!)[] residuals, *, " OPTIONS
          ", int phases=15, int[]? wholes=None, Tensor(i!)? workspace=None, " HR_WEIGHT_OPTIONS
          ") -> ()");
    m.def("_adafactor_table_(Tensor(a!) first, Tensor table, *, bool factored, bool momentum, "
          "bool with_rms, " OPTIONS ", Tensor(i!)? workspace=None, " HR_WEIGHT_OPTIONS ") -> ()");
    m.def("_adafactor_table_workspace(Tensor table, *, bool factored, bool momentum, "
          "bool with_rms, int weights_mode=0) -> int");
    m.def("_adafactor_workspace(Tensor[] params, int[]? wholes=None) -> int");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("adafactor_", TORCH_BOX(&adafactor_));
    m.impl("_adafactor_table_", TORCH_BOX(&adafactor_table_));
    m.impl("_adafactor_table_workspace", TORCH_BOX(&adafactor_table_workspace));
    m.impl("_adafactor_workspace", TORCH_BOX(&adafactor_workspace));
}
