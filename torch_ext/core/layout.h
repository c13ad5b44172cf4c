// layout.h: gives the tensors of a parameter one memory order. The kernels walk dense memory, so
// all tensors of a parameter must have the same strides; those that have others are copied, and the
// copies are written back.
#pragma once

#include "torch_ext/core/tensor.h"

namespace headroom
{

// Turns autograd off in a scope. It must not see the copies: a parameter is a leaf that requires
// grad.
class NoGrad
{
  public:
    NoGrad() : enabled_(aoti_torch_grad_mode_is_enabled())
    {
        aoti_torch_grad_mode_set_enabled(false);
    }
    ~NoGrad()
    {
        aoti_torch_grad_mode_set_enabled(enabled_);
    }
    NoGrad(const NoGrad &) = delete;

  private:
    bool enabled_;
};

// The sizes of a parameter, and the strides that all its tensors get.
class Layout
{
  public:
    // Takes the strides of `param` if it is dense and `row_major` is false, else row-major strides.
    // Fails if elements of `param` share memory, as in an expanded tensor, unless it is only read.
    Layout(const View &param, const char *name, size_t k, bool only_read = false,
           bool row_major = false)
        : sizes_(param.sizes, param.sizes + param.dim),
          strides_(param.strides, param.strides + param.dim)
    {
        std::vector<size_t> order(sizes_.size());
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [this](size_t a, size_t b) { return strides_[a] < strides_[b]; });
        int64_t extent = 1, dense = 1;
        for (const size_t d : order) {
            if (sizes_[d] <= 1)
                continue;
            if (strides_[d] < extent && !only_read)
                fail(entry(name, k) + " has elements that share memory (an expanded or overlapping "
                                      "tensor); give it memory of its own with clone()");
            is_dense_ = is_dense_ && strides_[d] == dense;
            extent += (sizes_[d] - 1) * strides_[d];
            dense *= sizes_[d];
        }
        if (is_dense_ && !row_major)
            return;
        dense = 1;
        for (size_t d = sizes_.size(); d-- > 0; dense *= sizes_[d])
            strides_[d] = dense;
    }

    bool matches(const View &view) const
    {
        for (size_t d = 0; d < sizes_.size(); d++)
            if (sizes_[d] > 1 && view.strides[d] != strides_[d])
                return false;
        return true;
    }

    // Returns a new tensor in this order on the device of `like`.
    Tensor empty(int32_t torch_dtype, const View &like) const
    {
        AtenTensorHandle handle;
        TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
            static_cast<int64_t>(sizes_.size()), sizes_.data(), strides_.data(), torch_dtype,
            like.device_type, like.device_index, &handle));
        return Tensor(handle);
    }

    // Returns a copy in this order of a tensor that has the sizes of the parameter.
    Tensor copy_of(const View &view) const
    {
        Tensor copy = empty(view.torch_dtype, view);
        torch::stable::copy_(copy, view.tensor);
        return copy;
    }

  private:
    std::vector<int64_t> sizes_, strides_;
    bool is_dense_ = true;
};

// Copies tensors whose layout does not match, keeps the copies alive during the call, and writes
// those that the kernel has written back to their tensors.
class Staging
{
  public:
    void add(List &list, const View &view, const Layout *layout, const char *name, size_t k,
             bool written)
    {
        if (!layout || layout->matches(view)) {
            list.add(view, name, k);
            return;
        }
        require_memory(view, entry(name, k).c_str()); // torch's copy does not look
        if (written)
            Layout(view, name, k); // fails now if it cannot be written back
        copies_.push_back(layout->copy_of(view));
        list.add(View(copies_.back()), name, k);
        if (written)
            write_back_.emplace_back(view.tensor, copies_.size() - 1);
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

// Adds a tensor in row-major order, as a copy if it is not contiguous.
inline void add_row_major(List &list, const View &view, Staging &staging, const char *name,
                          size_t k, bool written)
{
    std::optional<Layout> layout;
    if (!view.is_contiguous())
        layout.emplace(view, name, k, !written, true);
    staging.add(list, view, layout ? &*layout : nullptr, name, k, written);
}

} // namespace headroom
