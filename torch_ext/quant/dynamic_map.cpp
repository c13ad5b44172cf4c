// dynamic_map.cpp: registers headroom::dynamic_map.
#include "torch_ext/core/tensor.h"

namespace
{

using namespace headroom;

Tensor dynamic_map(bool is_signed)
{
    const int64_t size = 256;
    Tensor values = torch::stable::empty({&size, 1}, torch::headeronly::ScalarType::Float);
    check(hr_dynamic_map(static_cast<float *>(values.mutable_data_ptr()), is_signed));
    return values;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("dynamic_map(bool is_signed) -> Tensor");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("dynamic_map", TORCH_BOX(&dynamic_map));
}
