// loss_rows.h: what the ops of the family share: a tensor [..., cols] whose rows have losses, and the
// tensors that belong to the rows.
#pragma once

#include <deque>

#include "torch_ext/core/rows.h"

namespace headroom
{

// The numbers of torch.nn.functional's reductions, and one of ours.
enum Reduction { NONE = 0, MEAN = 1, SUM = 2, MEAN_OR_ZERO = 3 };

// That of the C interface; a sum for losses of rows, which ask for none.
inline hr_cross_entropy_reduction reduction_of(int64_t reduction)
{
    if (reduction < NONE || reduction > MEAN_OR_ZERO)
        fail("reduction is " + std::to_string(reduction) + ", wanted 0, 1, 2 or 3");
    return reduction == MEAN           ? HR_REDUCE_MEAN
           : reduction == MEAN_OR_ZERO ? HR_REDUCE_MEAN_OR_ZERO
                                       : HR_REDUCE_SUM;
}

template <typename T> T *data_of(const Tensor &tensor, bool wanted = true)
{
    return wanted ? static_cast<T *>(View(tensor).data) : nullptr;
}

// Fails if the storage of a tensor was freed: with rows that are all ignored nothing would read it,
// and a tensor that begins past the first element of its storage has an address all the same.
inline void require_storage(const Tensor &tensor, const char *name)
{
    const View view(tensor);
    int64_t bytes = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
    if (bytes == 0 && view.numel() > 0)
        fail(std::string(name) + " has no memory: its storage was freed");
}

class LossRows
{
  public:
    // `name` is that of the tensor in messages.
    LossRows(const Tensor &tensor, const char *name)
        : in(tensor), matrix(matrix_of(in, name)), exec(in), name(name)
    {
    }
    LossRows(const LossRows &) = delete;

    // Whether a tensor has an element for each row.
    bool has_rows(const View &view) const
    {
        return view.dim == in.dim - 1 && std::equal(view.sizes, view.sizes + view.dim, in.sizes);
    }

    // A new tensor with an element for each row; without elements where it is not wanted.
    Tensor of_rows(bool wanted, ScalarType type = ScalarType::Float) const
    {
        return empty_of_rows(in, wanted, type);
    }

    // The address of a tensor's elements, one after another, while this object lives.
    const void *dense(const Tensor &tensor, const char *what)
    {
        require_storage(tensor, what);
        return View(kept_.emplace_back(dense_of(tensor, what))).data;
    }

    // The same of a vector of binary32.
    const float *vector(const Tensor &tensor, const char *what, int64_t numel)
    {
        const View view(tensor);
        if (!view.is_with(in) || dtype_of(view.torch_dtype) != HR_F32 || view.numel() != numel)
            fail(std::string(what) + " must be a float32 tensor of " + std::to_string(numel) +
                 " elements on " + in.device_name());
        return static_cast<const float *>(dense(tensor, what));
    }

    // The same of the targets, and the bytes of one. `hint` ends the message about a shape.
    const void *targets(const Tensor &tensor, int32_t *bytes, const char *hint = "")
    {
        const View view(tensor);
        const bool is_int32 = view.torch_dtype == aoti_torch_dtype_int32();
        if (!is_int32 && view.torch_dtype != aoti_torch_dtype_int64())
            fail(std::string("target has dtype ") +
                 torch::headeronly::toString(tensor.scalar_type()) +
                 ", wanted int64 or int32: the number of a class per row");
        if (!has_rows(view))
            fail("target must have the shape of " + name + " without the last dimension" + hint);
        require_with(view, "target", in, name.c_str());
        *bytes = is_int32 ? 4 : 8;
        return dense(tensor, "target");
    }

    // The gradients of numbers of rows, in one stride: 0 for a scalar and for an expanded one.
    const float *gradients(const Tensor &tensor, int64_t *stride, const char *what = "dloss")
    {
        const View view(tensor);
        if (!view.is_with(in) || dtype_of(view.torch_dtype) != HR_F32 ||
            (view.dim != 0 && !has_rows(view)))
            fail(std::string(what) +
                 " must be a float32 tensor of one element or of the shape of " + name +
                 " without the last dimension on " + in.device_name());
        const bool expanded = std::all_of(view.strides, view.strides + view.dim,
                                          [](int64_t step) { return step == 0; });
        *stride = expanded ? 0 : view.dim == 1 ? view.strides[0] : 1;
        if (!expanded && view.dim != 1)
            return static_cast<const float *>(dense(tensor, what));
        require_storage(tensor, what);
        return static_cast<const float *>(view.data);
    }

    const View in;
    const Matrix matrix;
    const Exec exec;
    const std::string name;

  private:
    std::deque<Tensor> kept_;
};

} // namespace headroom
