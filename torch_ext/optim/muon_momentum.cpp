// muon_momentum.cpp: registers headroom::muon_momentum_.
#include "torch_ext/core/step.h"
#include "torch_ext/optim/codes.h"
#include "torch_ext/optim/muon.h"

namespace
{

using namespace headroom;

float *squares_of(const Tensor &squares, size_t count, const View &like)
{
    const View view(squares);
    require_with(view, "squares", like, "grads[0]");
    if (dtype_of(view.torch_dtype) != HR_F32 || view.numel() != static_cast<int64_t>(count) ||
        !view.is_contiguous())
        fail("squares must be a contiguous float32 tensor of " + std::to_string(count) +
             " elements");
    require_memory(view, "squares");
    return static_cast<float *>(view.data);
}

void muon_momentum_(const Tensors &grads, const Tensors &moments, const Tensors &absmaxs,
                    const Tensors &updates, const Tensor &squares, double momentum, bool nesterov,
                    bool maximize, int64_t block_size, const OptionalTensor &grad_scale,
                    const OptionalTensor &found_inf, const OptionalTensor &clip_coef)
{
    const size_t count = grads.size();
    check_count(moments, "moments", count);
    check_count(absmaxs, "absmaxs", absmaxs.empty() ? 0 : count);
    check_count(updates, "updates", count);
    if (count == 0)
        return;
    List all_grads, all_moments, all_absmaxs, all_updates;
    Matrices matrices;
    Staging staging;
    const NoGrad no_grad;
    const View first(grads[0]);
    for (size_t k = 0; k < count; k++) {
        const View grad(grads[k]), moment(moments[k]);
        check_like(grad, grad, first, "grads", k, "grads");
        check_like(moment, grad, first, "moments", k, "grads");
        add_row_major(all_grads, grad, staging, "grads", k, false);
        if (!absmaxs.empty()) {
            check_codes(moment, "moments", k);
            add_absmax(all_absmaxs, absmaxs[k], first, "absmaxs", k);
        }
        add_row_major(all_moments, moment, staging, "moments", k, true);
        add_update(all_updates, matrices, updates[k], grad, first, "grads", k);
    }
    hr_muon_momentum_config config = HR_MUON_MOMENTUM_CONFIG_INIT;
    config.step.maximize = maximize;
    config.step.grad_scale = scalar_of(grad_scale, first, "grad_scale");
    config.step.found_inf = scalar_of(found_inf, first, "found_inf");
    config.step.clip_coef = scalar_of(clip_coef, first, "clip_coef");
    config.momentum = momentum;
    config.nesterov = nesterov;
    config.block_size = static_cast<int32_t>(block_size);
    float *const sums = squares_of(squares, count, first);
    size_t bytes = 0;
    const Tensor workspace = muon_workspace(matrices, grads[0], &bytes);
    const hr_tensor_list views[] = {all_updates.view(), all_moments.view(), all_absmaxs.view(),
                                    all_grads.view()};
    const Exec exec(first);
    check(hr_muon_momentum(&views[0], sums, &views[1], absmaxs.empty() ? nullptr : &views[2],
                           &views[3], matrices.data(), &config, workspace.mutable_data_ptr(), bytes,
                           &exec.exec));
    staging.write_back();
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("muon_momentum_(Tensor[] grads, Tensor(a!)[] moments, Tensor(b!)[] absmaxs, "
          "Tensor(c!)[] updates, Tensor(d!) squares, *, float momentum, bool nesterov, "
          "bool maximize, int block_size=256, Tensor? grad_scale=None, Tensor? found_inf=None, "
          "Tensor? clip_coef=None) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("muon_momentum_", TORCH_BOX(&muon_momentum_));
}
