// mlp.cpp: headroom::mlp_block and its backward op.
//
// What a call does not keep or ask for is returned as a tensor without elements, because a schema
// has no optional results.
#include <deque>
#include <tuple>

#include "torch_ext/core/matrix.h"
#include "torch_ext/core/numbers.h"

namespace
{

using namespace headroom;

// What describes matrices of few bits, beside their codes and scales; format is 0 where there are none,
// and features and gated are then not read.
#define FEW_BITS(of) of(int, features) of(bool, gated) FORMAT(of)
#define FORMAT(of)   of(int, format) of(int, block_size) of(bool, nested)

struct FewBitsNumbers {
    int64_t features;
    bool gated;
    int64_t format, block_size;
    bool nested;
};

// Weights as they are given: a tensor may be absent. Matrices are tensors, or all codes and scales.
struct Weights {
    const OptionalTensor &norm_weight, &norm_bias, &gate_up, &up, &down;
    const OptionalTensor &gate_up_bias, &up_bias, &down_bias;
    const OptionalTensor &gate_up_codes, &gate_up_scales, &up_codes, &up_scales;
    const OptionalTensor &down_codes, &down_scales;
    FewBitsNumbers numbers;
};

// The numbers of the config that all ops take.
#define NUMBERS(of)                                                                     \
    of(int, norm) of(int, casting) of(float, eps) of(float, offset) of(int, activation) \
        of(bool, residual) of(int, tile_tokens)

hr_mlp_config config_of(int64_t precision NUMBERS(HR_PARAMETER))
{
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    NUMBERS(HR_SET)
    set_precision(config, precision);
    return config;
}

// The rows of a call, x or dy, and the weights that it takes.
class Block
{
  public:
    Block(const Tensor &rows, const char *name, const Weights &w, const hr_mlp_config &numbers)
        : rows(rows), matrix(matrix_of(this->rows, name)), exec(this->rows), config(numbers)
    {
        config.dtype = config.norm_dtype = float_of(this->rows, name);
        const int64_t width = w.numbers.format == HR_DENSE ? set_dense(w) : set_few_bits(w);
        params.gate_up_bias = vector(w.gate_up_bias, "gate_up_bias", width, config.dtype);
        params.up_bias = vector(w.up_bias, "up_bias", features, config.dtype);
        params.down_bias = vector(w.down_bias, "down_bias", matrix.cols, config.dtype);
        if (w.norm_weight)
            config.norm_dtype = float_of(View(*w.norm_weight), "norm_weight");
        else if (w.norm_bias)
            config.norm_dtype = float_of(View(*w.norm_bias), "norm_bias");
        params.norm_weight = vector(w.norm_weight, "norm_weight", matrix.cols, config.norm_dtype);
        params.norm_bias = vector(w.norm_bias, "norm_bias", matrix.cols, config.norm_dtype);
    }
    Block(const Block &) = delete;

    hr_mlp_needs needs(int64_t save, int64_t wanted) const
    {
        hr_mlp_needs needs;
        hr_mlp_save level;
        set(level, save, "save");
        check(hr_mlp_query(&needs, matrix.rows, matrix.cols, features, level,
                           static_cast<uint32_t>(wanted), &config, &exec.exec));
        return needs;
    }

    int64_t width() const
    {
        return config.gated ? 2 * features : features;
    }

    // A new tensor [rows, cols] that belongs to the rows of x, or one without elements.
    Tensor kept(size_t bytes, int64_t cols) const
    {
        const int64_t sizes[] = {matrix.rows, cols};
        return bytes ? new_tensor(rows.tensor, {sizes, 2}) : nothing(rows.tensor);
    }

    Tensor statistics(size_t bytes) const
    {
        const int64_t count = bytes ? matrix.rows : 0;
        return new_tensor(rows.tensor, {&count, 1}, ScalarType::Float);
    }

    // A tensor that forward kept: NULL if it has no elements.
    void *held(const Tensor &tensor, const char *name, int64_t cols, hr_dtype dtype) const
    {
        const View view(tensor);
        if (view.numel() == 0)
            return nullptr;
        if (!view.is_with(rows) || dtype_of(view.torch_dtype) != dtype ||
            view.numel() != matrix.rows * cols || !view.is_contiguous())
            fail(std::string(name) + " is not what headroom::mlp_block kept");
        require_memory(view, name);
        return view.data;
    }

    // A tensor of the shape, dtype and device of the rows.
    const Tensor &like_rows(const Tensor &tensor, const char *name) const
    {
        const View view(tensor);
        if (!view.has_sizes_of(rows) || !view.is_with(rows) || view.torch_dtype != rows.torch_dtype)
            fail(std::string(name) + " must have the shape, dtype and device of dy");
        return tensor;
    }

    const View rows;
    const Matrix matrix;
    const Exec exec;
    int64_t features;
    hr_mlp_config config;
    hr_mlp_params params = {};

  private:
    // Return how many rows gate_up has.
    int64_t set_dense(const Weights &w)
    {
        if (!w.gate_up || !w.down || w.gate_up_codes || w.gate_up_scales || w.up_codes ||
            w.up_scales || w.down_codes || w.down_scales)
            fail("wanted gate_up and down, and neither codes nor scales, for format 0");
        const View down(*w.down), gate_up(*w.gate_up);
        if (down.dim != 2 || gate_up.dim != 2)
            fail("gate_up and down must be matrices");
        features = down.sizes[1];
        config.gated = w.up || gate_up.sizes[0] != features;
        const int64_t width = config.gated && !w.up ? 2 * features : features;
        params.gate_up = weight(*w.gate_up, "gate_up", width, matrix.cols);
        if (w.up)
            params.up = weight(*w.up, "up", features, matrix.cols);
        params.down = weight(*w.down, "down", matrix.cols, features);
        return width;
    }

    int64_t set_few_bits(const Weights &w)
    {
        if (w.gate_up || w.up || w.down || !w.gate_up_codes || !w.gate_up_scales || !w.down_codes ||
            !w.down_scales || !w.up_codes != !w.up_scales)
            fail("wanted codes and scales of gate_up and down, and no matrices, for format " +
                 std::to_string(w.numbers.format));
        features = w.numbers.features;
        config.gated = w.numbers.gated;
        const int64_t width = config.gated && !w.up_codes ? 2 * features : features;
        config.gate_up = few_bits(*w.gate_up_codes, *w.gate_up_scales, width, matrix.cols, w);
        if (w.up_codes)
            config.up = few_bits(*w.up_codes, *w.up_scales, features, matrix.cols, w);
        config.down = few_bits(*w.down_codes, *w.down_scales, matrix.cols, features, w);
        return width;
    }

    const hr_matrix *few_bits(const Tensor &codes, const Tensor &scales, int64_t outputs,
                              int64_t inputs, const Weights &w)
    {
        FewBits &bits = few_bits_.emplace_back(outputs, inputs, w.numbers.format,
                                               w.numbers.block_size, w.numbers.nested);
        bits.matrix.dtype = config.dtype;
        Tensor &own = codes_.emplace_back(codes);
        require_with(View(own), "codes", rows, "the rows");
        bits.point_to(own, codes_.emplace_back(scales));
        return &bits.matrix;
    }

    void require_like(const View &view, const char *name, hr_dtype dtype) const
    {
        if (!view.is_with(rows))
            fail(std::string(name) + " is on " + view.device_name() + ", but the rows are on " +
                 rows.device_name());
        if (dtype_of(view.torch_dtype) != dtype)
            fail(std::string(name) + " has dtype " +
                 torch::headeronly::toString(view.tensor.scalar_type()) +
                 ", another than that of " + (dtype == config.dtype ? "the rows" : "norm_weight"));
    }

    hr_rows weight(const Tensor &tensor, const char *name, int64_t outputs, int64_t inputs)
    {
        const View view(tensor);
        if (view.dim != 2 || view.sizes[0] != outputs || view.sizes[1] != inputs)
            fail(std::string(name) + " must be a matrix [" + std::to_string(outputs) + ", " +
                 std::to_string(inputs) + "]");
        require_like(view, name, config.dtype);
        return *matrices_.emplace_back(tensor, name).get();
    }

    void *vector(const OptionalTensor &tensor, const char *name, int64_t size, hr_dtype dtype)
    {
        if (!tensor)
            return nullptr;
        const View view(*tensor);
        if (view.dim != 1 || view.sizes[0] != size)
            fail(std::string(name) + " must be a tensor [" + std::to_string(size) + "]");
        require_like(view, name, dtype);
        return View(vectors_.emplace_back(dense_of(*tensor, name))).data;
    }

    std::deque<RowsIn> matrices_;
    std::deque<Tensor> vectors_, codes_;
    std::deque<FewBits> few_bits_;
};

#define MATRICES                                                               \
    const OptionalTensor &gate_up_codes, const OptionalTensor &gate_up_scales, \
        const OptionalTensor &up_codes, const OptionalTensor &up_scales,       \
        const OptionalTensor &down_codes, const OptionalTensor &down_scales
#define WEIGHTS                                                                          \
    {                                                                                    \
        norm_weight, norm_bias, gate_up, up, down, gate_up_bias, up_bias, down_bias,     \
            gate_up_codes, gate_up_scales, up_codes, up_scales, down_codes, down_scales, \
        {                                                                                \
            features, gated, format, block_size, nested                                  \
        }                                                                                \
    }

void *data_of(const Tensor &tensor)
{
    return View(tensor).data;
}

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward mlp_block(const Tensor &x, const OptionalTensor &norm_weight,
                  const OptionalTensor &norm_bias, const OptionalTensor &gate_up,
                  const OptionalTensor &up, const OptionalTensor &down,
                  const OptionalTensor &gate_up_bias, const OptionalTensor &up_bias,
                  const OptionalTensor &down_bias,
                  MATRICES NUMBERS(HR_PARAMETER) FEW_BITS(HR_PARAMETER), int64_t save,
                  int64_t wanted, int64_t precision)
{
    const Block block(x, "x", WEIGHTS, config_of(precision NUMBERS(HR_ARGUMENT)));
    const RowsIn in(x, "x");
    const hr_mlp_needs needs = block.needs(save, wanted);
    const Tensor y = empty_rows(block.rows, x);
    const Tensor mean = block.statistics(needs.mean), rstd = block.statistics(needs.rstd);
    const Tensor normed = block.kept(needs.normed, block.matrix.cols);
    const Tensor gates = block.kept(needs.gate_up, block.width());
    const Tensor activated = block.kept(needs.activated, block.features);
    const Tensor workspace = workspace_of(needs.forward_workspace, x);
    const auto kept = [](size_t bytes, const Tensor &t) { return bytes ? data_of(t) : nullptr; };
    const hr_mlp_saved saved = {
        static_cast<float *>(kept(needs.mean, mean)), static_cast<float *>(kept(needs.rstd, rstd)),
        kept(needs.normed, normed), kept(needs.gate_up, gates), kept(needs.activated, activated)};
    const hr_rows y_rows = rows_of(y);
    check(hr_mlp_forward(&y_rows, &saved, in.get(), &block.params, block.matrix.rows,
                         block.matrix.cols, block.features, &block.config, data_of(workspace),
                         needs.forward_workspace, &block.exec.exec));
    return {y, mean, rstd, normed, gates, activated};
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Gradients mlp_block_backward(const Tensor &dy, const OptionalTensor &x,
                             const OptionalTensor &norm_weight, const OptionalTensor &norm_bias,
                             const OptionalTensor &gate_up, const OptionalTensor &up,
                             const OptionalTensor &down, const OptionalTensor &gate_up_bias,
                             const OptionalTensor &up_bias, MATRICES, const Tensor &mean,
                             const Tensor &rstd, const Tensor &normed, const Tensor &gates,
                             const Tensor &activated NUMBERS(HR_PARAMETER) FEW_BITS(HR_PARAMETER),
                             int64_t save, int64_t wanted, int64_t precision, int64_t gradients)
{
    const OptionalTensor down_bias; // which is not read
    const Block block(dy, "dy", WEIGHTS, config_of(precision NUMBERS(HR_ARGUMENT)));
    if (gradients & ~wanted)
        fail("gradients is " + std::to_string(gradients) + ", wanted a part of " +
             std::to_string(wanted));
    const RowsIn dy_in(dy, "dy");
    std::optional<RowsIn> x_in;
    if (x)
        x_in.emplace(block.like_rows(*x, "x"), "x");
    const hr_mlp_needs needs = block.needs(save, wanted);
    const hr_mlp_config &config = block.config;
    const int64_t hidden = block.matrix.cols, inner = block.features;
    const hr_mlp_saved saved = {static_cast<float *>(block.held(mean, "mean", 1, HR_F32)),
                                static_cast<float *>(block.held(rstd, "rstd", 1, HR_F32)),
                                block.held(normed, "normed", hidden, config.dtype),
                                block.held(gates, "gates", block.width(), config.dtype),
                                block.held(activated, "activated", inner, config.dtype)};

    hr_mlp_params grads = {};
    const bool of_norm = gradients & (HR_MLP_NORM_WEIGHT | HR_MLP_NORM_BIAS);
    const bool want_dx = gradients & HR_MLP_X || of_norm;
    const Tensor dx = empty_like_if(want_dx, block.rows);
    const auto vector = [&](int which, int64_t size, void *&address, hr_dtype dtype) {
        const int64_t count = gradients & which ? size : 0;
        Tensor tensor = new_tensor(dy, {&count, 1}, scalar_type_of(dtype));
        address = count ? data_of(tensor) : nullptr;
        return tensor;
    };
    const auto matrix = [&](int which, int64_t outputs, int64_t inputs, hr_rows &rows) {
        const int64_t sizes[] = {outputs, inputs};
        if (!(gradients & which) || !outputs)
            return nothing(dy);
        Tensor tensor = new_tensor(dy, {sizes, 2});
        rows = {data_of(tensor), inputs};
        return tensor;
    };
    const bool apart = up || up_codes;
    const int64_t width = apart ? inner : block.width(), up_width = apart ? inner : 0;
    const Tensor dnorm_weight =
        vector(HR_MLP_NORM_WEIGHT, hidden, grads.norm_weight, config.norm_dtype);
    const Tensor dnorm_bias = vector(HR_MLP_NORM_BIAS, hidden, grads.norm_bias, config.norm_dtype);
    const Tensor dgate_up = matrix(HR_MLP_GATE_UP, width, hidden, grads.gate_up);
    const Tensor dup = matrix(HR_MLP_GATE_UP, up_width, hidden, grads.up);
    const Tensor ddown = matrix(HR_MLP_DOWN, hidden, inner, grads.down);
    const Tensor dgate_up_bias =
        vector(HR_MLP_GATE_UP_BIAS, width, grads.gate_up_bias, config.dtype);
    const Tensor dup_bias = vector(HR_MLP_GATE_UP_BIAS, up_width, grads.up_bias, config.dtype);
    const Tensor ddown_bias = vector(HR_MLP_DOWN_BIAS, hidden, grads.down_bias, config.dtype);
    const Tensor workspace = workspace_of(needs.backward_workspace, dy);
    const hr_rows dx_rows = rows_of(dx);
    if (gradients)
        check(hr_mlp_backward(want_dx ? &dx_rows : nullptr, &grads, dy_in.get(),
                              x_in ? x_in->get() : nullptr, &block.params, &saved,
                              block.matrix.rows, hidden, inner, &config, data_of(workspace),
                              needs.backward_workspace, &block.exec.exec));
    return {dx,    dnorm_weight,  dnorm_bias, dgate_up,  dup,
            ddown, dgate_up_bias, dup_bias,   ddown_bias};
}

// Bytes that the ops above allocate besides their results, for plans. dtypes are hr_dtype. Without CUDA
// they are those of the CPU.
std::tuple<int64_t, int64_t> mlp_block_workspace(int64_t tokens, int64_t hidden, int64_t features,
                                                 int64_t dtype, int64_t norm_dtype, bool gated,
                                                 bool apart,
                                                 bool is_cuda NUMBERS(HR_PARAMETER)
                                                     FORMAT(HR_PARAMETER),
                                                 int64_t save, int64_t wanted, int64_t precision)
{
    hr_mlp_config config = config_of(precision NUMBERS(HR_ARGUMENT));
    set(config.dtype, dtype, "dtype");
    set(config.norm_dtype, norm_dtype, "norm_dtype");
    config.gated = gated;
    std::deque<FewBits> few_bits;
    const auto described = [&](int64_t outputs, int64_t inputs) {
        FewBits &bits = few_bits.emplace_back(outputs, inputs, format, block_size, nested);
        bits.point_to_unread();
        bits.matrix.dtype = config.dtype;
        return &bits.matrix;
    };
    if (format != HR_DENSE) {
        config.gate_up = described(gated && !apart ? 2 * features : features, hidden);
        config.up = apart ? described(features, hidden) : nullptr;
        config.down = described(hidden, features);
    }
    hr_mlp_needs needs;
    hr_mlp_save level;
    set(level, save, "save");
    const auto query = [&](int32_t device) {
        const hr_exec exec = {device, nullptr};
        return hr_mlp_query(&needs, tokens, hidden, features, level, static_cast<uint32_t>(wanted),
                            &config, &exec);
    };
    if (!is_cuda || query(0) != HR_OK)
        check(query(HR_CPU));
    return {static_cast<int64_t>(needs.forward_workspace),
            static_cast<int64_t>(needs.backward_workspace)};
}

} // namespace

#define CODES                                                                              \
    "Tensor? gate_up_codes, Tensor? gate_up_scales, Tensor? up_codes, Tensor? up_scales, " \
    "Tensor? down_codes, Tensor? down_scales"

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("mlp_block(Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor? gate_up, "
          "Tensor? up, Tensor? down, Tensor? gate_up_bias, Tensor? up_bias, "
          "Tensor? down_bias, " CODES NUMBERS(HR_SCHEMA)
              FEW_BITS(HR_SCHEMA) ", int save, int wanted, int precision) -> (Tensor y, Tensor "
                                  "mean, Tensor rstd, Tensor normed, Tensor gates, Tensor "
                                  "activated)");
    m.def("mlp_block_backward(Tensor dy, Tensor? x, Tensor? norm_weight, Tensor? norm_bias, "
          "Tensor? gate_up, Tensor? up, Tensor? down, Tensor? gate_up_bias, Tensor? up_bias, " CODES
          ", Tensor mean, Tensor rstd, Tensor normed, Tensor gates, "
          "Tensor activated" NUMBERS(HR_SCHEMA) FEW_BITS(
              HR_SCHEMA) ", int save, int wanted, int precision, int gradients) -> (Tensor dx, "
                         "Tensor dnorm_weight, Tensor dnorm_bias, Tensor dgate_up, Tensor dup, "
                         "Tensor ddown, "
                         "Tensor dgate_up_bias, Tensor dup_bias, Tensor ddown_bias)");
    m.def("mlp_block_workspace(int tokens, int hidden, int features, int dtype, int norm_dtype, "
          "bool gated, bool apart, bool is_cuda" NUMBERS(HR_SCHEMA)
              FORMAT(HR_SCHEMA) ", int save, int wanted, int precision) -> "
                                "(int forward, int backward)");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("mlp_block_workspace", TORCH_BOX(&mlp_block_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("mlp_block", TORCH_BOX(&mlp_block));
    m.impl("mlp_block_backward", TORCH_BOX(&mlp_block_backward));
}
