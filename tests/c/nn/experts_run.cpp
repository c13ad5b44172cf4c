#include "tests/c/nn/experts_run.h"

#include <algorithm>
#include <cstring>
#include <tuple>

#include "tests/c/harness/row_op.h"

namespace
{

Tensors::Value values(uint64_t role, double size, double center = 0)
{
    return [=](size_t k, size_t i) { return noise(role + k, i) * size + center; };
}

int64_t width_of(const ExpertsCase &c)
{
    return c.gated ? 2 * c.features : c.features;
}

// Expert 1 has no rows, and every seventh row no expert; a token has an expert twice now and then.
std::vector<int64_t> route_of(const ExpertsCase &c)
{
    std::vector<int64_t> experts(size_t(c.tokens * c.slots));
    for (size_t row = 0; row < experts.size(); row++) {
        const auto drawn = int64_t((noise(77, row) + 1) / 2 * double(c.experts));
        experts[row] = drawn == 1 ? 0 : std::min(drawn, c.experts - 1);
        if (row % 7 == 6)
            experts[row] = row % 2 ? -1 : c.experts;
    }
    return experts;
}

template <typename T> std::vector<uint8_t> bytes_as(const std::vector<int64_t> &values)
{
    std::vector<T> narrow(values.begin(), values.end());
    std::vector<uint8_t> bytes(narrow.size() * sizeof(T));
    if (!bytes.empty())
        std::memcpy(bytes.data(), narrow.data(), bytes.size());
    return bytes;
}

std::vector<uint8_t> index_of(const ExpertsCase &c)
{
    return c.index_bytes == 8   ? bytes_as<int64_t>(route_of(c))
           : c.index_bytes == 4 ? bytes_as<int32_t>(route_of(c))
                                : bytes_as<int16_t>(route_of(c));
}

// Of a matrix of an expert: rows, columns.
std::pair<int64_t, int64_t> shape_of(const ExpertsCase &c, bool is_down)
{
    const int64_t outputs = is_down ? c.hidden : width_of(c);
    const int64_t inputs = is_down ? c.features : c.hidden;
    return c.transposed ? std::pair(inputs, outputs) : std::pair(outputs, inputs);
}

int64_t pitch_of(const ExpertsCase &c, bool is_down)
{
    const auto [rows, cols] = shape_of(c, is_down);
    return rows * (cols + c.gap) + c.gap;
}

std::vector<int64_t> stacks_of(const ExpertsCase &c)
{
    return {c.experts * pitch_of(c, false), c.experts * pitch_of(c, true),
            c.biases ? c.experts * width_of(c) : 0, c.biases ? c.experts * c.hidden : 0};
}

std::vector<int64_t> dense_of(const ExpertsCase &c)
{
    return {c.experts * width_of(c) * c.hidden, c.experts * c.hidden * c.features,
            c.biases ? c.experts * width_of(c) : 0, c.biases ? c.experts * c.hidden : 0};
}

std::vector<hr_dtype> dtypes_of(const ExpertsCase &c)
{
    return {c.matrix_dtype, c.matrix_dtype, c.dtype, c.dtype};
}

hr_experts_config config_of(const ExpertsCase &c)
{
    hr_experts_config config = HR_EXPERTS_CONFIG_INIT;
    config.activation = c.activation;
    config.dtype = c.dtype;
    config.weight_dtype = c.weight_dtype;
    config.gated = c.gated;
    config.transposed = c.transposed;
    config.interleaved = c.interleaved;
    config.limit = c.limit;
    config.tile_rows = c.tile;
    return config;
}

hr_matrix matrix_of(const ExpertsCase &c, bool is_down, void *data)
{
    hr_matrix matrix = HR_MATRIX_INIT;
    std::tie(matrix.rows, matrix.cols) = shape_of(c, is_down);
    matrix.dtype = c.matrix_dtype;
    matrix.stride = matrix.cols + c.gap;
    matrix.data = data;
    return matrix;
}

uint32_t wanted_of(const ExpertsCase &c)
{
    const uint32_t biases = HR_EXPERTS_GATE_UP_BIAS | HR_EXPERTS_DOWN_BIAS;
    return c.wanted & (c.biases ? ~0u : ~biases);
}

hr_experts_needs needs_of(const ExpertsCase &c, const hr_exec &exec)
{
    static float unread = 0; // a query looks at the sizes of a matrix
    const hr_experts_sizes sizes = {c.tokens, c.slots, c.experts, c.hidden, c.features};
    const hr_experts_params params = {matrix_of(c, false, &unread),
                                      matrix_of(c, true, &unread),
                                      pitch_of(c, false),
                                      pitch_of(c, true),
                                      nullptr,
                                      nullptr};
    const hr_experts_config config = config_of(c);
    hr_experts_needs needs = {};
    EXPECT_EQ(hr_experts_query(&needs, &sizes, c.save, wanted_of(c), &params, &config, &exec),
              HR_OK)
        << hr_last_error();
    return needs;
}

void *or_null(const Tensors &tensors, size_t k, bool wanted = true)
{
    return wanted && tensors.numel[k] ? tensors.data[k] : nullptr;
}

} // namespace

ExpertsRun::ExpertsRun(Backend &backend, const ExpertsCase &c)
    : shape(c), rows(c.tokens * c.slots), width(width_of(c)), experts_of(route_of(c)),
      config(config_of(c)), exec(backend.exec()),
      x(backend, {c.tokens * (c.hidden + c.gap)}, {c.dtype}, 0, values(1, 2, 0.3)),
      dy(backend, x.numel, {c.dtype}, 0, values(2, 1)),
      y(backend, {c.tokens * c.hidden}, {c.dtype}, 0, garbage),
      dx(backend, y.numel, {c.dtype}, 0, garbage),
      weight(backend, {rows}, {c.weight_dtype}, 0, values(3, 0.4, 0.5)),
      dweight(backend, {rows}, {c.weight_dtype}, 0, garbage),
      stacks(backend, stacks_of(c), dtypes_of(c), 0, values(10, 0.6)),
      grads(backend, dense_of(c), dtypes_of(c), 0, garbage), index(backend, index_of(c)),
      order(backend, std::vector<uint8_t>(size_t(rows) * 4, 0x55)),
      offsets(backend, std::vector<uint8_t>(size_t(c.experts + 1) * 4, 0x55)), sizes{c.tokens,
                                                                                     c.slots,
                                                                                     c.experts,
                                                                                     c.hidden,
                                                                                     c.features},
      needs(needs_of(c, exec)), kept(backend,
                                     {int64_t(needs.gate_up / bytes_of(c.dtype)),
                                      int64_t(needs.activated / bytes_of(c.dtype))},
                                     {c.dtype}, 0, garbage),
      workspace(backend, std::vector<uint8_t>(
                             std::max(needs.forward_workspace, needs.backward_workspace), 0x77)),
      x_rows{x.data[0], c.hidden + c.gap}, dy_rows{dy.data[0], c.hidden + c.gap},
      y_argument(y.data[0]), workspace_argument(workspace.data()), weight_argument(weight.data[0]),
      order_argument(static_cast<int32_t *>(order.data())), index_bytes(c.index_bytes),
      route_rows(rows), route_experts(c.experts), offsets_argument(offsets.data()),
      index_argument(index.data()), forward_bytes(needs.forward_workspace),
      backward_bytes(needs.backward_workspace)
{
    params.gate_up = matrix_of(c, false, stacks.data[0]);
    params.down = matrix_of(c, true, stacks.data[1]);
    params.gate_up_pitch = pitch_of(c, false), params.down_pitch = pitch_of(c, true);
    params.gate_up_bias = or_null(stacks, 2), params.down_bias = or_null(stacks, 3);
    const uint32_t wanted = wanted_of(c);
    dx_argument = or_null(dx, 0, wanted & HR_EXPERTS_X);
    dweight_argument = or_null(dweight, 0, wanted & HR_EXPERTS_WEIGHT);
    gradient = {or_null(grads, 0, wanted & HR_EXPERTS_GATE_UP),
                or_null(grads, 1, wanted & HR_EXPERTS_DOWN),
                or_null(grads, 2, wanted & HR_EXPERTS_GATE_UP_BIAS),
                or_null(grads, 3, wanted & HR_EXPERTS_DOWN_BIAS)};
    saved = {or_null(kept, 0), or_null(kept, 1)};
    EXPECT_EQ(route(), HR_OK) << hr_last_error();
    ends = numbers(offsets);
    ends_argument = ends.data();
}

hr_status ExpertsRun::route() const
{
    return hr_route(static_cast<int32_t *>(offsets_argument), const_cast<int32_t *>(order_argument),
                    index_argument, index_bytes, route_rows, route_experts, exec_argument);
}

hr_status ExpertsRun::forward() const
{
    return hr_experts_forward(y_argument, &saved, x_argument, weight_argument, order_argument,
                              ends_argument, params_argument, sizes_argument, config_argument,
                              workspace_argument, forward_bytes, exec_argument);
}

hr_status ExpertsRun::backward() const
{
    return hr_experts_backward(
        dx_argument, dweight_argument, &gradient, dy_argument, needs.reads_x ? x_argument : nullptr,
        weight_argument, order_argument, ends_argument, &saved, params_argument, sizes_argument,
        config_argument, workspace_argument, backward_bytes, exec_argument);
}

hr_status ExpertsRun::call() const
{
    const hr_status status = forward();
    return status == HR_OK ? backward() : status;
}

std::vector<int32_t> ExpertsRun::numbers(const Buffer &buffer) const
{
    const std::vector<uint8_t> bytes = buffer.content();
    std::vector<int32_t> all(bytes.size() / 4);
    if (!all.empty())
        std::memcpy(all.data(), bytes.data(), bytes.size());
    return all;
}

std::vector<uint8_t> ExpertsRun::image() const
{
    std::vector<uint8_t> all =
        image_of({&x.buffers, &y.buffers, &dy.buffers, &dx.buffers, &weight.buffers,
                  &dweight.buffers, &stacks.buffers, &grads.buffers, &kept.buffers});
    for (const Buffer *buffer : {&index, &order, &offsets}) {
        const std::vector<uint8_t> more = buffer->content();
        all.insert(all.end(), more.begin(), more.end());
    }
    return all;
}

std::vector<uint8_t> ExpertsRun::gradients() const
{
    return image_of({&y.buffers, &dx.buffers, &dweight.buffers, &grads.buffers});
}

bool ExpertsRun::whole() const
{
    return intact({&x.buffers, &y.buffers, &dy.buffers, &dx.buffers, &weight.buffers,
                   &dweight.buffers, &stacks.buffers, &grads.buffers, &kept.buffers}) &&
           workspace.intact() && index.intact() && order.intact() && offsets.intact();
}

std::ostream &operator<<(std::ostream &out, const ExpertsCase &c)
{
    return out << c.tokens << " tokens of " << c.slots << " slots, " << c.experts << " experts, "
               << c.hidden << " x " << c.features << ", " << name_of(c.dtype) << ", weights in "
               << name_of(c.weight_dtype) << ", matrices in " << name_of(c.matrix_dtype)
               << ", activation " << c.activation << (c.gated ? "" : ", plain")
               << (c.transposed ? ", transposed" : "") << (c.interleaved ? ", interleaved" : "")
               << (c.biases ? ", biases" : "") << ", limit " << c.limit << ", tile " << c.tile
               << ", gap " << c.gap << ", index of " << c.index_bytes << " bytes, save " << c.save
               << ", wanted " << c.wanted;
}
