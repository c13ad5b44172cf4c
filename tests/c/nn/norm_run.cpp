#include "tests/c/nn/norm_run.h"

#include <cmath>

namespace
{

enum { X = 1, RESIDUAL, DY, DSUM, WEIGHT, BIAS };

Tensors::Value values(int role, const RowNormCase &c, double size, double center = 0)
{
    const bool special = c.special && role <= DSUM;
    return [=](size_t, size_t i) {
        constexpr double kSpecial[] = {NAN, INFINITY, -INFINITY, 3e38, -3e38, 1e-40, 0, -0.0};
        const double value = noise(uint64_t(role), i) * size + center;
        return special && noise(uint64_t(role) + 50, i) < -0.99 ? kSpecial[i % 8] : value;
    };
}

std::vector<int64_t> matrix(const RowNormCase &c, bool wanted = true)
{
    return {wanted ? c.rows * (c.cols + c.gap) : 0};
}

size_t workspace_of(const RowNormCase &c)
{
    hr_norm_config config = HR_NORM_CONFIG_INIT;
    config.kind = c.kind;
    size_t bytes = 0;
    EXPECT_EQ(hr_norm_workspace(&bytes, c.rows, c.cols, &config), HR_OK) << hr_last_error();
    return bytes;
}

} // namespace

RowNormRun::RowNormRun(Backend &backend, const RowNormCase &c)
    : shape(c), x(backend, matrix(c), {c.dtype}, c.shift, values(X, c, 3, 0.7)),
      residual(backend, matrix(c, c.residual), {c.dtype}, c.shift, values(RESIDUAL, c, 2)),
      y(backend, matrix(c), {c.dtype}, c.shift, garbage),
      sum(backend, matrix(c, c.residual), {c.dtype}, c.shift, garbage),
      dy(backend, matrix(c), {c.dtype}, c.shift, values(DY, c, 1)),
      dsum(backend, matrix(c, c.residual), {c.dtype}, c.shift, values(DSUM, c, 1)),
      dx(backend, matrix(c), {c.dtype}, c.shift, garbage),
      again(backend, matrix(c, c.again), {c.dtype}, c.shift, garbage),
      weight(backend, {c.cols}, {c.weight_dtype}, c.shift, values(WEIGHT, c, 1, 1)),
      bias(backend, {c.cols}, {c.weight_dtype}, c.shift, values(BIAS, c, 1)),
      dweight(backend, {c.cols}, {c.weight_dtype}, c.shift, garbage),
      dbias(backend, {c.cols}, {c.weight_dtype}, c.shift, garbage),
      mean(backend, {c.rows}, {HR_F32}, 0, garbage), rstd(backend, {c.rows}, {HR_F32}, 0, garbage),
      workspace(backend, {int64_t(workspace_of(c) / 4)}, {HR_F32}, 0, garbage),
      exec(backend.exec()), workspace_bytes(workspace_of(c)), rows(c.rows), cols(c.cols)
{
    config.kind = c.kind;
    config.casting = c.casting;
    config.dtype = c.dtype;
    config.weight_dtype = c.weight_dtype;
    config.eps = c.eps;
    config.offset = c.offset;
    const auto rows_of = [&](const Tensors &tensor) {
        return hr_rows{tensor.data[0], c.cols + c.gap};
    };
    x_rows = rows_of(x), residual_rows = rows_of(residual), y_rows = rows_of(y);
    sum_rows = rows_of(sum), dy_rows = rows_of(dy), dsum_rows = rows_of(dsum);
    dx_rows = rows_of(dx), again_rows = rows_of(again);
}

hr_status RowNormRun::forward() const
{
    const bool layer = shape.kind == HR_NORM_LAYER;
    return hr_norm_forward(y_argument, shape.residual ? &sum_rows : nullptr,
                           layer ? static_cast<float *>(mean.data[0]) : nullptr,
                           static_cast<float *>(rstd.data[0]), x_argument, residual_argument,
                           shape.weight ? weight.data[0] : nullptr, layer ? bias.data[0] : nullptr,
                           rows, cols, config_argument, exec_argument);
}

hr_status RowNormRun::backward() const
{
    const bool layer = shape.kind == HR_NORM_LAYER;
    return hr_norm_backward(
        dx_argument, dweight.data[0], layer ? dbias.data[0] : nullptr,
        shape.again ? &again_rows : nullptr, dy_argument, shape.residual ? &dsum_rows : nullptr,
        shape.residual ? &sum_rows : &x_rows, shape.weight ? weight.data[0] : nullptr,
        layer ? bias.data[0] : nullptr, layer ? static_cast<float *>(mean.data[0]) : nullptr,
        static_cast<float *>(rstd.data[0]), rows, cols, config_argument, workspace.data[0],
        workspace_bytes, exec_argument);
}

hr_status RowNormRun::call() const
{
    const hr_status status = forward();
    return status == HR_OK ? backward() : status;
}

std::vector<uint8_t> RowNormRun::image() const
{
    return image_of({&x.buffers, &residual.buffers, &y.buffers, &sum.buffers, &dy.buffers,
                     &dsum.buffers, &dx.buffers, &again.buffers, &weight.buffers, &bias.buffers,
                     &dweight.buffers, &dbias.buffers, &mean.buffers, &rstd.buffers});
}

bool RowNormRun::whole() const
{
    return intact({&x.buffers, &residual.buffers, &y.buffers, &sum.buffers, &dy.buffers,
                   &dsum.buffers, &dx.buffers, &again.buffers, &weight.buffers, &bias.buffers,
                   &dweight.buffers, &dbias.buffers, &mean.buffers, &rstd.buffers,
                   &workspace.buffers});
}

std::ostream &operator<<(std::ostream &out, const RowNormCase &c)
{
    return out << (c.kind == HR_NORM_LAYER ? "layer " : "rms ") << c.rows << " x " << c.cols
               << ", gap " << c.gap << ", shift " << c.shift << ", " << name_of(c.dtype)
               << ", weights " << name_of(c.weight_dtype) << ", casting " << c.casting
               << (c.residual ? ", residual" : "") << (c.weight ? "" : ", no weight")
               << (c.special ? ", special values" : "");
}
