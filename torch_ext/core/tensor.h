// tensor.h: turns torch tensors into arguments of the C interface: views, lists, scalars,
// workspace, the device and its stream; and registers ops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "torch_ext/core/errors.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "capi/headroom.h"
#include "torch_ext/core/table.h"

// Weak, because it is in libtorch_cuda, which CPU builds of torch do not have.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void **stream);

// Begins the function that registers ops with m.impl(), for tensors on the CPU and for those on
// CUDA.
#define HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)               \
    static void implement_ops(auto &m);                \
    STABLE_TORCH_LIBRARY_IMPL(headroom, CPU, library)  \
    {                                                  \
        implement_ops(library);                        \
    }                                                  \
    STABLE_TORCH_LIBRARY_IMPL(headroom, CUDA, library) \
    {                                                  \
        implement_ops(library);                        \
    }                                                  \
    static void implement_ops(auto &m)

namespace headroom
{

using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using OptionalTensor = std::optional<Tensor>;

// Throws, which becomes a RuntimeError in Python.
[[noreturn]] inline void fail(const std::string &message)
{
    throw std::runtime_error(message);
}

// Fails with the library's message unless the status is HR_OK.
inline void check(hr_status status)
{
    if (status != HR_OK)
        fail(std::string(hr_last_error()) + " (" + hr_status_string(status) + ")");
}

// The name of entry k of a list, for messages.
inline std::string entry(const char *name, size_t k)
{
    return std::string(name) + "[" + std::to_string(k) + "]";
}

// The hr_dtype of torch's number of a dtype, or -1 if the C interface has no such type.
inline int dtype_of(int32_t torch_dtype)
{
    static const std::pair<int32_t, hr_dtype> known[] = {
        {aoti_torch_dtype_float32(), HR_F32}, {aoti_torch_dtype_bfloat16(), HR_BF16},
        {aoti_torch_dtype_float16(), HR_F16}, {aoti_torch_dtype_float64(), HR_F64},
        {aoti_torch_dtype_uint8(), HR_U8},    {aoti_torch_dtype_int8(), HR_I8},
        {aoti_torch_dtype_int16(), HR_I16}};
    for (const auto &[number, dtype] : known)
        if (number == torch_dtype)
            return dtype;
    return -1;
}

// The facts of a tensor that a kernel needs. Each is a call into torch, so for lists of thousands
// of tensors they are read once.
struct View {
    const Tensor &tensor;
    void *data;
    int64_t dim, *sizes, *strides;
    int32_t torch_dtype, device_type, device_index;

    explicit View(const Tensor &t) : tensor(t)
    {
        const AtenTensorHandle handle = t.get();
        const void *address;
        TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &address));
        data = const_cast<void *>(address);
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &torch_dtype));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type));
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index));
    }

    int64_t numel() const
    {
        return std::accumulate(sizes, sizes + dim, int64_t{1}, std::multiplies<int64_t>());
    }

    bool is_contiguous() const
    {
        int64_t stride = 1;
        for (int64_t d = dim; d-- > 0; stride *= sizes[d])
            if (sizes[d] != 1 && strides[d] != stride)
                return numel() == 0;
        return true;
    }

    bool has_sizes_of(const View &other) const
    {
        return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
    }

    bool is_with(const View &other) const
    {
        return device_type == other.device_type && device_index == other.device_index;
    }

    bool is_cuda() const
    {
        return device_type == aoti_torch_device_type_cuda();
    }

    bool is_cpu() const
    {
        return device_type == aoti_torch_device_type_cpu();
    }

    std::string device_name() const
    {
        return is_cuda()  ? "cuda:" + std::to_string(device_index)
               : is_cpu() ? "cpu"
                          : "another device";
    }
};

// Fails unless a tensor is on the device of another, which messages call `of_name`.
inline void require_with(const View &view, const char *name, const View &of, const char *of_name)
{
    if (!view.is_with(of))
        fail(std::string(name) + " is on " + view.device_name() + ", but " + of_name + " is on " +
             of.device_name());
}

// Fails unless a tensor has the dtype of another.
inline void require_dtype_of(const View &view, const char *name, const View &of,
                             const char *of_name)
{
    if (view.torch_dtype != of.torch_dtype)
        fail(std::string(name) + " has dtype " +
             torch::headeronly::toString(view.tensor.scalar_type()) + ", but " + of_name + " has " +
             torch::headeronly::toString(of.tensor.scalar_type()));
}

// The device of `like` and its current stream, for a call. Must outlive the call, because it keeps
// the device current.
struct Exec {
    std::optional<torch::stable::accelerator::DeviceGuard> guard;
    hr_exec exec;

    explicit Exec(const View &like) : exec{HR_CPU, nullptr}
    {
        if (!like.is_cuda())
            return;
        guard.emplace(like.device_index);
        exec.device = like.device_index;
        if (!aoti_torch_get_current_cuda_stream)
            fail("this build of torch has no CUDA streams, but got a CUDA tensor");
        void *stream = nullptr;
        if (aoti_torch_get_current_cuda_stream(like.device_index, &stream) != 0)
            fail("torch gave no current CUDA stream");
        exec.stream = static_cast<hr_stream>(stream);
    }
};

// Fails if the storage of a tensor was freed: the C interface would take its NULL for an argument
// that is left out.
inline void require_memory(const View &view, const char *name)
{
    if (!view.data && view.numel() > 0)
        fail(std::string(name) +
             " has no memory: its storage was freed. Pass a tensor that has its "
             "elements, or leave the argument out");
}

// Returns a tensor whose elements follow one another in memory: the given one, or a copy. Fails if
// the storage was freed, which torch does not look at before it copies.
inline Tensor dense_of(const Tensor &tensor, const char *name)
{
    require_memory(View(tensor), name);
    return torch::stable::contiguous(tensor);
}

// The address of an optional float32 scalar on the call's device, or NULL.
inline const float *scalar_of(const OptionalTensor &tensor, const View &like, const char *name)
{
    if (!tensor)
        return nullptr;
    const View view(*tensor);
    require_with(view, name, like, "the list");
    if (view.numel() != 1 || dtype_of(view.torch_dtype) != HR_F32)
        fail(std::string(name) + " must be a float32 tensor of one element");
    require_memory(view, name);
    return static_cast<const float *>(view.data);
}

// Returns a tensor that nobody has written yet, in huge pages if the kernel grants them. The first
// access to a page that is new to the process stops the thread until the kernel has cleared it: for
// a large result that takes longer than to compute it, and with 512 times fewer pages a tenth of it.
inline Tensor in_huge_pages(Tensor tensor)
{
#if defined(__linux__)
    constexpr size_t HUGE_PAGE = size_t{2} << 20;
    static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
    if (bytes < HUGE_PAGE || !tensor.is_cpu())
        return tensor;
    const size_t data = reinterpret_cast<size_t>(tensor.const_data_ptr());
    const size_t first = data / page * page; // the memory around it may have huge pages too
    madvise(reinterpret_cast<void *>(first), data + bytes - first, MADV_HUGEPAGE);
#endif
    return tensor;
}

// Allocates a tensor on the device of `like`, and of its dtype unless another is given.
inline Tensor new_tensor(const Tensor &like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                         std::optional<torch::headeronly::ScalarType> type = std::nullopt)
{
    return in_huge_pages(torch::stable::new_empty(like, sizes, type));
}

// The doubles that workspace of so many bytes is allocated as.
inline int64_t doubles_of(size_t bytes)
{
    return static_cast<int64_t>((bytes + 7) / 8);
}

// Allocates workspace on the device of `like`. It comes from torch's allocator, so it is safe to
// free it before the current stream has run the work.
inline Tensor workspace_of(size_t bytes, const Tensor &like)
{
    const int64_t doubles = doubles_of(bytes);
    return new_tensor(like, {&doubles, 1}, torch::headeronly::ScalarType::Double);
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

    void add(const View &view, const char *name, size_t k)
    {
        const int known = dtype_of(view.torch_dtype);
        if (known < 0)
            fail(entry(name, k) + " has dtype " +
                 torch::headeronly::toString(view.tensor.scalar_type()) +
                 ", wanted float32, bfloat16 or float16");
        data.push_back(view.data);
        numel.push_back(view.numel());
        dtype.push_back(static_cast<hr_dtype>(known));
    }

    hr_tensor_list view() const
    {
        return {static_cast<int64_t>(data.size()), data.data(), numel.data(), dtype.data()};
    }
};

// List `index` of a table that headroom._C wrote (table.h). The table must outlive the list.
inline hr_tensor_list list_of(const Tensor &table, int64_t index)
{
    const int64_t count = table.size(2);
    const auto *const rows =
        static_cast<const int64_t *>(table.const_data_ptr()) + index * ROWS * count;
    return {count, reinterpret_cast<void *const *>(rows + DATA * count), rows + NUMEL * count,
            reinterpret_cast<const hr_dtype *>(rows + DTYPE * count)};
}

// Fails unless the table has the shape of `lists` lists.
inline void check_table(const Tensor &table, int64_t lists)
{
    const View view(table);
    if (!view.is_cpu() || view.torch_dtype != aoti_torch_dtype_int64() || view.dim != 3 ||
        view.sizes[0] != lists || view.sizes[1] != ROWS || !view.is_contiguous())
        fail("table must be a contiguous int64 tensor [" + std::to_string(lists) + ", " +
             std::to_string(int{ROWS}) + ", count] on the CPU");
}

} // namespace headroom
