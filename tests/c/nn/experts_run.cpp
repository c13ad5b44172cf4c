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

hr_format format_of(const ExpertsCase &c, bool is_down)
{
    return is_down ? c.down_format : c.gate_up_format;
}

// Elements of biases and of adapters behind those of the matrices.
std::vector<int64_t> with_others(const ExpertsCase &c, int64_t gate_up, int64_t down)
{
    const int64_t first = c.experts * c.gate_up_rank, second = c.experts * c.down_rank;
    return {gate_up,
            down,
            c.biases ? c.experts * width_of(c) : 0,
            c.biases ? c.experts * c.hidden : 0,
            first * c.hidden,
            first * width_of(c),
            second * c.features,
            second * c.hidden};
}

std::vector<int64_t> stacks_of(const ExpertsCase &c)
{
    const auto numel = [&](bool is_down) {
        return format_of(c, is_down) == HR_DENSE ? c.experts * pitch_of(c, is_down) : 0;
    };
    return with_others(c, numel(false), numel(true));
}

std::vector<int64_t> dense_of(const ExpertsCase &c)
{
    const auto numel = [&](bool is_down) {
        const auto [rows, cols] = shape_of(c, is_down);
        return format_of(c, is_down) == HR_DENSE ? c.experts * rows * cols : 0;
    };
    return with_others(c, numel(false), numel(true));
}

std::unique_ptr<LinearRun> few_bits_of(Backend &backend, const ExpertsCase &c, bool is_down)
{
    LinearCase own = {.m = 1, .format = format_of(c, is_down)};
    if (own.format == HR_DENSE)
        return nullptr;
    std::tie(own.rows, own.cols) = shape_of(c, is_down);
    own.rows *= c.experts;
    own.nested = c.nested && own.format != HR_INT8_ROWS;
    own.dtype = c.dtype, own.block_size = c.block_size;
    return std::make_unique<LinearRun>(backend, own);
}

std::vector<hr_dtype> dtypes_of(const ExpertsCase &c)
{
    const hr_dtype adapter = c.adapter_dtype;
    return {c.matrix_dtype, c.matrix_dtype, c.dtype, c.dtype, adapter, adapter, adapter, adapter};
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
    uint32_t all = c.wanted;
    if (!c.biases)
        all &= ~uint32_t(HR_EXPERTS_GATE_UP_BIAS | HR_EXPERTS_DOWN_BIAS);
    if (c.gate_up_format != HR_DENSE)
        all &= ~uint32_t(HR_EXPERTS_GATE_UP);
    if (c.down_format != HR_DENSE)
        all &= ~uint32_t(HR_EXPERTS_DOWN);
    if (c.gate_up_rank == 0)
        all &= ~uint32_t(HR_EXPERTS_GATE_UP_A | HR_EXPERTS_GATE_UP_B);
    if (c.down_rank == 0)
        all &= ~uint32_t(HR_EXPERTS_DOWN_A | HR_EXPERTS_DOWN_B);
    return all;
}

hr_experts_needs needs_of(const ExpertsCase &c, const hr_experts_params &params,
                          const hr_exec &exec)
{
    const hr_experts_sizes sizes = {c.tokens, c.slots, c.experts, c.hidden, c.features};
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

hr_experts_params params_of(const ExpertsCase &c, const Tensors &stacks,
                            const std::unique_ptr<LinearRun> *few_bits)
{
    const auto matrix = [&](size_t k) {
        return few_bits[k] ? few_bits[k]->matrix : matrix_of(c, k == 1, stacks.data[k]);
    };
    const auto adapter = [&](size_t k, int64_t rank) {
        return hr_experts_adapter{rank, kAdapterScales[k], c.adapter_dtype,
                                  or_null(stacks, 4 + 2 * k), or_null(stacks, 5 + 2 * k)};
    };
    return {matrix(0),
            matrix(1),
            pitch_of(c, false),
            pitch_of(c, true),
            or_null(stacks, 2),
            or_null(stacks, 3),
            adapter(0, c.gate_up_rank),
            adapter(1, c.down_rank)};
}

} // namespace

ExpertsRun::ExpertsRun(Backend &backend, const ExpertsCase &c)
    : shape(c), rows(c.tokens * c.slots), width(width_of(c)), experts_of(route_of(c)),
      config(config_of(c)), exec(backend.exec()),
      x(backend, {c.tokens * (c.hidden + c.gap)}, {c.dtype}, 0, values(1, c.size, 0.15 * c.size)),
      dy(backend, x.numel, {c.dtype}, 0, values(2, 1)),
      y(backend, {c.tokens * c.hidden}, {c.dtype}, 0, garbage),
      dx(backend, y.numel, {c.dtype}, 0, garbage),
      weight(backend, {rows}, {c.weight_dtype}, 0, values(3, 0.4, 0.5)),
      dweight(backend, {rows}, {c.weight_dtype}, 0, garbage),
      stacks(backend, stacks_of(c), dtypes_of(c), 0, values(10, 0.6)),
      grads(backend, dense_of(c), dtypes_of(c), 0, garbage),
      few_bits{few_bits_of(backend, c, false), few_bits_of(backend, c, true)},
      index(backend, index_of(c)), order(backend, std::vector<uint8_t>(size_t(rows) * 4, 0x55)),
      offsets(backend, std::vector<uint8_t>(size_t(c.experts + 1) * 4, 0x55)), sizes{c.tokens,
                                                                                     c.slots,
                                                                                     c.experts,
                                                                                     c.hidden,
                                                                                     c.features},
      params(params_of(c, stacks, few_bits)), needs(needs_of(c, params, exec)),
      kept(backend,
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
    const uint32_t wanted = wanted_of(c);
    dx_argument = or_null(dx, 0, wanted & HR_EXPERTS_X);
    dweight_argument = or_null(dweight, 0, wanted & HR_EXPERTS_WEIGHT);
    gradient = {or_null(grads, 0, wanted & HR_EXPERTS_GATE_UP),
                or_null(grads, 1, wanted & HR_EXPERTS_DOWN),
                or_null(grads, 2, wanted & HR_EXPERTS_GATE_UP_BIAS),
                or_null(grads, 3, wanted & HR_EXPERTS_DOWN_BIAS),
                or_null(grads, 4, wanted & HR_EXPERTS_GATE_UP_A),
                or_null(grads, 5, wanted & HR_EXPERTS_GATE_UP_B),
                or_null(grads, 6, wanted & HR_EXPERTS_DOWN_A),
                or_null(grads, 7, wanted & HR_EXPERTS_DOWN_B)};
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
    const auto add = [&](const std::vector<uint8_t> &more) {
        all.insert(all.end(), more.begin(), more.end());
    };
    for (const Buffer *buffer : {&index, &order, &offsets})
        add(buffer->content());
    for (const auto &each : few_bits)
        if (each)
            add(each->image());
    return all;
}

std::vector<uint8_t> ExpertsRun::gradients() const
{
    return image_of({&y.buffers, &dx.buffers, &dweight.buffers, &grads.buffers});
}

std::vector<double> ExpertsRun::matrices(size_t k) const
{
    return few_bits[k] ? few_bits[k]->weight() : stacks.values(k);
}

bool ExpertsRun::whole() const
{
    for (const auto &each : few_bits)
        if (each && !each->whole())
            return false;
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
               << ", wanted " << c.wanted << ", formats " << c.gate_up_format << " and "
               << c.down_format << (c.nested ? " nested" : "") << ", adapters of rank "
               << c.gate_up_rank << " and " << c.down_rank << " in " << name_of(c.adapter_dtype);
}
