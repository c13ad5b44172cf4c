// divergence.cpp: headroom::divergence and its backward ops, into a new tensor and into a given one.
#include <tuple>

#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;
using torch::headeronly::ScalarType;

// The logits of both, and which rows are ignored.
class Divergence
{
  public:
    Divergence(const Tensor &student, const Tensor &teacher, const OptionalTensor &ignored,
               double beta, double temperature)
        : student(student), matrix(matrix_of(this->student, "student")), exec(this->student),
          teacher(require_like(this->student, "student", teacher, "teacher"), "teacher")
    {
        config.dtype = config.grad_dtype = float_of(this->student, "student");
        config.beta = beta;
        config.temperature = temperature;
        if (!ignored)
            return;
        const View view(*ignored);
        if (view.torch_dtype != aoti_torch_dtype_bool() || !has_rows(view) ||
            !view.is_with(this->student))
            fail("ignored must be a bool tensor of the shape of student without the last dimension "
                 "on " +
                 this->student.device_name());
        this->ignored = static_cast<const uint8_t *>(dense(*ignored, "ignored"));
    }

    bool has_rows(const View &view) const
    {
        return view.dim == student.dim - 1 &&
               std::equal(view.sizes, view.sizes + view.dim, student.sizes);
    }

    const float *statistics(const Tensor &tensor)
    {
        const View view(tensor);
        if (!view.is_with(student) || dtype_of(view.torch_dtype) != HR_F32 ||
            view.numel() != matrix.rows * HR_DIVERGENCE_STATISTICS)
            fail("statistics must be what headroom::divergence returned, a float32 tensor of " +
                 std::to_string(matrix.rows * HR_DIVERGENCE_STATISTICS) + " elements on " +
                 student.device_name());
        return static_cast<const float *>(dense(tensor, "statistics"));
    }

    // The gradients of the rows, in one stride: 0 for a scalar and for an expanded one.
    const float *gradients(const Tensor &tensor, int64_t *stride)
    {
        const View view(tensor);
        if (!view.is_with(student) || dtype_of(view.torch_dtype) != HR_F32 ||
            (view.dim != 0 && !has_rows(view)))
            fail("dloss must be a float32 tensor of one element or of the shape of student without "
                 "the last dimension on " +
                 student.device_name());
        const bool expanded = std::all_of(view.strides, view.strides + view.dim,
                                          [](int64_t step) { return step == 0; });
        *stride = expanded ? 0 : 1;
        if (!expanded)
            return static_cast<const float *>(dense(tensor, "dloss"));
        require_memory(view, "dloss");
        return static_cast<const float *>(view.data);
    }

    const View student;
    const Matrix matrix;
    const Exec exec;
    const RowsIn teacher;
    hr_divergence_config config = HR_DIVERGENCE_CONFIG_INIT;
    const uint8_t *ignored = nullptr;

  private:
    const void *dense(const Tensor &tensor, const char *name)
    {
        kept_.push_back(torch::stable::contiguous(tensor));
        const View view(kept_.back());
        require_memory(view, name);
        return view.data;
    }

    Tensors kept_;
};

// The loss of each row, and what the backward ops need.
std::tuple<Tensor, Tensor> divergence(const Tensor &student, const Tensor &teacher,
                                      const OptionalTensor &ignored, double beta,
                                      double temperature, bool)
{
    Divergence of(student, teacher, ignored, beta, temperature);
    const RowsIn in(student, "student");
    const size_t last = static_cast<size_t>(of.student.dim - 1);
    Tensor loss = torch::stable::new_empty(student, {of.student.sizes, last}, ScalarType::Float);
    const int64_t shape[] = {of.matrix.rows, HR_DIVERGENCE_STATISTICS};
    Tensor statistics = torch::stable::new_empty(student, {shape, 2}, ScalarType::Float);
    check(hr_divergence_forward(static_cast<float *>(loss.mutable_data_ptr()),
                                static_cast<float *>(statistics.mutable_data_ptr()), in.get(),
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
    Tensor grad = empty_rows(of.student, student);
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
    if (!to.has_sizes_of(of.student) || !to.is_with(of.student))
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
          "Tensor statistics, float beta, float temperature) -> Tensor");
    m.def("divergence_backward_(Tensor dloss, Tensor student, Tensor teacher, Tensor? ignored, "
          "Tensor statistics, float beta, float temperature, Tensor(a!) grad) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("divergence", TORCH_BOX(&divergence));
    m.impl("divergence_backward", TORCH_BOX(&divergence_backward));
    m.impl("divergence_backward_", TORCH_BOX(&divergence_backward_));
}
