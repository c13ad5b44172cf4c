// tensor.h: from torch tensors to the arguments of the C interface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "headroom.h"

// Lives in libtorch_cuda, which CPU builds of torch do not have.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);

namespace headroom
{

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

// A RuntimeError in Python.
[[noreturn]] inline void fail(const std::string &message)
{
    throw std::runtime_error(message);
}

inline void check(hr_status status)
{
    if (status != HR_OK)
        fail(std::string(hr_last_error()) + " (" + hr_status_string(status) + ")");
}

inline std::string entry(const char *name, size_t k)
{
    return std::string(name) + "[" + std::to_string(k) + "]";
}

inline hr_dtype dtype_of(const Tensor &tensor, const char *name, size_t k)
{
    using torch::headeronly::ScalarType;
    switch (tensor.scalar_type()) {
    case ScalarType::Float:
        return HR_F32;
    case ScalarType::BFloat16:
        return HR_BF16;
    case ScalarType::Half:
        return HR_F16;
    case ScalarType::Double:
        return HR_F64;
    case ScalarType::Byte:
        return HR_U8;
    case ScalarType::Char:
        return HR_I8;
    case ScalarType::Short:
        return HR_I16;
    default:
        fail(entry(name, k) + " has dtype " + torch::headeronly::toString(tensor.scalar_type()) +
             ", wanted float32, bfloat16 or float16");
    }
}

// The device of a call and its current stream. `like` decides; the guard must outlive the call.
struct Exec {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    hr_exec exec;

    explicit Exec(const Tensor &like) : exec{HR_CPU, nullptr}
    {
        if (!like.is_cuda())
            return;
        const int32_t device = like.get_device_index();
        guard.emplace(device);
        exec.device = device;
        if (!aoti_torch_get_current_cuda_stream)
            fail("this build of torch has no CUDA streams, but got a CUDA tensor");
        void *stream = nullptr;
        if (aoti_torch_get_current_cuda_stream(device, &stream) != 0)
            fail("torch gave no current CUDA stream");
        exec.stream = static_cast<hr_stream>(stream);
    }
};

inline std::string device_name(const Tensor &tensor)
{
    return tensor.is_cuda()  ? "cuda:" + std::to_string(tensor.get_device_index())
           : tensor.is_cpu() ? "cpu"
                             : "another device";
}

inline bool same_device(const Tensor &a, const Tensor &b)
{
    return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// An optional scalar in the memory of the call's device, as the C interface takes it.
inline const float *scalar_of(const OptionalTensor &tensor, const Tensor &like, const char *name)
{
    if (!tensor)
        return nullptr;
    if (!same_device(*tensor, like))
        fail(std::string(name) + " is on " + device_name(*tensor) + ", but params[0] is on " +
             device_name(like));
    if (tensor->numel() != 1 || tensor->scalar_type() != torch::headeronly::ScalarType::Float)
        fail(std::string(name) + " must be a float32 tensor of one element");
    return static_cast<const float *>(tensor->const_data_ptr());
}

inline bool same_sizes(const Tensor &a, const Tensor &b)
{
    const auto left = a.sizes(), right = b.sizes();
    return left.size() == right.size() && std::equal(left.begin(), left.end(), right.begin());
}

// The parallel arrays behind an hr_tensor_list.
struct List {
    std::vector<void *> data;
    std::vector<int64_t> numel;
    std::vector<hr_dtype> dtype;

    void reserve(size_t count)
    {
        data.reserve(count);
        numel.reserve(count);
        dtype.reserve(count);
    }

    void add(const Tensor &tensor, const char *name, size_t k)
    {
        data.push_back(const_cast<void *>(tensor.const_data_ptr()));
        numel.push_back(tensor.numel());
        dtype.push_back(dtype_of(tensor, name, k));
    }

    hr_tensor_list view() const
    {
        return {static_cast<int64_t>(data.size()), data.data(), numel.data(), dtype.data()};
    }
};

} // namespace headroom
