#include "tests/c/loss/cross_entropy_run.h"

#include "tests/c/loss/made.h"

namespace
{

Tensors::Value logits_of(const CrossEntropyCase &c)
{
    return [=](size_t, size_t i) { return made_logit(1, i, c.size, c.special); };
}

} // namespace

CrossEntropyRun::CrossEntropyRun(Backend &on, const CrossEntropyCase &c)
    : backend(on), shape(c), logits(on, matrix(c), {c.dtype}, c.shift, logits_of(c)),
      grad(on, matrix(c, !c.in_place), {c.grad_dtype}, c.shift, garbage),
      weight(on, {c.classes}, {HR_F32}, 0,
             [&](size_t, size_t i) { return c.weigh * (1 + noise(2, i) / 2); }),
      loss(on, {c.rows}, {HR_F32}, 0, garbage), lse(on, {c.rows}, {HR_F32}, 0, garbage),
      lse_low(on, {c.rows}, {HR_F32}, 0, garbage),
      dloss(on, {c.per_row ? c.rows : 1}, {HR_F32}, 0,
            [](size_t, size_t i) { return 1.5 + noise(3, i); }),
      result(on, {1}, {HR_F32}, 0, garbage), factors(on, {2}, {HR_F32}, 0, garbage),
      dloss_stride(c.per_row), exec(on.exec()), rows(c.rows), classes(c.classes)
{
    targets.emplace_back(on, bytes_of_targets(c.rows, c.classes, c.ignored, c.int32));
    argmaxes.emplace_back(on, std::vector<uint8_t>(size_t(c.rows) * 8, 77));
    if (c.workspace) {
        workspaces.emplace_back(on, std::vector<uint8_t>(HR_CROSS_ENTROPY_WORKSPACE, 0xFF));
        config.workspace = workspaces[0].data();
        config.workspace_bytes = HR_CROSS_ENTROPY_WORKSPACE;
    }
    target = targets[0].data();
    argmax = argmaxes[0].data();
    config.dtype = c.dtype;
    config.grad_dtype = c.grad_dtype;
    config.target_bytes = c.int32 ? 4 : 8;
    config.reduction = c.reduction;
    config.label_smoothing = c.smoothing;
    config.softcap = c.softcap;
    config.z_loss = c.z_loss;
    logits_rows = {logits.data[0], c.classes + c.gap};
    grad_rows = gradient_rows(c, logits_rows, grad);
}

hr_status CrossEntropyRun::forward() const
{
    return forward(config_argument);
}

hr_status CrossEntropyRun::forward(const hr_cross_entropy_config *how) const
{
    return hr_cross_entropy_forward(
        static_cast<float *>(loss.data[0]), static_cast<float *>(lse.data[0]),
        shape.low ? static_cast<float *>(lse_low.data[0]) : nullptr, static_cast<int64_t *>(argmax),
        logits_argument, target, shape.weight ? static_cast<float *>(weight.data[0]) : nullptr,
        rows, classes, how, exec_argument);
}

hr_status CrossEntropyRun::reduce() const
{
    return hr_cross_entropy_reduce(
        static_cast<float *>(result.data[0]), static_cast<float *>(factors.data[0]),
        static_cast<float *>(loss.data[0]), static_cast<float *>(lse.data[0]), target,
        shape.weight ? static_cast<float *>(weight.data[0]) : nullptr, rows, classes,
        config_argument, exec_argument);
}

hr_status CrossEntropyRun::backward() const
{
    return hr_cross_entropy_backward(grad_argument, static_cast<float *>(dloss.data[0]),
                                     dloss_stride, static_cast<float *>(factors.data[0]),
                                     logits_argument, target,
                                     shape.weight ? static_cast<float *>(weight.data[0]) : nullptr,
                                     static_cast<float *>(lse.data[0]),
                                     shape.low ? static_cast<float *>(lse_low.data[0]) : nullptr,
                                     rows, classes, config_argument, exec_argument);
}

hr_status CrossEntropyRun::call() const
{
    hr_cross_entropy_config plain = config; // the reduction adds z-losses itself
    plain.z_loss = 0;
    hr_status status = forward(shape.z_loss > 0 && config_argument ? &plain : config_argument);
    if (status == HR_OK)
        status = reduce();
    if (status == HR_OK && shape.z_loss > 0)
        status = forward();
    return status == HR_OK ? backward() : status;
}

std::vector<uint8_t> CrossEntropyRun::image() const
{
    return image_of({&logits.buffers, &grad.buffers, &weight.buffers, &loss.buffers, &lse.buffers,
                     &lse_low.buffers, &dloss.buffers, &result.buffers, &factors.buffers, &targets,
                     &argmaxes});
}

bool CrossEntropyRun::whole() const
{
    return intact({&logits.buffers, &grad.buffers, &weight.buffers, &loss.buffers, &lse.buffers,
                   &lse_low.buffers, &dloss.buffers, &result.buffers, &factors.buffers, &targets,
                   &argmaxes, &workspaces});
}

int64_t CrossEntropyRun::target_of(int64_t row) const
{
    return made_target(row, shape.classes, shape.ignored);
}

void CrossEntropyRun::set_target(int64_t row, int64_t value)
{
    put_target(backend, targets[0], row, value, shape.int32);
}

std::vector<double> CrossEntropyRun::gradients() const
{
    const Tensors &where = shape.in_place ? logits : grad;
    return decode(where.buffers[0].content(), shape.grad_dtype);
}

std::ostream &operator<<(std::ostream &out, const CrossEntropyCase &c)
{
    return out << c.rows << " x " << c.classes << ", gap " << c.gap << ", shift " << c.shift << ", "
               << name_of(c.dtype) << " to " << name_of(c.grad_dtype)
               << (c.weight ? ", weights" : "") << (c.per_row ? ", gradients per row" : "")
               << (c.in_place ? ", in place" : "") << (c.workspace ? ", workspace" : "")
               << ", smoothing " << c.smoothing << ", softcap " << c.softcap << ", z-loss "
               << c.z_loss << ", reduction " << c.reduction << ", size " << c.size
               << (c.special ? ", special values" : "");
}
