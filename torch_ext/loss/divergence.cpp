// divergence.cpp: headroom::divergence and its backward ops, into a new tensor and into a given one.
#include <tuple>

#include "torch_ext/loss/loss_rows.h"

namespace
{

using namespace headroom;

// The logits of both, and which rows are ignored.
class Divergence : public LossRows
{
  public:
    Divergence(const Tensor &student, const Tensor &teacher, const OptionalTensor &ignored,
               double beta, double temperature)
        : LossRows(student, "student"),
          teacher(require_like(in, "student", teacher, "teacher"), "teacher")
    {
        config.dtype = config.grad_dtype = float_of(in, "student");
        config.beta = beta;
        config.temperature = temperature;
        if (!ignored)
            return;
        const View view(*ignored);
        if (view.torch_dtype != aoti_torch_dtype_bool() || !has_rows(view) || !view.is_with(in))
            fail("ignored must be a bool tensor of the shape of student without the last dimension "
                 "on " +
                 in.device_name());
        this->ignored = static_cast<const uint8_t *>(dense(*ignored, "ignored"));
    }

    const float *statistics(const Tensor &tensor)
    {
        const View view(tensor);
        if (!view.is_with(in) || dtype_of(view.torch_dtype) != HR_F32 ||
            view.numel() != matrix.rows * HR_DIVERGENCE_STATISTICS)
            fail("statistics must be what headroom::divergence returned, a float32 tensor of " +
                 std::to_string(matrix.rows * HR_DIVERGENCE_STATISTICS) + " elements on " +
                 in.device_name());
        return static_cast<const float *>(dense(tensor, "statistics"));
    }

    const RowsIn teacher;
    hr_divergence_config config = HR_DIVERGENCE_CONFIG_INIT;
    const uint8_t *ignored = nullptr;
};

// The loss of each row, and what the backward ops need.
std::tuple<Tensor, Tensor> divergence(const Tensor &student, const Tensor &teacher,
                                      const OptionalTensor &ignored, double beta,
                                      double temperature, bool)
{
    Divergence of(student, teacher, ignored, beta, temperature);
    const RowsIn in(student, "student");
    Tensor loss = of.of_rows(true);
    const int64_t shape[] = {of.matrix.rows, HR_DIVERGENCE_STATISTICS};
    Tensor statistics = new_tensor(student, {shape, 2}, ScalarType::Float);
    check(hr_divergence_forward(data_of<float>(loss), data_of<float>(statistics), in.get(),
                                of.teacher.get(), of.ignored, of.matrix.rows, of.matrix.cols,
                                &of.config, &of.exec.exec));
    return {loss, statistics};
}

void backward(Divergence &of, const hr_rows *grad, const hr_rows *student, const Tensor &dloss,
              const Tensor &statistics)
{
    int64_t stride = 0;
    const float *const gradients = of.gradients(dloss, &stride);
    check(hr_divergence_backward(grad, gradients, stride, student, of.teacher.get(), of.ignored,
                                 of.statistics(statistics), of.matrix.rows, of.matrix.cols,
                                 &of.config, &of.exec.exec));
}

Tensor divergence_backward(const Tensor &dloss, const Tensor &student, const Tensor &teacher,
                           const OptionalTensor &ignored, const Tensor &statistics, double beta,
                           double temperature)
{
    Divergence of(student, teacher, ignored, beta, temperature);
    const RowsIn in(student, "student");
    Tensor grad = empty_rows(of.in, student);
    const hr_rows rows = rows_of(grad);
    backward(of, &rows, in.get(), dloss, statistics);
    return grad;
}

// Writes the gradient into `grad`, which may be the student's logits, or lie over them in a narrower
// type.
void divergence_backward_(const Tensor &dloss, const Tensor &student, const Tensor &teacher,
                          const OptionalTensor &ignored, const Tensor &statistics, double beta,
                          double temperature, Tensor grad)
{
    Divergence of(student, teacher, ignored, beta, temperature);
    const View to(grad);
    if (!to.has_sizes_of(of.in) || !to.is_with(of.in))
        fail("grad must have the shape and device of student");
    of.config.grad_dtype = float_of(to, "grad");
    const RowsIn in(student, "student"),
        out(grad, "grad"); // copies where rows are not evenly spaced
    if (out.get()->data == to.data || to.numel() == 0) {
        backward(of, out.get(), in.get(), dloss, statistics);
        return;
    }
    Tensor apart = empty_rows(to, grad);
    const hr_rows rows = rows_of(apart);
    backward(of, &rows, in.get(), dloss, statistics);
    torch::stable::copy_(grad, apart);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("divergence(Tensor student, Tensor teacher, Tensor? ignored, float beta, "
          "float temperature, bool in_place) -> "
          "(Tensor loss, Tensor statistics)");
    m.def("divergence_backward(Tensor dloss, Tensor student, Tensor teacher, Tensor? ignored, "
          "Tensor statistics, float beta, float temperature) -> Tensor dstudent");
    m.def("divergence_backward_(Tensor dloss, Tensor student, Tensor teacher, Tensor? ignored, "
          "Tensor statistics, float beta, float temperature, Tensor(a!) grad) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("divergence", TORCH_BOX(&divergence));
    m.impl("divergence_backward", TORCH_BOX(&divergence_backward));
    m.impl("divergence_backward_", TORCH_BOX(&divergence_backward_));
}
