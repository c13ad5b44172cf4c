// experts.cpp: headroom::experts and its backward op.
//
// What a call does not keep or ask for is returned as a tensor without elements, because a schema
// has no optional results. Offsets of experts are on the host: on CUDA one copy for each call of
// `experts` waits for the device, and its backward op none.
#include <deque>
#include <tuple>

#include "torch_ext/core/matrix.h"
#include "torch_ext/core/numbers.h"

namespace
{

using namespace headroom;

// The numbers of the config that all ops take.
#define NUMBERS(of)                                                                \
    of(int, activation) of(bool, gated) of(bool, transposed) of(bool, interleaved) \
        of(float, alpha) of(float, limit) of(int, tile_rows)

// Sizes that codes do not show, and how the stacks lie: format 0 is a dense one.
#define FORMATS(of)                                                                        \
    of(int, experts) of(int, features) of(int, gate_up_format) of(int, gate_up_block_size) \
        of(bool, gate_up_nested) of(int, down_format) of(int, down_block_size)             \
            of(bool, down_nested)
// Of adapters.
#define SCALES(of) of(float, gate_up_adapter_scale) of(float, down_adapter_scale)

hr_experts_config config_of(int64_t precision NUMBERS(HR_PARAMETER))
{
    hr_experts_config config = HR_EXPERTS_CONFIG_INIT;
    NUMBERS(HR_SET)
    set_precision(config, precision);
    return config;
}

// The matrices of a product, dense or codes with scales; its biases and adapters may be absent.
struct Stack {
    const char *name;
    const Tensor &matrices;
    const OptionalTensor &bias, &scales, &a, &b;
    int64_t format, block_size;
    bool nested;
    double scale;
};

#define STACKS                                                                     \
    const Tensor &gate_up, const Tensor &down, const OptionalTensor &gate_up_bias, \
        const OptionalTensor &down_bias, const OptionalTensor &gate_up_scales,     \
        const OptionalTensor &down_scales, const OptionalTensor &gate_up_a,        \
        const OptionalTensor &gate_up_b, const OptionalTensor &down_a,             \
        const OptionalTensor &down_b
#define GATE_UP                                                                                 \
    {                                                                                           \
        "gate_up", gate_up, gate_up_bias, gate_up_scales, gate_up_a, gate_up_b, gate_up_format, \
            gate_up_block_size, gate_up_nested, gate_up_adapter_scale                           \
    }
#define DOWN                                                                                \
    {                                                                                       \
        "down", down, down_bias, down_scales, down_a, down_b, down_format, down_block_size, \
            down_nested, down_adapter_scale                                                 \
    }

hr_experts_needs needs_of(const hr_experts_sizes &sizes, int64_t save, int64_t wanted,
                          const hr_experts_params &params, const hr_experts_config &config,
                          const hr_exec &exec)
{
    hr_experts_needs needs;
    hr_experts_save level;
    set(level, save, "save");
    check(hr_experts_query(&needs, &sizes, level, static_cast<uint32_t>(wanted), &params, &config,
                           &exec));
    return needs;
}

// Of a stack of few bits, which is one matrix.
int64_t all_rows(int64_t experts, int64_t rows)
{
    if (experts < 1 || rows > INT64_MAX / experts)
        fail("experts is " + std::to_string(experts) + ", wanted 1 or more, and fewer");
    return experts * rows;
}

// The rows of a call, x or dy, its routing weights and its stacks.
class Experts
{
  public:
    Experts(const Tensor &rows_in, const char *name, const Tensor &weight_in, int64_t experts,
            int64_t features, const Stack &gate_up, const Stack &down,
            const hr_experts_config &numbers)
        : rows(rows_in), name_(name), exec(rows), config(numbers),
          weight_(dense_of(weight_in, "weight")), weight(weight_)
    {
        config.dtype = float_of(rows, name);
        config.weight_dtype = float_of(weight, "weight");
        if (rows.dim != 2)
            fail(std::string(name) + " must be a matrix [tokens, hidden]");
        require_with(weight, "weight", rows, name);
        if (weight.dim != 2 || weight.sizes[0] != rows.sizes[0])
            fail("weight must be a matrix [" + std::to_string(rows.sizes[0]) + ", slots]");
        if (experts < 1 || features < 1 || features > INT64_MAX / 2 / experts)
            fail("experts is " + std::to_string(experts) + " and features " +
                 std::to_string(features) + ", wanted 1 or more of each");
        sizes = {rows.sizes[0], weight.sizes[1], experts, rows.sizes[1], features};
        width = config.gated ? 2 * features : features;
        set_stack(params.gate_up, params.gate_up_pitch, gate_up, width, sizes.hidden);
        set_stack(params.down, params.down_pitch, down, sizes.hidden, features);
        params.gate_up_bias = bias(gate_up.bias, "gate_up_bias", width);
        params.down_bias = bias(down.bias, "down_bias", sizes.hidden);
        set_adapter(params.gate_up_adapter, gate_up, width, sizes.hidden);
        set_adapter(params.down_adapter, down, sizes.hidden, features);
    }
    Experts(const Experts &) = delete;

    int64_t count() const
    {
        return sizes.tokens * sizes.slots;
    }

    // A new tensor [rows, cols] in the order of the experts, or one without elements.
    Tensor kept(size_t bytes, int64_t cols) const
    {
        const int64_t shape[] = {count(), cols};
        return bytes ? new_tensor(rows.tensor, {shape, 2}) : nothing(rows.tensor);
    }

    // A tensor that forward kept: NULL if it has no elements.
    void *held(const Tensor &tensor, const char *name, int64_t numel, int32_t torch_dtype,
               bool on_host = false) const
    {
        const View view(tensor);
        if (view.numel() == 0)
            return nullptr;
        if (!(on_host ? view.is_cpu() : view.is_with(rows)) || view.torch_dtype != torch_dtype ||
            view.numel() != numel || !view.is_contiguous())
            fail(std::string(name) + " is not what headroom::experts returned");
        require_memory(view, name);
        return view.data;
    }

    const View rows;

  private:
    const char *name_;

  public:
    const Exec exec;
    hr_experts_config config;

  private:
    const Tensor weight_;

  public:
    const View weight;
    hr_experts_sizes sizes;
    int64_t width;
    hr_experts_params params = HR_EXPERTS_PARAMS_INIT;

  private:
    void set_stack(hr_matrix &matrix, int64_t &pitch, const Stack &stack, int64_t outputs,
                   int64_t inputs)
    {
        const Tensor &given = stack.matrices;
        const char *const name = stack.name;
        const int64_t r = config.transposed ? inputs : outputs;
        const int64_t c = config.transposed ? outputs : inputs;
        const View before(given);
        if (stack.format != HR_DENSE) {
            if (!stack.scales)
                fail(std::string(name) + "_scales is None, but " + name + " has few bits");
            require_with(before, name, rows, name_);
            FewBits bits(all_rows(sizes.experts, r), c, stack.format, stack.block_size,
                         stack.nested);
            bits.matrix.dtype = config.dtype;
            Tensor &codes = held_.emplace_back(given);
            bits.point_to(codes, held_.emplace_back(*stack.scales));
            matrix = bits.matrix;
            return;
        }
        if (before.dim != 3)
            fail("gate_up and down must have 3 dimensions");
        matrix.dtype = float_of(before, name);
        require_with(before, name, rows, name_);
        if (before.sizes[0] != sizes.experts || before.sizes[1] != r || before.sizes[2] != c)
            fail(std::string(name) + " must be a tensor [" + std::to_string(sizes.experts) + ", " +
                 std::to_string(r) + ", " + std::to_string(c) + "]");
        const int64_t *s = before.strides;
        const bool lies = (c <= 1 || s[2] == 1) && (r <= 1 || s[1] >= c) &&
                          (sizes.experts <= 1 || s[0] >= (r - 1) * s[1] + c);
        require_memory(before, name);
        const View view(held_.emplace_back(lies ? given : dense_of(given, name)));
        matrix.rows = r, matrix.cols = c;
        matrix.stride = std::max(view.strides[1], c);
        matrix.data = view.data;
        pitch = view.strides[0];
    }

    void set_adapter(hr_experts_adapter &adapter, const Stack &stack, int64_t outputs,
                     int64_t inputs)
    {
        if (!stack.a && !stack.b)
            return;
        const std::string name = stack.name, of_a = name + "_a", of_b = name + "_b";
        if (!stack.a || !stack.b)
            fail((stack.a ? of_b : of_a) + " is None, but " + (stack.a ? of_a : of_b) +
                 " is given");
        const View a(*stack.a), b(*stack.b);
        adapter.dtype = float_of(a, of_a.c_str());
        require_with(a, of_a.c_str(), rows, name_);
        require_with(b, of_b.c_str(), rows, name_);
        require_dtype_of(b, of_b.c_str(), a, of_a.c_str());
        adapter.rank = a.dim == 3 ? a.sizes[1] : 0;
        if (adapter.rank < 1 || a.sizes[0] != sizes.experts || a.sizes[2] != inputs)
            fail(of_a + " must be a tensor [" + std::to_string(sizes.experts) + ", rank, " +
                 std::to_string(inputs) + "] with a rank of 1 or more");
        if (b.dim != 3 || b.sizes[0] != sizes.experts || b.sizes[1] != outputs ||
            b.sizes[2] != adapter.rank)
            fail(of_b + " must be a tensor [" + std::to_string(sizes.experts) + ", " +
                 std::to_string(outputs) + ", " + std::to_string(adapter.rank) + "]");
        adapter.scale = stack.scale;
        adapter.a = View(held_.emplace_back(dense_of(*stack.a, of_a.c_str()))).data;
        adapter.b = View(held_.emplace_back(dense_of(*stack.b, of_b.c_str()))).data;
    }

    const void *bias(const OptionalTensor &tensor, const char *name, int64_t cols)
    {
        if (!tensor)
            return nullptr;
        const View view(*tensor);
        require_with(view, name, rows, name_);
        require_dtype_of(view, name, rows, name_);
        if (view.dim != 2 || view.sizes[0] != sizes.experts || view.sizes[1] != cols)
            fail(std::string(name) + " must be a tensor [" + std::to_string(sizes.experts) + ", " +
                 std::to_string(cols) + "]");
        return View(held_.emplace_back(dense_of(*tensor, name))).data;
    }

    std::deque<Tensor> held_; // what the pointers point to
};

void *data_of(const Tensor &tensor)
{
    return View(tensor).data;
}

int32_t index_bytes(const View &index)
{
    if (index.torch_dtype == aoti_torch_dtype_int64())
        return 8;
    if (index.torch_dtype == aoti_torch_dtype_int32())
        return 4;
    if (index.torch_dtype == aoti_torch_dtype_int16())
        return 2;
    fail(std::string("index has dtype ") + torch::headeronly::toString(index.tensor.scalar_type()) +
         ", wanted int64, int32 or int16");
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward mixture(const Tensor &x, const Tensor &index, const Tensor &weight,
                STACKS NUMBERS(HR_PARAMETER) FORMATS(HR_PARAMETER) SCALES(HR_PARAMETER),
                int64_t save, int64_t wanted, int64_t precision)
{
    const Experts call(x, "x", weight, experts, features, GATE_UP, DOWN,
                       config_of(precision NUMBERS(HR_ARGUMENT)));
    const RowsIn in(x, "x");
    const View of_index(index);
    require_with(of_index, "index", call.rows, "x");
    const int32_t bytes = index_bytes(of_index);
    if (!of_index.has_sizes_of(call.weight))
        fail("index has another shape than weight");
    const Tensor dense_index = dense_of(index, "index");
    const hr_experts_needs needs =
        needs_of(call.sizes, save, wanted, call.params, call.config, call.exec.exec);
    const int64_t rows = call.count(), ends = call.sizes.experts + 1;
    const Tensor order = new_tensor(x, {&rows, 1}, ScalarType::Int);
    Tensor offsets = new_tensor(x, {&ends, 1}, ScalarType::Int);
    check(hr_route(static_cast<int32_t *>(data_of(offsets)), static_cast<int32_t *>(data_of(order)),
                   data_of(dense_index), bytes, rows, call.sizes.experts, &call.exec.exec));
    if (call.rows.is_cuda())
        offsets = torch::stable::to(
            offsets, torch::stable::Device(torch::headeronly::DeviceType::CPU), false, false);
    const Tensor y = empty_rows(call.rows, x);
    const Tensor gates = call.kept(needs.gate_up, call.width);
    const Tensor activated = call.kept(needs.activated, call.sizes.features);
    const Tensor workspace = workspace_of(needs.forward_workspace, x);
    const hr_experts_saved saved = {needs.gate_up ? data_of(gates) : nullptr,
                                    needs.activated ? data_of(activated) : nullptr};
    check(hr_experts_forward(data_of(y), &saved, in.get(), call.weight.data,
                             static_cast<const int32_t *>(data_of(order)),
                             static_cast<const int32_t *>(data_of(offsets)), &call.params,
                             &call.sizes, &call.config, data_of(workspace), needs.forward_workspace,
                             &call.exec.exec));
    return {y, gates, activated, order, offsets};
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients mixture_backward(const Tensor &dy, const OptionalTensor &x, const Tensor &weight, STACKS,
                           const Tensor &gates, const Tensor &activated, const Tensor &order,
                           const Tensor &offsets NUMBERS(HR_PARAMETER) FORMATS(HR_PARAMETER)
                               SCALES(HR_PARAMETER),
                           int64_t save, int64_t wanted, int64_t precision, int64_t gradients)
{
    const Experts call(dy, "dy", weight, experts, features, GATE_UP, DOWN,
                       config_of(precision NUMBERS(HR_ARGUMENT)));
    if (gradients & ~wanted)
        fail("gradients is " + std::to_string(gradients) + ", wanted a part of " +
             std::to_string(wanted));
    const RowsIn dy_in(dy, "dy");
    std::optional<RowsIn> x_in;
    if (x)
        x_in.emplace(require_like(call.rows, "dy", *x, "x"), "x");
    const hr_experts_needs needs =
        needs_of(call.sizes, save, wanted, call.params, call.config, call.exec.exec);
    const int64_t rows = call.count();
    const hr_experts_saved saved = {
        call.held(gates, "gates", rows * call.width, call.rows.torch_dtype),
        call.held(activated, "activated", rows * call.sizes.features, call.rows.torch_dtype)};
    const void *const numbers = call.held(order, "order", rows, aoti_torch_dtype_int32());
    const void *const ends =
        call.held(offsets, "offsets", call.sizes.experts + 1, aoti_torch_dtype_int32(), true);
    const auto made = [&](int bit, const View &like) {
        const bool is_wanted = gradients & bit;
        return is_wanted ? new_tensor(like.tensor, {like.sizes, static_cast<size_t>(like.dim)})
                         : nothing(dy);
    };
    const auto of_optional = [&](int bit, const OptionalTensor &tensor) {
        return tensor ? made(bit, View(*tensor)) : nothing(dy);
    };
    const Tensor dx = made(HR_EXPERTS_X, call.rows);
    const Tensor dweight = made(HR_EXPERTS_WEIGHT, View(weight));
    const Tensor dgate_up = made(HR_EXPERTS_GATE_UP, View(gate_up));
    const Tensor ddown = made(HR_EXPERTS_DOWN, View(down));
    const Tensor dgate_up_bias = of_optional(HR_EXPERTS_GATE_UP_BIAS, gate_up_bias);
    const Tensor ddown_bias = of_optional(HR_EXPERTS_DOWN_BIAS, down_bias);
    const Tensor dgate_up_a = of_optional(HR_EXPERTS_GATE_UP_A, gate_up_a);
    const Tensor dgate_up_b = of_optional(HR_EXPERTS_GATE_UP_B, gate_up_b);
    const Tensor ddown_a = of_optional(HR_EXPERTS_DOWN_A, down_a);
    const Tensor ddown_b = of_optional(HR_EXPERTS_DOWN_B, down_b);
    const auto address = [&](int bit, const Tensor &tensor) {
        return gradients & bit ? data_of(tensor) : nullptr;
    };
    const hr_experts_grads grads = {address(HR_EXPERTS_GATE_UP, dgate_up),
                                    address(HR_EXPERTS_DOWN, ddown),
                                    address(HR_EXPERTS_GATE_UP_BIAS, dgate_up_bias),
                                    address(HR_EXPERTS_DOWN_BIAS, ddown_bias),
                                    address(HR_EXPERTS_GATE_UP_A, dgate_up_a),
                                    address(HR_EXPERTS_GATE_UP_B, dgate_up_b),
                                    address(HR_EXPERTS_DOWN_A, ddown_a),
                                    address(HR_EXPERTS_DOWN_B, ddown_b)};
    const bool is_empty = rows == 0; // x and weight then have no gradient to write
    const int written =
        is_empty ? gradients & ~(HR_EXPERTS_X | HR_EXPERTS_WEIGHT) : static_cast<int>(gradients);
    const Tensor workspace = workspace_of(needs.backward_workspace, dy);
    if (written)
        check(hr_experts_backward(
            address(HR_EXPERTS_X, dx), address(HR_EXPERTS_WEIGHT, dweight), &grads, dy_in.get(),
            x_in ? x_in->get() : nullptr, call.weight.data, static_cast<const int32_t *>(numbers),
            static_cast<const int32_t *>(ends), &saved, &call.params, &call.sizes, &call.config,
            data_of(workspace), needs.backward_workspace, &call.exec.exec));
    return {dx,         dweight,    dgate_up,   ddown,   dgate_up_bias,
            ddown_bias, dgate_up_a, dgate_up_b, ddown_a, ddown_b};
}

// Bytes that the ops above allocate besides their results, for plans. dtypes are hr_dtype; a rank of 0
// is no adapter. Without CUDA they are those of the CPU.
std::tuple<int64_t, int64_t> experts_workspace(int64_t tokens, int64_t slots, int64_t hidden,
                                               int64_t dtype, int64_t weight_dtype,
                                               int64_t gate_up_dtype, int64_t down_dtype,
                                               int64_t gate_up_rank, int64_t gate_up_adapter_dtype,
                                               int64_t down_rank, int64_t down_adapter_dtype,
                                               bool is_cuda NUMBERS(HR_PARAMETER)
                                                   FORMATS(HR_PARAMETER),
                                               int64_t save, int64_t wanted, int64_t precision)
{
    hr_experts_config config = config_of(precision NUMBERS(HR_ARGUMENT));
    set(config.dtype, dtype, "dtype");
    set(config.weight_dtype, weight_dtype, "weight_dtype");
    const int64_t width = gated ? 2 * features : features;
    const auto described = [&](int64_t outputs, int64_t inputs, int64_t own_dtype, int64_t format,
                               int64_t block_size, bool nested) {
        hr_matrix matrix = HR_MATRIX_INIT;
        const int64_t count = transposed ? inputs : outputs, cols = transposed ? outputs : inputs;
        if (format != HR_DENSE) {
            FewBits bits(all_rows(experts, count), cols, format, block_size, nested);
            bits.point_to_unread();
            matrix = bits.matrix;
        } else {
            matrix.rows = count;
            matrix.cols = matrix.stride = cols;
            matrix.data = unread;
        }
        set(matrix.dtype, own_dtype, "dtype");
        return matrix;
    };
    const auto adapter = [&](int64_t rank, int64_t own_dtype) {
        hr_experts_adapter found = {rank, 1.0, HR_F32, nullptr, nullptr};
        set(found.dtype, own_dtype, "dtype");
        return found;
    };
    const hr_experts_params params = {
        described(width, hidden, gate_up_dtype, gate_up_format, gate_up_block_size, gate_up_nested),
        described(hidden, features, down_dtype, down_format, down_block_size, down_nested),
        width * hidden,
        hidden * features,
        nullptr,
        nullptr,
        adapter(gate_up_rank, gate_up_adapter_dtype),
        adapter(down_rank, down_adapter_dtype)};
    const hr_experts_sizes sizes = {tokens, slots, experts, hidden, features};
    hr_experts_needs needs;
    hr_experts_save level;
    set(level, save, "save");
    const auto query = [&](int32_t device) {
        const hr_exec exec = {device, nullptr};
        return hr_experts_query(&needs, &sizes, level, static_cast<uint32_t>(wanted), &params,
                                &config, &exec);
    };
    if (!is_cuda || query(0) != HR_OK)
        check(query(HR_CPU));
    return {static_cast<int64_t>(needs.forward_workspace),
            static_cast<int64_t>(needs.backward_workspace)};
}

} // namespace

#define STACKS_SCHEMA                                                                     \
    "Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias, "              \
    "Tensor? gate_up_scales, Tensor? down_scales, Tensor? gate_up_a, Tensor? gate_up_b, " \
    "Tensor? down_a, Tensor? down_b"

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("experts(Tensor x, Tensor index, Tensor weight, " STACKS_SCHEMA NUMBERS(HR_SCHEMA)
              FORMATS(HR_SCHEMA) SCALES(HR_SCHEMA) ", int save, int wanted, int precision) -> "
                                                   "(Tensor y, Tensor gates, Tensor activated, "
                                                   "Tensor order, Tensor offsets)");
    m.def("experts_backward(Tensor dy, Tensor? x, Tensor weight, " STACKS_SCHEMA
          ", Tensor gates, Tensor activated, Tensor order, Tensor offsets" NUMBERS(HR_SCHEMA)
              FORMATS(HR_SCHEMA) SCALES(HR_SCHEMA) ", int save, int wanted, int precision, "
                                                   "int gradients) -> (Tensor dx, Tensor dweight, "
                                                   "Tensor dgate_up, Tensor ddown, "
                                                   "Tensor dgate_up_bias, Tensor ddown_bias, "
                                                   "Tensor dgate_up_a, Tensor dgate_up_b, "
                                                   "Tensor ddown_a, Tensor ddown_b)");
    m.def("experts_workspace(int tokens, int slots, int hidden, int dtype, int weight_dtype, "
          "int gate_up_dtype, int down_dtype, int gate_up_rank, int gate_up_adapter_dtype, "
          "int down_rank, int down_adapter_dtype, bool is_cuda" NUMBERS(HR_SCHEMA)
              FORMATS(HR_SCHEMA) ", int save, int wanted, int precision) -> "
                                 "(int forward, int backward)");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("experts_workspace", TORCH_BOX(&experts_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("experts", TORCH_BOX(&mixture));
    m.impl("experts_backward", TORCH_BOX(&mixture_backward));
}
