// cross_entropy.cpp: headroom::cross_entropy and its backward ops, apart and over the logits.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/core/numbers.h"
#include "torch_ext/loss/loss_rows.h"

namespace
{

using namespace headroom;

// The numbers that all ops take.
#define NUMBERS(of) \
    of(int, ignore_index) of(float, label_smoothing) of(float, softcap) of(float, z_loss)

// Logits, their targets and the weights of classes.
class Loss : public LossRows
{
  public:
    Loss(const Tensor &logits, const Tensor &target,
         const OptionalTensor &weight NUMBERS(HR_PARAMETER))
        : LossRows(logits, "logits")
    {
        config.dtype = config.grad_dtype = float_of(in, "logits");
        NUMBERS(HR_SET)
        this->target = targets(target, &config.target_bytes,
                               ", which is that of the classes; move it there with "
                               "logits.movedim(1, -1)");
        if (weight)
            this->weight = vector(*weight, "weight", matrix.cols);
    }

    hr_cross_entropy_config config = HR_CROSS_ENTROPY_CONFIG_INIT;
    const void *target = nullptr;
    const float *weight = nullptr;
};

// The loss, lse, what rounding took off it, argmax, and factors for the backward op.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>
cross_entropy(const Tensor &logits, const Tensor &target,
              const OptionalTensor &weight NUMBERS(HR_PARAMETER), int64_t reduction,
              bool want_argmax, bool)
{
    const hr_cross_entropy_reduction reduces_to = reduction_of(reduction);
    Loss loss(logits, target, weight NUMBERS(HR_ARGUMENT));
    const RowsIn in(logits, "logits");
    const bool reduces = reduction != NONE;
    Tensor rows = loss.of_rows(true), lse = loss.of_rows(true), low = loss.of_rows(true);
    Tensor argmax = loss.of_rows(want_argmax, ScalarType::Long);
    const int64_t two = reduces ? 2 : 0;
    Tensor factors = new_tensor(logits, {&two, 1}, ScalarType::Float);
    loss.config.z_loss = reduces ? 0.0 : z_loss; // which the reduction adds
    check(hr_cross_entropy_forward(data_of<float>(rows), data_of<float>(lse), data_of<float>(low),
                                   data_of<int64_t>(argmax, want_argmax), in.get(), loss.target,
                                   loss.weight, loss.matrix.rows, loss.matrix.cols, &loss.config,
                                   &loss.exec.exec));
    if (!reduces)
        return {rows, lse, low, argmax, factors};
    loss.config.reduction = reduces_to;
    loss.config.z_loss = z_loss;
    loss.config.workspace_bytes = HR_CROSS_ENTROPY_WORKSPACE;
    const bool on_cuda = loss.exec.exec.device != HR_CPU;
    const Tensor workspace = workspace_of(on_cuda ? HR_CROSS_ENTROPY_WORKSPACE : 0, logits);
    loss.config.workspace = data_of<void>(workspace, on_cuda);
    Tensor result = new_tensor(logits, {&two, size_t{0}}, ScalarType::Float);
    check(hr_cross_entropy_reduce(data_of<float>(result), data_of<float>(factors),
                                  data_of<float>(rows), data_of<float>(lse), loss.target,
                                  loss.weight, loss.matrix.rows, loss.matrix.cols, &loss.config,
                                  &loss.exec.exec));
    return {result, lse, low, argmax, factors};
}

void backward(Loss &loss, const hr_rows *grad, const hr_rows *logits, const Tensor &dloss,
              const Tensor &lse, const Tensor &lse_low, const Tensor &factors)
{
    int64_t stride = 0;
    const float *const gradients = loss.gradients(dloss, &stride);
    const View view(factors);
    const int64_t rows = loss.matrix.rows;
    check(hr_cross_entropy_backward(
        grad, gradients, stride, view.numel() == 0 ? nullptr : loss.vector(factors, "factors", 2),
        logits, loss.target, loss.weight, loss.vector(lse, "lse", rows),
        loss.vector(lse_low, "lse_low", rows), rows, loss.matrix.cols, &loss.config,
        &loss.exec.exec));
}

Tensor cross_entropy_backward(const Tensor &dloss, const Tensor &logits, const Tensor &target,
                              const OptionalTensor &weight, const Tensor &lse,
                              const Tensor &lse_low, const Tensor &factors NUMBERS(HR_PARAMETER))
{
    Loss loss(logits, target, weight NUMBERS(HR_ARGUMENT));
    const RowsIn in(logits, "logits");
    Tensor grad = empty_rows(loss.in, logits);
    const hr_rows rows = rows_of(grad);
    backward(loss, &rows, in.get(), dloss, lse, lse_low, factors);
    return grad;
}

void cross_entropy_backward_(const Tensor &dloss, Tensor logits, const Tensor &target,
                             const OptionalTensor &weight, const Tensor &lse, const Tensor &lse_low,
                             const Tensor &factors NUMBERS(HR_PARAMETER))
{
    Loss loss(logits, target, weight NUMBERS(HR_ARGUMENT));
    const RowsIn in(logits, "logits"); // a copy where the rows are not evenly spaced
    const hr_rows *const rows = in.get();
    if (rows->data == loss.in.data || loss.in.numel() == 0) {
        backward(loss, rows, rows, dloss, lse, lse_low, factors);
        return;
    }
    Tensor grad = empty_rows(loss.in, logits);
    const hr_rows apart = rows_of(grad);
    backward(loss, &apart, rows, dloss, lse, lse_low, factors);
    torch::stable::copy_(logits, grad);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("cross_entropy(Tensor logits, Tensor target, Tensor? weight" NUMBERS(
        HR_SCHEMA) ", int reduction, bool want_argmax, bool in_place) -> "
                   "(Tensor loss, Tensor lse, Tensor lse_low, Tensor argmax, Tensor factors)");
    m.def("cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, "
          "Tensor lse, Tensor lse_low, Tensor factors" NUMBERS(HR_SCHEMA) ") -> Tensor dlogits");
    m.def(
        "cross_entropy_backward_(Tensor dloss, Tensor(a!) logits, Tensor target, "
        "Tensor? weight, Tensor lse, Tensor lse_low, Tensor factors" NUMBERS(HR_SCHEMA) ") -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
    m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
    m.impl("cross_entropy_backward_", TORCH_BOX(&cross_entropy_backward_));
}
