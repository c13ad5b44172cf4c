// layout.h: tensors of unequal strides made equal. The kernels walk dense memory, so the tensors of
// one parameter must lie in the same order. Those that do not are worked on as a copy.
#pragma once

#include <numeric>

#include "tensor.h"

namespace headroom
{

// Autograd must not see the copies: a parameter is a leaf that requires grad.
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

class Layout
{
  public:
    // The order of `param` in memory if it is dense, else row-major. Fails if elements of `param`
    // share memory, as those of an expanded tensor do.
    Layout(const Tensor &param, const char *name, size_t k)
        : sizes_(param.sizes().begin(), param.sizes().end()),
          strides_(param.strides().begin(), param.strides().end())
    {
        std::vector<size_t> order(sizes_.size());
        std::iota(order.begin(), order.end(), size_t{0});
        std::stable_sort(order.begin(), order.end(),
                         [this](size_t a, size_t b) { return strides_[a] < strides_[b]; });
        int64_t extent = 1, dense = 1;
        for (const size_t d : order) {
            if (sizes_[d] <= 1)
                continue;
            if (strides_[d] < extent)
                fail(entry(name, k) + " has elements that share memory (an expanded or overlapping "
                                      "tensor); give it memory of its own with clone()");
            is_dense_ = is_dense_ && strides_[d] == dense;
            extent += (sizes_[d] - 1) * strides_[d];
            dense *= sizes_[d];
        }
        if (is_dense_)
            return;
        dense = 1;
        for (size_t d = sizes_.size(); d-- > 0; dense *= sizes_[d])
            strides_[d] = dense;
    }

    bool matches(const Tensor &tensor) const
    {
        const auto strides = tensor.strides();
        for (size_t d = 0; d < sizes_.size(); d++)
            if (sizes_[d] > 1 && strides[d] != strides_[d])
                return false;
        return true;
    }

    // A copy of `tensor`, whose sizes are those of the parameter, in this order.
    Tensor copy_of(const Tensor &tensor) const
    {
        int32_t dtype, device;
        AtenTensorHandle handle;
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
        TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
            static_cast<int64_t>(sizes_.size()), sizes_.data(), strides_.data(), dtype, device,
            tensor.get_device_index(), &handle));
        Tensor copy(handle);
        torch::stable::copy_(copy, tensor);
        return copy;
    }

  private:
    std::vector<int64_t> sizes_, strides_;
    bool is_dense_ = true;
};

} // namespace headroom
