// describe.cpp: reads addresses, sizes and types of thousands of tensors without torch's
// dispatcher.
//
// Passing a list of tensors to an op costs more than updating small ones. DLPack's exchange API
// (`__dlpack_c_exchange_api__`) gives a view of a tensor for the price of a function call. It is
// read anew in every step, so nothing that could have changed is remembered. Only tensors that need
// no copy are described; for all others the caller passes lists to the op, which copies, or fails
// with a message.
#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include <ATen/dlpack.h>
#include <pybind11/pybind11.h>

#include "torch_ext/python/describe.h"
#include "capi/headroom.h"
#include "torch_ext/core/table.h"

namespace headroom
{

namespace
{

int dtype_of(DLDataType type)
{
    if (type.lanes != 1)
        return -1;
    switch (type.code * 256 + type.bits) {
    case kDLFloat * 256 + 32:
        return HR_F32;
    case kDLBfloat * 256 + 16:
        return HR_BF16;
    case kDLFloat * 256 + 16:
        return HR_F16;
    case kDLFloat * 256 + 64:
        return HR_F64;
    case kDLUInt * 256 + 8:
        return HR_U8;
    case kDLInt * 256 + 8:
        return HR_I8;
    case kDLInt * 256 + 16:
        return HR_I16;
    default:
        return -1;
    }
}

// The stride of dimension d; a view without strides is row-major.
int64_t stride_of(const DLTensor &view, int32_t d)
{
    if (view.strides)
        return view.strides[d];
    return std::accumulate(view.shape + d + 1, view.shape + view.ndim, int64_t{1},
                           std::multiplies<int64_t>());
}

bool is_empty(const DLTensor &view)
{
    return std::find(view.shape, view.shape + view.ndim, 0) != view.shape + view.ndim;
}

bool is_contiguous(const DLTensor &view)
{
    int64_t stride = 1;
    for (int32_t d = view.ndim; d-- > 0; stride *= view.shape[d])
        if (view.shape[d] != 1 && stride_of(view, d) != stride)
            return false;
    return true;
}

// Whether the elements lie together in memory, in any order of the dimensions.
bool is_dense(const DLTensor &view)
{
    if (is_empty(view) || is_contiguous(view))
        return true;
    std::vector<std::pair<int64_t, int64_t>> order;
    for (int32_t d = 0; d < view.ndim; d++)
        if (view.shape[d] != 1)
            order.emplace_back(stride_of(view, d), view.shape[d]);
    std::sort(order.begin(), order.end());
    int64_t run = 1;
    for (const auto &[stride, size] : order) {
        if (stride != run)
            return false;
        run *= size;
    }
    return true;
}

// Whether two tensors have the same shape and the same memory order.
bool is_like(const DLTensor &a, const DLTensor &b)
{
    if (a.ndim != b.ndim || !std::equal(a.shape, a.shape + a.ndim, b.shape))
        return false;
    for (int32_t d = 0; d < a.ndim; d++)
        if (a.shape[d] != 1 && stride_of(a, d) != stride_of(b, d))
            return is_empty(a);
    return true;
}

constexpr size_t AHEAD = 8; // tensors to prefetch

// A tensor of a list, which has a floating-point type; a state with the shape and the memory order
// of its parameter; any other state.
enum Kind { LISTED, PARAM_LIKE, EXTRA };

class Table
{
  public:
    Table(uintptr_t address, size_t count, DLPackDLTensorFromPyObjectNoSync view_of,
          std::vector<PyObject *> types)
        : out_(reinterpret_cast<int64_t *>(address)), count_(count), view_of_(view_of),
          types_(std::move(types))
    {
    }

    // Whether the type of a tensor is one of those that can be described.
    bool knows(PyObject *tensor) const
    {
        auto *const type = reinterpret_cast<PyObject *>(Py_TYPE(tensor));
        return std::find(types_.begin(), types_.end(), type) != types_.end();
    }

    // Prefetches an object, and the memory that another object, prefetched earlier, points to: the
    // first words of a tensor hold the address of its implementation. After a step on large tensors
    // none of them is in a cache.
    void prefetch(PyObject *object, PyObject *tensor) const
    {
        if (object)
            __builtin_prefetch(object);
        if (!tensor || !knows(tensor))
            return;
        const auto *const words = reinterpret_cast<const uintptr_t *>(tensor);
        for (const size_t word : {2, 3})
            for (const size_t line : {0, 64, 128})
                __builtin_prefetch(reinterpret_cast<const void *>(words[word] + line));
    }

    // Writes entry k of a list. False if the tensor cannot be described, or does not have the
    // layout of entry k of the first list although its kind needs it.
    bool add(size_t list, size_t k, PyObject *tensor, Kind kind)
    {
        if (!knows(tensor))
            return false;
        DLTensor view;
        if (view_of_(tensor, &view) != 0) {
            PyErr_Clear(); // the op will fail with a better message
            return false;
        }
        if (list == 0)
            like_ = view;
        if (list == 0 && k == 0)
            device_ = view.device;
        const int dtype = dtype_of(view.dtype);
        const bool is_float = dtype == HR_F32 || dtype == HR_BF16 || dtype == HR_F16;
        if (dtype < 0 || (kind == LISTED && !is_float) ||
            view.device.device_type != device_.device_type ||
            view.device.device_id != device_.device_id)
            return false;
        if (list == 0 || kind == EXTRA ? !is_dense(view) : !is_like(view, like_))
            return false;
        int64_t numel = 1;
        for (int32_t d = 0; d < view.ndim; d++)
            numel *= view.shape[d];
        int64_t *const rows = out_ + list * ROWS * count_;
        rows[DATA * count_ + k] =
            reinterpret_cast<int64_t>(static_cast<char *>(view.data) + view.byte_offset);
        rows[NUMEL * count_ + k] = numel;
        reinterpret_cast<hr_dtype *>(rows + DTYPE * count_)[k] = static_cast<hr_dtype>(dtype);
        return true;
    }

  private:
    int64_t *const out_;
    const size_t count_;
    const DLPackDLTensorFromPyObjectNoSync view_of_;
    const std::vector<PyObject *> types_;
    DLTensor like_{};
    DLDevice device_{};
};

DLPackDLTensorFromPyObjectNoSync exchange_of(const py::capsule &capsule)
{
    const auto *const api = static_cast<const DLPackExchangeAPI *>(
        PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api)
        throw py::error_already_set();
    if (api->header.version.major != DLPACK_MAJOR_VERSION || !api->dltensor_from_py_object_no_sync)
        throw py::value_error("this torch speaks another DLPack");
    return api->dltensor_from_py_object_no_sync;
}

std::vector<PyObject *> items_of(const py::tuple &tuple)
{
    std::vector<PyObject *> items;
    for (const py::handle item : tuple)
        items.push_back(item.ptr());
    return items;
}

// A borrowed value of a dict, or null.
PyObject *item(PyObject *dict, PyObject *key)
{
    if (!dict || !PyDict_Check(dict))
        return nullptr;
    PyObject *const value = PyDict_GetItemWithError(dict, key);
    if (!value && PyErr_Occurred())
        throw py::error_already_set();
    return value;
}

} // namespace

bool describe(uintptr_t address, const py::capsule &exchange, const py::tuple &types,
              const py::tuple &lists, const py::object &state, const py::tuple &param_like,
              const py::tuple &extra)
{
    const std::vector<PyObject *> columns = items_of(lists);
    const size_t count = py::len(lists[0]);
    for (PyObject *const list : columns)
        if (!PyList_CheckExact(list) || static_cast<size_t>(PyList_GET_SIZE(list)) != count)
            return false;
    std::vector<std::pair<PyObject *, Kind>> names;
    for (PyObject *const name : items_of(param_like))
        names.emplace_back(name, PARAM_LIKE);
    for (PyObject *const name : items_of(extra))
        names.emplace_back(name, EXTRA);
    Table table(address, count, exchange_of(exchange), items_of(types));
    // All tensors are looked up before the first is read, so that prefetching knows which come
    // next.
    const size_t rows = columns.size() + names.size();
    std::vector<PyObject *> tensors;
    tensors.reserve(count * rows);
    for (size_t k = 0; k < count; k++) {
        for (PyObject *const list : columns)
            tensors.push_back(PyList_GET_ITEM(list, k));
        PyObject *const first = PyList_GET_ITEM(columns[0], k);
        if (!table.knows(first)) // saves looking up the states of the others
            return false;
        PyObject *const entry = names.empty() ? nullptr : item(state.ptr(), first);
        for (const auto &[name, kind] : names) {
            PyObject *const tensor = item(entry, name);
            if (!tensor)
                return false;
            tensors.push_back(tensor);
        }
    }
    for (size_t i = 0; i < tensors.size(); i++) {
        table.prefetch(i + 2 * AHEAD < tensors.size() ? tensors[i + 2 * AHEAD] : nullptr,
                       i + AHEAD < tensors.size() ? tensors[i + AHEAD] : nullptr);
        const size_t row = i % rows;
        const Kind kind = row < columns.size() ? LISTED : names[row - columns.size()].second;
        if (!table.add(row, i / rows, tensors[i], kind))
            return false;
    }
    return true;
}

} // namespace headroom
