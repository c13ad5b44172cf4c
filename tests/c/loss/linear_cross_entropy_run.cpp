#include "tests/c/loss/linear_cross_entropy_run.h"

#include "tests/c/loss/made.h"

namespace
{

Tensors::Value values(uint64_t seed, double middle, double size)
{
    return [=](size_t, size_t i) { return middle + noise(seed, i) * size; };
}

hr_linear_cross_entropy_config config_of(const LinearCrossEntropyCase &c)
{
    hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    config.dtype = c.dtype;
    config.grad_dtype = c.grad_dtype;
    config.target_bytes = c.int32 ? 4 : 8;
    config.reduction = c.reduction;
    config.mode = c.mode;
    config.label_smoothing = c.smoothing;
    config.softcap = c.softcap;
    config.z_loss = c.z_loss;
    config.logit_scale = c.scale;
    config.sequence = c.sequence;
    config.workspace_limit = c.limit;
    return config;
}

hr_linear_cross_entropy_needs needs_of(const LinearCrossEntropyCase &c,
                                       const hr_linear_cross_entropy_config &config,
                                       const hr_exec &exec)
{
    hr_linear_cross_entropy_needs needs = {};
    EXPECT_EQ(hr_linear_cross_entropy_query(&needs, c.rows, c.features, c.classes, c.wanted,
                                            &config, &exec),
              HR_OK)
        << hr_last_error();
    return needs;
}

float *floats(const Tensors &t, size_t k, bool wanted = true)
{
    return wanted ? static_cast<float *>(t.data[k]) : nullptr;
}

} // namespace

LinearCrossEntropyRun::LinearCrossEntropyRun(Backend &on, const LinearCrossEntropyCase &c)
    : backend(on), shape(c), config(config_of(c)), exec(on.exec()),
      hidden(on, {c.rows * (c.features + c.gap)}, {c.dtype}, 0, values(1, 0, 1)),
      weight(on, {c.classes * (c.features + c.gap)}, {c.dtype}, 0, values(2, 0, 1)),
      bias(on, {c.classes}, {c.dtype}, 0, values(3, 0, 1)),
      class_weight(on, {c.classes}, {HR_F32}, 0, values(4, c.weigh, c.weigh / 2)),
      token_weight(on, {c.rows}, {HR_F32}, 0, values(5, 1, 0.5)),
      denominator(on, {1}, {HR_F32}, 0, values(6, 9, 1)),
      results(on, std::vector<int64_t>(8, c.rows), {HR_F32}, 0, garbage),
      numbers(on, {1, 2, 1}, {HR_F32}, 0, garbage),
      dhidden(on, {c.rows * (c.features + c.gap)}, {c.grad_dtype}, 0, garbage),
      dweight(on, {c.classes * (c.features + c.gap)}, {c.grad_dtype}, 0, garbage),
      dbias(on, {c.classes}, {c.grad_dtype}, 0, garbage),
      dloss(on, {c.rows}, {HR_F32}, 0, values(7, 1, 0.5)),
      dentropy(on, {c.rows}, {HR_F32}, 0, values(8, 0, 1)), result(floats(numbers, 0)),
      factors(floats(numbers, 1)), scale(floats(numbers, 2)), upstream(floats(dloss, 0)),
      lse(floats(results, 1)), lse_low(floats(results, 2)), rows(c.rows), features(c.features),
      classes(c.classes)
{
    targets.emplace_back(on, bytes_of_targets(c.rows, c.classes, c.ignored, c.int32));
    argmaxes.emplace_back(on, std::vector<uint8_t>(size_t(c.rows) * 8, 77));
    ranks.emplace_back(on, std::vector<uint8_t>(size_t(c.rows) * 8, 77));
    const int64_t stride = c.features + c.gap;
    inputs.hidden = {hidden.data[0], stride};
    inputs.weight = {weight.data[0], stride};
    inputs.bias = c.bias ? bias.data[0] : nullptr;
    inputs.target = targets[0].data();
    inputs.class_weight = floats(class_weight, 0, c.class_weight);
    inputs.token_weight = floats(token_weight, 0, c.token_weight);
    inputs.denominator = floats(denominator, 0, c.denominator);
    grads.hidden = {c.wanted & 1 ? dhidden.data[0] : nullptr, stride};
    grads.weight = {c.wanted & 2 ? dweight.data[0] : nullptr, stride};
    grads.bias = c.wanted & 4 ? dbias.data[0] : nullptr;
    out = {floats(results, 0),
           floats(results, 1),
           floats(results, 2),
           floats(results, 3),
           floats(results, 4),
           floats(results, 5),
           static_cast<int64_t *>(argmaxes[0].data()),
           c.rank ? static_cast<int64_t *>(ranks[0].data()) : nullptr,
           floats(results, 6),
           floats(results, 7)};
    config.entropy = floats(results, 5);
    config.dentropy = floats(dentropy, 0, c.dentropy);
    config.dentropy_stride = 1;
    set_weight(nullptr);
    if (c.format == HR_DENSE)
        return;
    MatrixCase matrix;
    matrix.rows = c.classes, matrix.cols = c.features, matrix.gap = c.gap;
    matrix.format = c.format, matrix.nested = c.nested, matrix.to = c.dtype;
    few_bits = std::make_unique<MatrixRun>(on, matrix);
    EXPECT_EQ(few_bits->call(), HR_OK) << hr_last_error();
    weight.put(0, few_bits->out.values(0));
    set_weight(&few_bits->matrix);
}

void LinearCrossEntropyRun::set_weight(const hr_matrix *matrix)
{
    config.matrix = matrix;
    inputs.weight = {matrix ? nullptr : weight.data[0], shape.features + shape.gap};
    needs = needs_of(shape, config, exec);
    workspaces.emplace_back(backend, std::vector<uint8_t>(needs.workspace, 0x77));
    workspace_argument = workspaces.back().data();
    workspace_bytes = needs.workspace;
}

hr_status LinearCrossEntropyRun::forward() const
{
    return hr_linear_cross_entropy(result, factors, scale, &out, grads_argument, inputs_argument,
                                   rows, features, classes, config_argument, workspace_argument,
                                   workspace_bytes, exec_argument);
}

hr_status LinearCrossEntropyRun::backward() const
{
    return hr_linear_cross_entropy_backward(
        grads_argument, upstream, upstream_stride, factors, lse, lse_low, inputs_argument, rows,
        features, classes, config_argument, workspace_argument, workspace_bytes, exec_argument);
}

hr_status LinearCrossEntropyRun::call() const
{
    return forward();
}

std::vector<uint8_t> LinearCrossEntropyRun::image() const
{
    return image_of({&hidden.buffers, &weight.buffers, &bias.buffers, &class_weight.buffers,
                     &token_weight.buffers, &denominator.buffers, &results.buffers,
                     &numbers.buffers, &dhidden.buffers, &dweight.buffers, &dbias.buffers,
                     &dloss.buffers, &dentropy.buffers, &targets, &argmaxes, &ranks});
}

bool LinearCrossEntropyRun::whole() const
{
    return intact({&hidden.buffers, &weight.buffers, &bias.buffers, &class_weight.buffers,
                   &token_weight.buffers, &denominator.buffers, &results.buffers, &numbers.buffers,
                   &dhidden.buffers, &dweight.buffers, &dbias.buffers, &dloss.buffers,
                   &dentropy.buffers, &targets, &argmaxes, &ranks, &workspaces});
}

int64_t LinearCrossEntropyRun::target_of(int64_t row) const
{
    if (shape.sequence == 0)
        return made_target(row, shape.classes, shape.ignored);
    return (row + 1) % shape.sequence == 0 ? -100
                                           : made_target(row + 1, shape.classes, shape.ignored);
}

void LinearCrossEntropyRun::set_target(int64_t row, int64_t value)
{
    put_target(backend, targets[0], row, value, shape.int32);
}

std::vector<int64_t> LinearCrossEntropyRun::integers(const Buffer &buffer) const
{
    std::vector<int64_t> numbers_of_rows(static_cast<size_t>(rows));
    backend.download(numbers_of_rows.data(), buffer.data(), numbers_of_rows.size() * 8);
    return numbers_of_rows;
}

std::ostream &operator<<(std::ostream &out, const LinearCrossEntropyCase &c)
{
    return out << c.rows << " x " << c.features << " x " << c.classes << ", gap " << c.gap << ", "
               << name_of(c.dtype) << " to " << name_of(c.grad_dtype) << ", mode " << c.mode
               << ", limit " << c.limit << (c.bias ? ", bias" : "")
               << (c.class_weight ? ", class weights" : "")
               << (c.token_weight ? ", token weights" : "")
               << (c.denominator ? ", denominator" : "") << (c.int32 ? ", int32" : "")
               << (c.dentropy ? ", gradient of the entropy" : "") << ", smoothing " << c.smoothing
               << ", softcap " << c.softcap << ", z-loss " << c.z_loss << ", scale " << c.scale
               << ", reduction " << c.reduction << ", ignored " << c.ignored << ", sequence "
               << c.sequence << ", wanted " << c.wanted << ", weight in format " << c.format
               << (c.nested ? ", nested" : "");
}
