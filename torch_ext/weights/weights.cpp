// weights.cpp: registers headroom::join_weights_ and headroom::split_weights_.
#include "torch_ext/weights/weights.h"

namespace
{

using namespace headroom;

void convert(const Tensors &params, const Tensors &values, const Tensors &residuals,
             int64_t weights_mode, bool split)
{
    const size_t count = params.size();
    check_count(values, "values", count);
    check_count(residuals, "residuals", residuals.empty() ? 0 : count);
    if (count == 0)
        return;
    List param_list, value_list, residual_list;
    Staging staging;
    const NoGrad no_grad;
    const View first(params[0]);
    for (size_t k = 0; k < count; k++) {
        std::vector<Member> members{{View(params[k]), param_list, "params", split},
                                    {View(values[k]), value_list, "values", !split}};
        if (!residuals.empty())
            members.push_back({View(residuals[k]), residual_list, "residuals", split});
        add_members(members, first, staging, k);
    }
    const hr_tensor_list lists[] = {param_list.view(), value_list.view(), residual_list.view()};
    hr_weights weights = HR_WEIGHTS_INIT;
    weights.mode = static_cast<hr_weights_mode>(weights_mode);
    weights.residuals = residuals.empty() ? nullptr : &lists[2];
    const Exec exec(first);
    check(split ? hr_split_weights(&lists[0], &lists[1], &weights, &exec.exec)
                : hr_join_weights(&lists[1], &lists[0], &weights, &exec.exec));
    staging.write_back();
}

void join_weights_(const Tensors &values, const Tensors &params, const Tensors &residuals,
                   int64_t weights_mode)
{
    convert(params, values, residuals, weights_mode, false);
}

void split_weights_(const Tensors &params, const Tensors &residuals, const Tensors &values,
                    int64_t weights_mode)
{
    convert(params, values, residuals, weights_mode, true);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("join_weights_(Tensor(a!)[] values, Tensor[] params, Tensor[] residuals, "
          "int weights_mode) -> ()");
    m.def("split_weights_(Tensor(a!)[] params, Tensor(b!)[] residuals, Tensor[] values, "
          "int weights_mode) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("join_weights_", TORCH_BOX(&join_weights_));
    m.impl("split_weights_", TORCH_BOX(&split_weights_));
}
