// accumulate.cpp: headroom::accumulate_.
#include "torch_ext/core/lists.h"

namespace
{

using namespace headroom;

void accumulate_(const Tensors &sums, const Tensors &compensations, const Tensors &grads,
                 double factor, const OptionalTensor &factor_tensor, bool zero_grads)
{
    check_count(compensations, "compensations", compensations.empty() ? 0 : sums.size());
    check_count(grads, "grads", sums.size());
    if (sums.empty())
        return;
    ListCall call({{"sums", sums, true},
                   {"compensations", compensations, true, true},
                   {"grads", grads, zero_grads}});
    hr_accumulate_config config = HR_ACCUMULATE_CONFIG_INIT;
    config.factor = factor;
    config.factor_ptr = scalar_of(factor_tensor, call.like, "factor_tensor");
    config.zero_grads = zero_grads;
    call.run([&](const hr_exec *exec) {
        return hr_accumulate(call[0], call[1], call[2], &config, exec);
    });
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("accumulate_(Tensor(a!)[] sums, Tensor(b!)[] compensations, Tensor(c!)[] grads, *, "
          "float factor=1.0, Tensor? factor_tensor=None, bool zero_grads=False) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("accumulate_", TORCH_BOX(&accumulate_));
}
