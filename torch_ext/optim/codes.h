// codes.h: the codes and scales of 8-bit moments among the tensors of a call.
#pragma once

#include "torch_ext/core/members.h"

namespace headroom
{

inline void check_codes(const View &view, const char *name, size_t k)
{
    if (dtype_of(view.torch_dtype) != HR_U8)
        fail(entry(name, k) + " has dtype " +
             torch::headeronly::toString(view.tensor.scalar_type()) + ", wanted uint8");
}

// Adds a list of scales. The C interface checks how many there are.
inline void add_absmax(List &list, const Tensor &tensor, const View &first, const char *name,
                       size_t k)
{
    const View view(tensor);
    check_device(view, first, name, k);
    if (dtype_of(view.torch_dtype) != HR_F32 || !view.is_contiguous())
        fail(entry(name, k) + " must be float32 and contiguous");
    list.add(view, name, k);
}

} // namespace headroom
