// accumulate.cpp: headroom::accumulate_.
#include "torch_ext/core/layout.h"

namespace
{

using namespace headroom;

void accumulate_(const Tensors &sums, const Tensors &losts, const Tensors &grads, double factor,
                 const OptionalTensor &factor_tensor, bool zero_grads)
{
    if (sums.empty())
        return;
    const size_t count = sums.size();
    const View like(sums[0]);
    if (grads.size() != count || (!losts.empty() && losts.size() != count))
        fail("sums has " + std::to_string(count) + " tensors, but grads has " +
             std::to_string(grads.size()) + " and losts " + std::to_string(losts.size()));
    const NoGrad no_grad;
    List sum_list, lost_list, grad_list;
    Staging staging;
    for (size_t k = 0; k < count; k++) {
        const View sum(sums[k]), grad(grads[k]);
        std::optional<View> lost;
        if (!losts.empty())
            lost.emplace(losts[k]);
        bool contiguous = true;
        for (const View *view : {&sum, &grad, lost ? &*lost : &sum}) {
            if (!view->has_sizes_of(sum))
                fail(entry("grads", k) + " or " + entry("losts", k) + " has another shape than " +
                     entry("sums", k));
            if (!view->is_with(like))
                fail(entry("grads", k) + ", " + entry("sums", k) + " or " + entry("losts", k) +
                     " is on " + view->device_name() + ", but sums[0] is on " + like.device_name());
            contiguous = contiguous && view->is_contiguous();
        }
        std::optional<Layout> layout;
        if (!contiguous)
            layout.emplace(sum, "sums", k);
        const Layout *const order = layout ? &*layout : nullptr;
        staging.add(sum_list, sum, order, "sums", k, true);
        staging.add(grad_list, grad, order, "grads", k, zero_grads);
        if (lost)
            staging.add(lost_list, *lost, order, "losts", k, true);
    }
    hr_accumulate_config config = HR_ACCUMULATE_CONFIG_INIT;
    config.factor = factor;
    config.factor_ptr = scalar_of(factor_tensor, like, "factor_tensor");
    config.zero_grads = zero_grads;
    const hr_tensor_list sum_view = sum_list.view(), lost_view = lost_list.view();
    const hr_tensor_list grad_view = grad_list.view();
    const Exec exec(like);
    check(hr_accumulate(&sum_view, losts.empty() ? nullptr : &lost_view, &grad_view, &config,
                        &exec.exec));
    staging.write_back();
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("accumulate_(Tensor(a!)[] sums, Tensor(b!)[] losts, Tensor(c!)[] grads, *, "
          "float factor=1.0, Tensor? factor_tensor=None, bool zero_grads=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CPU, m)
{
    m.impl("accumulate_", TORCH_BOX(&accumulate_));
}

STABLE_TORCH_LIBRARY_IMPL(headroom, CUDA, m)
{
    m.impl("accumulate_", TORCH_BOX(&accumulate_));
}
