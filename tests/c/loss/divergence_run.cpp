#include "tests/c/loss/divergence_run.h"

#include "tests/c/loss/made.h"

namespace
{

Tensors::Value logits_of(const DivergenceCase &c, bool teacher)
{
    return [=](size_t, size_t i) {
        const double one = made_logit(1 + teacher, i, teacher ? c.distance : c.size, c.special);
        return teacher ? noise(1, i) * c.size + one : one;
    };
}

std::vector<uint8_t> flags_of(const DivergenceCase &c)
{
    std::vector<uint8_t> bytes(size_t(c.rows), 0);
    for (int64_t row = 0; c.ignored && row < c.rows; row++)
        bytes[size_t(row)] = row % c.ignored == c.ignored - 1 ? uint8_t(row + 1) : 0;
    return bytes;
}

} // namespace

DivergenceRun::DivergenceRun(Backend &on, const DivergenceCase &c)
    : backend(on), shape(c), student(on, matrix(c), {c.dtype}, c.shift, logits_of(c, false)),
      teacher(on, matrix(c), {c.dtype}, c.teacher_shift, logits_of(c, true)),
      grad(on, matrix(c, !c.in_place), {c.grad_dtype}, c.shift, garbage),
      loss(on, {c.rows}, {HR_F32}, 0, garbage),
      statistics(on, {c.rows * HR_DIVERGENCE_STATISTICS}, {HR_F32}, 0, garbage),
      dloss(on, {c.per_row ? c.rows : 1}, {HR_F32}, 0,
            [](size_t, size_t i) { return 1.5 + noise(3, i); }),
      dloss_stride(c.per_row), exec(on.exec()), rows(c.rows), classes(c.classes)
{
    flags.emplace_back(on, flags_of(c));
    ignored = c.ignored ? static_cast<const uint8_t *>(flags[0].data()) : nullptr;
    config.dtype = c.dtype;
    config.grad_dtype = c.grad_dtype;
    config.beta = c.beta;
    config.temperature = c.temperature;
    student_rows = {student.data[0], c.classes + c.gap};
    teacher_rows = {teacher.data[0], c.classes + c.gap};
    grad_rows = gradient_rows(c, student_rows, grad);
}

hr_status DivergenceRun::forward() const
{
    return hr_divergence_forward(
        static_cast<float *>(loss.data[0]), static_cast<float *>(statistics.data[0]),
        student_argument, teacher_argument, ignored, rows, classes, config_argument, exec_argument);
}

hr_status DivergenceRun::backward() const
{
    return hr_divergence_backward(grad_argument, static_cast<float *>(dloss.data[0]), dloss_stride,
                                  student_argument, teacher_argument, ignored,
                                  static_cast<float *>(statistics.data[0]), rows, classes,
                                  config_argument, exec_argument);
}

hr_status DivergenceRun::call() const
{
    const hr_status status = forward();
    return status == HR_OK ? backward() : status;
}

std::vector<uint8_t> DivergenceRun::image() const
{
    return image_of({&student.buffers, &teacher.buffers, &grad.buffers, &loss.buffers,
                     &statistics.buffers, &dloss.buffers, &flags});
}

bool DivergenceRun::whole() const
{
    return intact({&student.buffers, &teacher.buffers, &grad.buffers, &loss.buffers,
                   &statistics.buffers, &dloss.buffers, &flags});
}

bool DivergenceRun::is_ignored(int64_t row) const
{
    return shape.ignored && row % shape.ignored == shape.ignored - 1;
}

std::vector<double> DivergenceRun::gradients() const
{
    const Tensors &where = shape.in_place ? student : grad;
    return decode(where.buffers[0].content(), shape.grad_dtype);
}

std::ostream &operator<<(std::ostream &out, const DivergenceCase &c)
{
    return out << c.rows << " x " << c.classes << ", gap " << c.gap << ", shifts " << c.shift << " "
               << c.teacher_shift << ", " << name_of(c.dtype) << " to " << name_of(c.grad_dtype)
               << ", beta " << c.beta << ", temperature " << c.temperature
               << (c.per_row ? ", gradients per row" : "") << (c.in_place ? ", in place" : "")
               << ", size " << c.size << ", distance " << c.distance
               << (c.special ? ", special values" : "") << ", ignored " << c.ignored;
}
