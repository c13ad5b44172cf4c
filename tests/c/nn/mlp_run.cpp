#include "tests/c/nn/mlp_run.h"

#include <array>

namespace
{

Tensors::Value values(uint64_t role, double size, double center = 0)
{
    return [=](size_t k, size_t i) { return noise(role + k, i) * size + center; };
}

// Of the weights, in the order of hr_mlp_params; 0 for those that a case does not have.
std::vector<int64_t> numel_of(const MlpCase &c)
{
    const int64_t width = c.gated && !c.apart ? 2 * c.features : c.features;
    const int64_t row = c.hidden + c.gap;
    const bool layer = c.norm == HR_NORM_LAYER;
    return {c.hidden,
            layer ? c.hidden : 0,
            width * row,
            c.apart ? c.features * row : 0,
            c.hidden * (c.features + c.gap),
            c.biases ? width : 0,
            c.biases && c.apart ? c.features : 0,
            c.biases ? c.hidden : 0};
}

std::vector<hr_dtype> dtypes_of(const MlpCase &c)
{
    return {c.norm_dtype, c.norm_dtype, c.dtype, c.dtype, c.dtype, c.dtype, c.dtype, c.dtype};
}

uint32_t has(const MlpCase &c)
{
    return (c.norm == HR_NORM_LAYER ? ~0u : ~uint32_t(HR_MLP_NORM_BIAS)) &
           (c.biases ? ~0u : ~uint32_t(HR_MLP_GATE_UP_BIAS | HR_MLP_DOWN_BIAS)) &
           (c.format == HR_DENSE ? ~0u : ~uint32_t(HR_MLP_GATE_UP | HR_MLP_DOWN)) & c.wanted;
}

// gate_up, up and down, of which up may not be there, but for their codes and scales.
std::array<MatrixCase, 3> matrices_of(const MlpCase &c)
{
    std::array<MatrixCase, 3> all;
    for (MatrixCase &m : all)
        m.format = c.format, m.nested = c.nested, m.to = c.dtype, m.gap = c.gap, m.cols = c.hidden;
    all[0].rows = c.gated && !c.apart ? 2 * c.features : c.features;
    all[1].rows = c.features;
    all[2].rows = c.hidden, all[2].cols = c.features;
    return all;
}

void take(hr_mlp_config &config, const hr_matrix *gate_up, const hr_matrix *up,
          const hr_matrix *down)
{
    config.gate_up = gate_up, config.up = up, config.down = down;
}

hr_mlp_needs needs_of(const MlpCase &c, const hr_exec &exec)
{
    hr_mlp_config config = config_of(c);
    static float unread = 0; // a query looks at the sizes of a matrix
    hr_matrix matrices[3];
    for (size_t k = 0; k < 3; k++) {
        const MatrixCase m = matrices_of(c)[k];
        matrices[k] = HR_MATRIX_INIT;
        matrices[k].format = m.format, matrices[k].dtype = m.to;
        matrices[k].rows = m.rows, matrices[k].cols = m.cols;
        matrices[k].data = matrices[k].absmax = &unread;
    }
    if (c.format != HR_DENSE)
        take(config, &matrices[0], c.apart ? &matrices[1] : nullptr, &matrices[2]);
    hr_mlp_needs needs = {};
    EXPECT_EQ(hr_mlp_query(&needs, c.tokens, c.hidden, c.features, c.save, has(c), &config, &exec),
              HR_OK)
        << hr_last_error();
    return needs;
}

int64_t elements(size_t bytes, hr_dtype dtype)
{
    return int64_t(bytes / bytes_of(dtype));
}

void *or_null(const Tensors &tensors, size_t k, bool wanted = true)
{
    return wanted && tensors.numel[k] ? tensors.data[k] : nullptr;
}

hr_mlp_params params_of(const Tensors &t, const MlpCase &c, uint32_t wanted)
{
    const int64_t row = c.hidden + c.gap;
    const auto matrix = [&](size_t k, int64_t stride, uint32_t bit) {
        return hr_rows{or_null(t, k, wanted & bit), stride};
    };
    return {or_null(t, 0, wanted & HR_MLP_NORM_WEIGHT),
            or_null(t, 1, wanted & HR_MLP_NORM_BIAS),
            matrix(2, row, HR_MLP_GATE_UP),
            matrix(3, row, HR_MLP_GATE_UP),
            matrix(4, c.features + c.gap, HR_MLP_DOWN),
            or_null(t, 5, wanted & HR_MLP_GATE_UP_BIAS),
            or_null(t, 6, wanted & HR_MLP_GATE_UP_BIAS),
            or_null(t, 7, wanted & HR_MLP_DOWN_BIAS)};
}

} // namespace

hr_mlp_config config_of(const MlpCase &c)
{
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    config.norm = c.norm;
    config.casting = c.casting;
    config.activation = c.activation;
    config.dtype = c.dtype;
    config.norm_dtype = c.norm_dtype;
    config.gated = c.gated;
    config.residual = c.residual;
    config.eps = 1e-5;
    config.offset = c.norm == HR_NORM_RMS ? 1 : 0;
    config.tile_tokens = c.tile;
    return config;
}

MlpRun::MlpRun(Backend &backend, const MlpCase &c)
    : shape(c), config(config_of(c)), exec(backend.exec()), needs(needs_of(c, exec)),
      x(backend, {c.tokens * (c.hidden + c.gap)}, {c.dtype}, 0, values(1, 2, 0.3)),
      y(backend, x.numel, {c.dtype}, 0, garbage), dy(backend, x.numel, {c.dtype}, 0, values(2, 1)),
      dx(backend, x.numel, {c.dtype}, 0, garbage),
      weights(backend, numel_of(c), dtypes_of(c), 0, values(10, 0.6)),
      grads(backend, numel_of(c), dtypes_of(c), 0, garbage),
      statistics(backend, {elements(needs.mean, HR_F32), elements(needs.rstd, HR_F32)}, {HR_F32}, 0,
                 garbage),
      rows(backend,
           {elements(needs.normed, c.dtype), elements(needs.gate_up, c.dtype),
            elements(needs.activated, c.dtype)},
           {c.dtype}, 0, garbage),
      workspace(backend, std::vector<uint8_t>(
                             std::max(needs.forward_workspace, needs.backward_workspace), 0x77)),
      tokens(c.tokens), hidden(c.hidden), features(c.features),
      forward_bytes(needs.forward_workspace), backward_bytes(needs.backward_workspace)
{
    const int64_t stride = c.hidden + c.gap;
    x_rows = {x.data[0], stride}, y_rows = {y.data[0], stride};
    dy_rows = {dy.data[0], stride}, dx_rows = {dx.data[0], stride};
    params = params_of(weights, c, ~0u);
    gradient = params_of(grads, c, has(c));
    if (!(has(c) & (HR_MLP_X | HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS)))
        dx_argument = nullptr;
    saved = {static_cast<float *>(or_null(statistics, 0)),
             static_cast<float *>(or_null(statistics, 1)), or_null(rows, 0), or_null(rows, 1),
             or_null(rows, 2)};
    if (c.format == HR_DENSE)
        return;
    hr_rows *const dense[] = {&params.gate_up, &params.up, &params.down};
    for (size_t k = 0; k < 3; k++) {
        if (k == 1 && !c.apart)
            continue;
        few_bits[k] = std::make_unique<MatrixRun>(backend, matrices_of(c)[k]);
        EXPECT_EQ(few_bits[k]->call(), HR_OK) << hr_last_error();
        weights.put(2 + k, few_bits[k]->out.values(0));
        dense[k]->data = nullptr;
    }
    take(config, &few_bits[0]->matrix, c.apart ? &few_bits[1]->matrix : nullptr,
         &few_bits[2]->matrix);
}

hr_status MlpRun::forward() const
{
    return hr_mlp_forward(y_argument, &saved, x_argument, params_argument, tokens, hidden, features,
                          config_argument, workspace_argument, forward_bytes, exec_argument);
}

hr_status MlpRun::backward() const
{
    return hr_mlp_backward(dx_argument, gradient_argument, dy_argument,
                           needs.reads_x ? x_argument : nullptr, params_argument, &saved, tokens,
                           hidden, features, config_argument, workspace_argument, backward_bytes,
                           exec_argument);
}

hr_status MlpRun::call() const
{
    const hr_status status = forward();
    return status == HR_OK ? backward() : status;
}

std::vector<uint8_t> MlpRun::image() const
{
    return image_of({&x.buffers, &y.buffers, &dy.buffers, &dx.buffers, &weights.buffers,
                     &grads.buffers, &statistics.buffers, &rows.buffers});
}

std::vector<uint8_t> MlpRun::gradients() const
{
    return image_of({&y.buffers, &dx.buffers, &grads.buffers});
}

bool MlpRun::whole() const
{
    return intact({&x.buffers, &y.buffers, &dy.buffers, &dx.buffers, &weights.buffers,
                   &grads.buffers, &statistics.buffers, &rows.buffers}) &&
           workspace.intact();
}

std::ostream &operator<<(std::ostream &out, const MlpCase &c)
{
    return out << c.tokens << " tokens, " << c.hidden << " x " << c.features << ", "
               << name_of(c.dtype) << ", norm in " << name_of(c.norm_dtype)
               << (c.norm == HR_NORM_LAYER ? ", layer" : "") << ", activation " << c.activation
               << (c.gated ? "" : ", plain") << (c.apart ? ", apart" : "")
               << (c.biases ? ", biases" : "") << (c.residual ? "" : ", no residual") << ", tile "
               << c.tile << ", save " << c.save << ", wanted " << c.wanted << ", gap " << c.gap
               << ", format " << c.format << (c.nested ? ", nested" : "");
}
