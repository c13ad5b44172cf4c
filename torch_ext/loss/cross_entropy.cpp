// cross_entropy.cpp: headroom::cross_entropy and its backward ops, apart and over the logits.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;
using torch::headeronly::ScalarType;

// The numbers of torch.nn.functional's reductions, and one of ours.
enum Reduction { NONE = 0, MEAN = 1, SUM = 2, MEAN_OR_ZERO = 3 };

// Logits, their targets and the weights of classes.
class Loss
{
  public:
    Loss(const Tensor &logits, const Tensor &target, const OptionalTensor &weight,
         int64_t ignore_index, double label_smoothing, double softcap, double z_loss)
        : logits(logits), matrix(matrix_of(this->logits, "logits")), exec(this->logits)
    {
        config.dtype = config.grad_dtype = float_of(this->logits, "logits");
        config.ignore_index = ignore_index;
        config.label_smoothing = label_smoothing;
        config.softcap = softcap;
        config.z_loss = z_loss;
        set_target(target);
        if (weight)
            this->weight = vector(*weight, "weight", matrix.cols);
    }

    // A vector of binary32, dense.
    const float *vector(const Tensor &tensor, const char *name, int64_t numel)
    {
        const View view(tensor);
        if (!view.is_with(logits) || dtype_of(view.torch_dtype) != HR_F32 || view.numel() != numel)
            fail(std::string(name) + " must be a float32 tensor of " + std::to_string(numel) +
                 " elements on " + logits.device_name());
        return static_cast<const float *>(dense(tensor, name));
    }

    // A new tensor in the shape of the rows.
    Tensor of_rows(bool wanted, ScalarType type) const
    {
        const int64_t none = 0;
        if (!wanted)
            return torch::stable::new_empty(logits.tensor, {&none, 1}, type);
        return torch::stable::new_empty(logits.tensor,
                                        {logits.sizes, static_cast<size_t>(logits.dim - 1)}, type);
    }

    const View logits;
    const Matrix matrix;
    const Exec exec;
    hr_cross_entropy_config config = HR_CROSS_ENTROPY_CONFIG_INIT;
    const void *target = nullptr;
    const float *weight = nullptr;

  private:
    const void *dense(const Tensor &tensor, const char *name)
    {
        kept_.push_back(torch::stable::contiguous(tensor));
        const View view(kept_.back());
        require_memory(view, name);
        return view.data;
    }

    void set_target(const Tensor &tensor)
    {
        const View view(tensor);
        const bool is_int32 = view.torch_dtype == aoti_torch_dtype_int32();
        if (!is_int32 && view.torch_dtype != aoti_torch_dtype_int64())
            fail(std::string("target has dtype ") +
                 torch::headeronly::toString(tensor.scalar_type()) +
                 ", wanted int64 or int32: the number of a class per row");
        if (view.dim != logits.dim - 1 ||
            !std::equal(view.sizes, view.sizes + view.dim, logits.sizes))
            fail("target must have the shape of logits without the last dimension, which is that "
                 "of the classes; move it there with logits.movedim(1, -1)");
        if (!view.is_with(logits))
            fail("target is on " + view.device_name() + ", but logits is on " +
                 logits.device_name());
        target = dense(tensor, "target");
        config.target_bytes = is_int32 ? 4 : 8;
    }

    Tensors kept_;
};

template <typename T> T *data_of(const Tensor &tensor, bool wanted = true)
{
    return wanted ? static_cast<T *>(tensor.mutable_data_ptr()) : nullptr;
}

// The loss, lse, what rounding took off it, argmax, and factors for the backward op.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
cross_entropy(const Tensor &logits, const Tensor &target, const OptionalTensor &weight,
              int64_t ignore_index, int64_t reduction, double label_smoothing, double softcap,
              double z_loss, bool want_argmax, bool)
{
    if (reduction < NONE || reduction > MEAN_OR_ZERO)
        fail("reduction is " + std::to_string(reduction) + ", wanted 0, 1, 2 or 3");
    Loss loss(logits, target, weight, ignore_index, label_smoothing, softcap, z_loss);
    const RowsIn in(logits, "logits");
    const bool reduces = reduction != NONE;
    Tensor rows = loss.of_rows(true, ScalarType::Float),
           lse = loss.of_rows(true, ScalarType::Float);
    Tensor low = loss.of_rows(true, ScalarType::Float);
    Tensor argmax = loss.of_rows(want_argmax, ScalarType::Long);
    const int64_t two = reduces ? 2 : 0;
    Tensor factors = torch::stable::new_empty(logits, {&two, 1}, ScalarType::Float);
    check(hr_cross_entropy_forward(data_of<float>(rows), data_of<float>(lse), data_of<float>(low),
                                   data_of<int64_t>(argmax, want_argmax), in.get(), loss.target,
                                   loss.weight, loss.matrix.rows, loss.matrix.cols, &loss.config,
                                   &loss.exec.exec));
    if (!reduces)
        return {rows, lse, low, argmax, factors};
    loss.config.reduction = reduction == SUM    ? HR_REDUCE_SUM
                            : reduction == MEAN ? HR_REDUCE_MEAN
                                                : HR_REDUCE_MEAN_OR_ZERO;
    Tensor result = torch::stable::new_empty(logits, {&two, size_t{0}}, ScalarType::Float);
    check(hr_cross_entropy_reduce(data_of<float>(result), data_of<float>(factors),
                                  data_of<float>(rows), data_of<float>(lse), loss.target,
                                  loss.weight, loss.matrix.rows, loss.matrix.cols, &loss.config,
                                  &loss.exec.exec));
    return {result, lse, low, argmax, factors};
}

// The gradients of the rows, in one stride: 0 for a scalar and for an expanded one.
class Gradients
{
  public:
    Gradients(const Tensor &tensor, const Loss &loss) : tensor_(tensor)
    {
        const View view(tensor);
        const bool scalar = view.dim == 0;
        if (!view.is_with(loss.logits) || dtype_of(view.torch_dtype) != HR_F32 ||
            (!scalar && (view.dim != loss.logits.dim - 1 ||
                         !std::equal(view.sizes, view.sizes + view.dim, loss.logits.sizes))))
            fail("dloss must be a float32 tensor of one element or of the shape of target on " +
                 loss.logits.device_name());
        const bool expanded = std::all_of(view.strides, view.strides + view.dim,
                                          [](int64_t stride) { return stride == 0; });
        if (expanded) {
            stride = 0;
        } else if (view.dim == 1) {
            stride = view.strides[0];
        } else {
            tensor_ = torch::stable::contiguous(tensor);
            stride = 1;
        }
        const View used(tensor_);
        require_memory(used, "dloss");
        data = static_cast<const float *>(used.data);
    }

    const float *data;
    int64_t stride;

  private:
    Tensor tensor_;
};

void backward(Loss &loss, const hr_rows *grad, const hr_rows *logits, const Tensor &dloss,
              const Tensor &lse, const Tensor &lse_low, const Tensor &factors)
{
    const Gradients gradients(dloss, loss);
    const View view(factors);
    const int64_t rows = loss.matrix.rows;
    check(hr_cross_entropy_backward(
        grad, gradients.data, gradients.stride,
        view.numel() == 0 ? nullptr : loss.vector(factors, "factors", 2), logits, loss.target,
        loss.weight, loss.vector(lse, "lse", rows), loss.vector(lse_low, "lse_low", rows), rows,
        loss.matrix.cols, &loss.config, &loss.exec.exec));
}

Tensor cross_entropy_backward(const Tensor &dloss, const Tensor &logits, const Tensor &target,
                              const OptionalTensor &weight, const Tensor &lse,
                              const Tensor &lse_low, const Tensor &factors, int64_t ignore_index,
                              double label_smoothing, double softcap, double z_loss)
{
    Loss loss(logits, target, weight, ignore_index, label_smoothing, softcap, z_loss);
    const RowsIn in(logits, "logits");
    Tensor grad = empty_rows(loss.logits, logits);
    const hr_rows rows = rows_of(grad);
    backward(loss, &rows, in.get(), dloss, lse, lse_low, factors);
    return grad;
}

void cross_entropy_backward_(const Tensor &dloss, Tensor logits, const Tensor &target,
                             const OptionalTensor &weight, const Tensor &lse, const Tensor &lse_low,
                             const Tensor &factors, int64_t ignore_index, double label_smoothing,
                             double softcap, double z_loss)
{
    Loss loss(logits, target, weight, ignore_index, label_smoothing, softcap, z_loss);
    const RowsIn in(logits, "logits"); // a copy where the rows are not evenly spaced
    const hr_rows *const rows = in.get();
    if (rows->data == loss.logits.data || loss.logits.numel() == 0) {
        backward(loss, rows, rows, dloss, lse, lse_low, factors);
        return;
    }
    Tensor grad = empty_rows(loss.logits, logits);
    const hr_rows apart = rows_of(grad);
    backward(loss, &apart, rows, dloss, lse, lse_low, factors);
    torch::stable::copy_(logits, grad);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
          "int reduction, float label_smoothing, float softcap, float z_loss, bool want_argmax, "
          "bool in_place) -> "
          "(Tensor loss, Tensor lse, Tensor lse_low, Tensor argmax, Tensor factors)");
    m.def("cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, "
          "Tensor lse, Tensor lse_low, Tensor factors, int ignore_index, float label_smoothing, "
          "float softcap, float z_loss) -> Tensor");
    m.def("cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, Tensor target, "
          "Tensor? weight, Tensor lse, Tensor lse_low, Tensor factors, int ignore_index, "
          "float label_smoothing, float softcap, float z_loss) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
    m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}
