// rows.h: tensors [..., cols] as the matrices of rows that the C interface takes.
#pragma once

#include "torch_ext/core/tensor.h"

namespace headroom
{

using torch::headeronly::ScalarType;

struct Matrix {
    int64_t rows, cols;
};

// All dimensions but the last are rows.
inline Matrix matrix_of(const View &view, const char *name)
{
    if (view.dim < 1)
        fail(std::string(name) + " has no dimensions, wanted [..., cols]");
    const int64_t cols = view.sizes[view.dim - 1];
    return {cols > 0 ? view.numel() / cols : 0, cols};
}

// A tensor that belongs to each element of another, `of_name`: of its shape, dtype and device.
inline const Tensor &require_like(const View &of, const char *of_name, const Tensor &tensor,
                                  const char *name)
{
    const View view(tensor);
    if (!view.has_sizes_of(of))
        fail(std::string(name) + " has another shape than " + of_name);
    require_with(view, name, of, of_name);
    require_dtype_of(view, name, of, of_name);
    return tensor;
}

// A tensor to read from. If its rows are not evenly spaced in memory, they are read from a copy.
class RowsIn
{
  public:
    RowsIn(const Tensor &tensor, const char *name) : tensor_(tensor)
    {
        const bool is_spaced = spaced();
        if (!is_spaced)
            tensor_ = dense_of(tensor_, name);
        const View view(tensor_);
        if (!is_spaced)
            stride_ = view.sizes[view.dim - 1];
        require_memory(view, name);
        rows_ = {view.data, stride_};
    }
    RowsIn(const RowsIn &) = delete;

    const hr_rows *get() const
    {
        return &rows_;
    }

  private:
    // Whether one stride leads from each row to the next; sets it.
    bool spaced()
    {
        const View view(tensor_);
        const int64_t last = view.dim - 1, cols = view.sizes[last];
        stride_ = cols;
        if (cols > 1 && view.strides[last] != 1)
            return false;
        int64_t next = -1; // the stride that the next dimension outwards must have
        for (int64_t d = last; d-- > 0;) {
            if (view.sizes[d] == 1)
                continue;
            if (next < 0)
                stride_ = view.strides[d];
            else if (view.strides[d] != next)
                return view.numel() == 0;
            next = view.strides[d] * view.sizes[d];
        }
        return stride_ >= cols;
    }

    Tensor tensor_;
    int64_t stride_ = 0;
    hr_rows rows_;
};

// A new contiguous tensor like another.
inline Tensor empty_rows(const View &like, const Tensor &tensor)
{
    return new_tensor(tensor, {like.sizes, static_cast<size_t>(like.dim)});
}

// What a call does not ask for: schemas have no optional results.
inline Tensor nothing(const Tensor &like, std::optional<ScalarType> type = std::nullopt)
{
    const int64_t none = 0;
    return new_tensor(like, {&none, 1}, type);
}

// A new tensor with an element for each row of x; without elements where it is not wanted.
inline Tensor empty_of_rows(const View &x, bool wanted, ScalarType type = ScalarType::Float)
{
    if (!wanted)
        return nothing(x.tensor, type);
    return new_tensor(x.tensor, {x.sizes, static_cast<size_t>(x.dim - 1)}, type);
}

inline Tensor empty_like_if(bool wanted, const View &view)
{
    return wanted ? empty_rows(view, view.tensor) : nothing(view.tensor);
}

inline hr_dtype float_of(const View &view, const char *name)
{
    const int dtype = dtype_of(view.torch_dtype);
    if (dtype != HR_F32 && dtype != HR_BF16 && dtype != HR_F16)
        fail(std::string(name) + " has dtype " +
             torch::headeronly::toString(view.tensor.scalar_type()) +
             ", wanted float32, bfloat16 or float16");
    return static_cast<hr_dtype>(dtype);
}

// torch's name of a type that float_of() returns.
inline ScalarType scalar_type_of(hr_dtype dtype)
{
    return dtype == HR_F32    ? ScalarType::Float
           : dtype == HR_BF16 ? ScalarType::BFloat16
                              : ScalarType::Half;
}

inline hr_rows rows_of(const Tensor &contiguous)
{
    const View view(contiguous);
    return {view.data, view.dim > 0 ? view.sizes[view.dim - 1] : 1};
}

} // namespace headroom
