// linear_cross_entropy.cpp: headroom::linear_cross_entropy, which returns the gradients with the
// loss, and the ops that compute them from a loss of rows.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/core/matrix.h"
#include "torch_ext/core/numbers.h"
#include "torch_ext/loss/loss_rows.h"

namespace
{

using namespace headroom;

// Bits of `results`.
enum { LSE = 1, LSE_LOW = 2, TARGET_LOGIT = 4, LARGEST = 8, ENTROPY = 16 };
enum { ARGMAX = 32, RANK = 64, MEAN_LOGIT = 128, LOG_SUM_SQ_PROBS = 256 };

using Config = hr_linear_cross_entropy_config;

// The numbers that all ops take; `order` is the config's mode, a name that torch keeps to itself
// while it traces ops that write their arguments.
#define NUMBERS(of) \
    LIKE_CONFIG(of) \
    of(int, order)
#define LIKE_CONFIG(of)                                                                   \
    of(int, ignore_index) of(float, label_smoothing) of(float, softcap) of(float, z_loss) \
        of(float, logit_scale) of(int, workspace_limit) of(bool, check_target)

// What describes a weight of few bits, beside its codes and scales; format is 0 where there is none.
#define FORMAT(of) of(int, format) of(int, block_size) of(bool, nested)

// Those of an op with a layer. `classes` is read with a weight of few bits only.
#define LAYER_NUMBERS(of) NUMBERS(of) of(int, classes) FORMAT(of)

// The weight of a layer: a tensor, or codes and scales.
struct Weight {
    const OptionalTensor &dense, &codes, &scales;
    int64_t classes, format, block_size;
    bool nested;
};
#define WEIGHT                                                     \
    {                                                              \
        weight, codes, scales, classes, format, block_size, nested \
    }

Config config_of(int64_t reduction, int64_t precision NUMBERS(HR_PARAMETER))
{
    Config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    LIKE_CONFIG(HR_SET)
    set(config.mode, order, "order");
    config.reduction = reduction_of(reduction);
    set_precision(config, precision);
    return config;
}

hr_dtype grad_dtype_of(hr_dtype dtype)
{
    return dtype == HR_F16 ? HR_F32 : dtype;
}

// The tensors that all ops take.
class Layer : public LossRows
{
  public:
    Layer(const Tensor &hidden, const Weight &weight, const OptionalTensor &bias,
          const Tensor &target, const OptionalTensor &class_weight,
          const OptionalTensor &token_weight, const Config &numbers, bool shift)
        : LossRows(hidden, "hidden"), config(numbers)
    {
        config.dtype = float_of(in, "hidden");
        config.grad_dtype = grad_dtype_of(config.dtype);
        require_storage(hidden, "hidden");
        inputs.hidden = *matrices_.emplace_back(hidden, "hidden").get();
        if (weight.format == HR_DENSE)
            set_weight(weight);
        else
            set_few_bits(weight);
        if (bias) {
            const View view(*bias);
            if (view.dim != 1 || view.sizes[0] != classes)
                fail("bias must be a tensor [" + std::to_string(classes) + "]");
            require_same(view, "bias");
            inputs.bias = dense(*bias, "bias");
        }
        inputs.target = targets(target, &config.target_bytes);
        if (shift && in.dim < 2)
            fail("hidden has no dimension of a sequence to shift along, wanted [..., sequence, "
                 "features]");
        config.sequence = shift ? in.sizes[in.dim - 2] : 0;
        if (class_weight)
            inputs.class_weight = vector(*class_weight, "class_weight", classes);
        if (token_weight)
            inputs.token_weight = vector(*token_weight, "token_weight", matrix.rows);
    }

    Tensor numbers(int64_t count, bool scalar = false) const
    {
        return new_tensor(in.tensor, {&count, scalar ? size_t{0} : size_t{1}}, ScalarType::Float);
    }

    // A new tensor for a gradient, or one without elements.
    Tensor gradient(const int64_t *sizes, size_t dim, bool wanted) const
    {
        const ScalarType type = scalar_type_of(config.grad_dtype);
        return wanted ? new_tensor(in.tensor, {sizes, dim}, type) : nothing(in.tensor, type);
    }

    // Workspace for the gradients that are wanted.
    std::pair<Tensor, size_t> workspace(uint32_t wanted) const
    {
        hr_linear_cross_entropy_needs needs;
        check(hr_linear_cross_entropy_query(&needs, matrix.rows, matrix.cols, classes, wanted,
                                            &config, &exec.exec));
        return {workspace_of(needs.workspace, in.tensor), needs.workspace};
    }

    int64_t classes;
    Config config;
    hr_linear_cross_entropy_inputs inputs = {};

  private:
    void set_weight(const Weight &weight)
    {
        if (!weight.dense || weight.codes || weight.scales)
            fail("wanted weight, and neither codes nor scales, for format 0");
        const View view(*weight.dense);
        if (view.dim != 2 || view.sizes[1] != matrix.cols)
            fail("weight must be a matrix [classes, " + std::to_string(matrix.cols) + "]");
        require_same(view, "weight");
        classes = view.sizes[0];
        require_storage(*weight.dense, "weight");
        inputs.weight = *matrices_.emplace_back(*weight.dense, "weight").get();
    }

    void set_few_bits(const Weight &weight)
    {
        if (weight.dense || !weight.codes || !weight.scales)
            fail("wanted codes and scales, and no weight, for format " +
                 std::to_string(weight.format));
        classes = weight.classes;
        few_bits_.emplace(classes, matrix.cols, weight.format, weight.block_size, weight.nested);
        few_bits_->matrix.dtype = config.dtype;
        Tensor &codes = codes_.emplace_back(*weight.codes);
        require_with(View(codes), "codes", in, "hidden");
        few_bits_->point_to(codes, codes_.emplace_back(*weight.scales));
        config.matrix = &few_bits_->matrix;
    }

    void require_same(const View &view, const char *name) const
    {
        require_with(view, name, in, "hidden");
        require_dtype_of(view, name, in, "hidden");
    }

    std::deque<RowsIn> matrices_;
    std::deque<Tensor> codes_;
    std::optional<FewBits> few_bits_;
};

// New gradients and where they are.
struct Gradients {
    Gradients(const Layer &layer, int64_t wanted)
    {
        const int64_t shape[] = {layer.classes, layer.matrix.cols};
        hidden = layer.gradient(layer.in.sizes, static_cast<size_t>(layer.in.dim),
                                wanted & HR_LINEAR_CROSS_ENTROPY_HIDDEN);
        weight = layer.gradient(shape, 2, wanted & HR_LINEAR_CROSS_ENTROPY_WEIGHT);
        bias = layer.gradient(shape, 1, wanted & HR_LINEAR_CROSS_ENTROPY_BIAS);
        const int64_t features = layer.matrix.cols;
        grads.hidden = {data_of<void>(hidden, View(hidden).numel() > 0), features};
        grads.weight = {data_of<void>(weight, View(weight).numel() > 0), features};
        grads.bias = data_of<void>(bias, View(bias).numel() > 0);
    }

    uint32_t wanted() const
    {
        uint32_t sum = 0;
        if (grads.hidden.data)
            sum |= HR_LINEAR_CROSS_ENTROPY_HIDDEN;
        if (grads.weight.data)
            sum |= HR_LINEAR_CROSS_ENTROPY_WEIGHT;
        if (grads.bias)
            sum |= HR_LINEAR_CROSS_ENTROPY_BIAS;
        return sum;
    }

    Tensor hidden, weight, bias;
    hr_linear_cross_entropy_grads grads;
};

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                           Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward linear_cross_entropy(const Tensor &hidden, const OptionalTensor &weight,
                             const OptionalTensor &bias, const OptionalTensor &codes,
                             const OptionalTensor &scales, const Tensor &target,
                             const OptionalTensor &class_weight, const OptionalTensor &token_weight,
                             const OptionalTensor &denominator,
                             int64_t reduction LAYER_NUMBERS(HR_PARAMETER), int64_t precision,
                             bool shift, int64_t results, int64_t wanted)
{
    Layer layer(hidden, WEIGHT, bias, target, class_weight, token_weight,
                config_of(reduction, precision NUMBERS(HR_ARGUMENT)), shift);
    layer.inputs.denominator = scalar_of(denominator, layer.in, "denominator");
    const bool reduces = reduction != NONE;
    const Tensor loss = reduces ? layer.numbers(1, true) : layer.of_rows(true);
    const Tensor factors = layer.numbers(2), scale = layer.numbers(1, true);
    const auto of = [&](int64_t bit, ScalarType type = ScalarType::Float) {
        return layer.of_rows((results & bit) != 0, type);
    };
    const Tensor lse = of(LSE), low = of(LSE_LOW), target_logit = of(TARGET_LOGIT);
    const Tensor largest = of(LARGEST), entropy = of(ENTROPY);
    const Tensor argmax = of(ARGMAX, ScalarType::Long), rank = of(RANK, ScalarType::Long);
    const Tensor mean_logit = of(MEAN_LOGIT), log_sum_sq_probs = of(LOG_SUM_SQ_PROBS);
    hr_linear_cross_entropy_rows rows = {};
    rows.loss = data_of<float>(loss, !reduces);
    rows.lse = data_of<float>(lse, results & LSE);
    rows.lse_low = data_of<float>(low, results & LSE_LOW);
    rows.target_logit = data_of<float>(target_logit, results & TARGET_LOGIT);
    rows.largest = data_of<float>(largest, results & LARGEST);
    rows.entropy = data_of<float>(entropy, results & ENTROPY);
    rows.argmax = data_of<int64_t>(argmax, results & ARGMAX);
    rows.rank = data_of<int64_t>(rank, results & RANK);
    rows.mean_logit = data_of<float>(mean_logit, results & MEAN_LOGIT);
    rows.log_sum_sq_probs = data_of<float>(log_sum_sq_probs, results & LOG_SUM_SQ_PROBS);
    const Gradients gradients(layer, wanted);
    const auto [workspace, bytes] = layer.workspace(gradients.wanted());
    check(hr_linear_cross_entropy(
        data_of<float>(loss, reduces), data_of<float>(factors), data_of<float>(scale), &rows,
        &gradients.grads, &layer.inputs, layer.matrix.rows, layer.matrix.cols, layer.classes,
        &layer.config, data_of<void>(workspace), bytes, &layer.exec.exec));
    return {loss,
            factors,
            scale,
            lse,
            low,
            target_logit,
            largest,
            entropy,
            argmax,
            rank,
            mean_logit,
            log_sum_sq_probs,
            gradients.hidden,
            gradients.weight,
            gradients.bias};
}

// The entropies of rows and the gradients of these, where there are any.
struct Entropies {
    const OptionalTensor &values, &gradients;
};

void backward(Layer &layer, const hr_linear_cross_entropy_grads &grads, uint32_t wanted,
              const Tensor &dloss, const OptionalTensor &factors, const Tensor &lse,
              const Tensor &lse_low, const Entropies &entropies)
{
    int64_t stride = 0;
    const float *const gradients = layer.gradients(dloss, &stride);
    const int64_t rows = layer.matrix.rows;
    if (entropies.values)
        layer.config.entropy = layer.vector(*entropies.values, "entropy", rows);
    if (entropies.gradients) {
        if (!entropies.values)
            fail("dentropy is given, wanted entropy too");
        layer.config.dentropy =
            layer.gradients(*entropies.gradients, &layer.config.dentropy_stride, "dentropy");
    }
    const auto [workspace, bytes] = layer.workspace(wanted);
    check(hr_linear_cross_entropy_backward(
        &grads, gradients, stride, factors ? layer.vector(*factors, "factors", 2) : nullptr,
        layer.vector(lse, "lse", rows), layer.vector(lse_low, "lse_low", rows), &layer.inputs, rows,
        layer.matrix.cols, layer.classes, &layer.config, data_of<void>(workspace), bytes,
        &layer.exec.exec));
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor &dloss, const Tensor &hidden, const OptionalTensor &weight,
    const OptionalTensor &bias, const OptionalTensor &codes, const OptionalTensor &scales,
    const Tensor &target, const OptionalTensor &class_weight, const OptionalTensor &token_weight,
    const OptionalTensor &factors, const Tensor &lse, const Tensor &lse_low,
    const OptionalTensor &entropy, const OptionalTensor &dentropy LAYER_NUMBERS(HR_PARAMETER),
    int64_t precision, bool shift, int64_t wanted)
{
    Layer layer(hidden, WEIGHT, bias, target, class_weight, token_weight,
                config_of(SUM, precision NUMBERS(HR_ARGUMENT)), shift);
    const Gradients gradients(layer, wanted);
    backward(layer, gradients.grads, gradients.wanted(), dloss, factors, lse, lse_low,
             {entropy, dentropy});
    return {gradients.hidden, gradients.weight, gradients.bias};
}

// A gradient that exists, and that is added to.
void *existing(const OptionalTensor &tensor, const Layer &layer, const char *name, int64_t dim)
{
    if (!tensor)
        return nullptr;
    const View view(*tensor);
    if (!view.is_with(layer.in) || dtype_of(view.torch_dtype) != layer.config.grad_dtype ||
        view.dim != dim || view.sizes[0] != layer.classes ||
        (dim == 2 && view.sizes[1] != layer.matrix.cols) || !view.is_contiguous())
        fail(std::string(name) +
             " must be contiguous and have the shape and device of what it is the gradient of, and "
             "its dtype, but float32 for float16");
    require_storage(*tensor, name);
    return view.data;
}

Tensor linear_cross_entropy_backward_(const Tensor &dloss, const Tensor &hidden,
                                      const OptionalTensor &weight, const OptionalTensor &bias,
                                      const OptionalTensor &codes, const OptionalTensor &scales,
                                      const Tensor &target, const OptionalTensor &class_weight,
                                      const OptionalTensor &token_weight,
                                      const OptionalTensor &factors, const Tensor &lse,
                                      const Tensor &lse_low, const OptionalTensor &entropy,
                                      const OptionalTensor &dentropy, OptionalTensor weight_grad,
                                      OptionalTensor bias_grad LAYER_NUMBERS(HR_PARAMETER),
                                      int64_t precision, bool shift, bool want_hidden)
{
    Layer layer(hidden, WEIGHT, bias, target, class_weight, token_weight,
                config_of(SUM, precision NUMBERS(HR_ARGUMENT)), shift);
    layer.config.add_to_weight_grads = 1;
    Gradients gradients(layer, want_hidden ? HR_LINEAR_CROSS_ENTROPY_HIDDEN : 0);
    gradients.grads.weight.data = existing(weight_grad, layer, "weight_grad", 2);
    gradients.grads.bias = existing(bias_grad, layer, "bias_grad", 1);
    backward(layer, gradients.grads, gradients.wanted(), dloss, factors, lse, lse_low,
             {entropy, dentropy});
    return gradients.hidden;
}

// Bytes that the ops above allocate besides their results, for plans: on a GPU of a compute capability,
// times 10, that need not be there, or on the CPU with 0. dtype is an hr_dtype.
int64_t linear_cross_entropy_workspace(int64_t rows, int64_t features, int64_t classes,
                                       int64_t dtype, int64_t wanted, bool adds,
                                       int64_t capability NUMBERS(HR_PARAMETER)
                                           FORMAT(HR_PARAMETER),
                                       int64_t precision)
{
    Config config = config_of(SUM, precision NUMBERS(HR_ARGUMENT));
    set(config.dtype, dtype, "dtype");
    set(config.capability, capability, "capability");
    std::optional<FewBits> bits;
    if (format != HR_DENSE) {
        bits.emplace(classes, features, format, block_size, nested);
        bits->matrix.dtype = config.dtype;
        bits->point_to_unread();
        config.matrix = &bits->matrix;
    }
    config.grad_dtype = grad_dtype_of(config.dtype);
    config.add_to_weight_grads = adds;
    const hr_exec exec = {capability > 0 ? 0 : HR_CPU, nullptr};
    hr_linear_cross_entropy_needs needs;
    check(hr_linear_cross_entropy_query(&needs, rows, features, classes,
                                        static_cast<uint32_t>(wanted), &config, &exec));
    return static_cast<int64_t>(needs.workspace);
}

} // namespace

#define LAYER                                                                      \
    "Tensor hidden, Tensor? weight, Tensor? bias, Tensor? codes, Tensor? scales, " \
    "Tensor target, Tensor? class_weight, Tensor? token_weight, "

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("linear_cross_entropy(" LAYER "Tensor? denominator, int reduction" LAYER_NUMBERS(
        HR_SCHEMA) ", int precision, bool shift, int results, int wanted) -> (Tensor loss, Tensor "
                   "factors, "
                   "Tensor scale, Tensor lse, Tensor lse_low, Tensor target_logit, "
                   "Tensor largest, Tensor entropy, Tensor argmax, Tensor rank, Tensor "
                   "mean_logit, Tensor log_sum_sq_probs, Tensor dhidden, Tensor dweight, Tensor "
                   "dbias)");
    m.def("linear_cross_entropy_backward(Tensor dloss, " LAYER
          "Tensor? factors, Tensor lse, Tensor lse_low, Tensor? entropy, Tensor? "
          "dentropy" LAYER_NUMBERS(
              HR_SCHEMA) ", int precision, bool shift, int wanted) -> (Tensor dhidden, Tensor "
                         "dweight, "
                         "Tensor dbias)");
    m.def("linear_cross_entropy_backward_(Tensor dloss, " LAYER
          "Tensor? factors, Tensor lse, Tensor lse_low, Tensor? entropy, Tensor? dentropy, "
          "Tensor(a!)? weight_grad, "
          "Tensor(b!)? bias_grad" LAYER_NUMBERS(
              HR_SCHEMA) ", int precision, bool shift, bool want_hidden) -> Tensor dhidden");
    m.def("linear_cross_entropy_workspace(int rows, int features, int classes, int dtype, "
          "int wanted, bool adds, int capability" NUMBERS(HR_SCHEMA)
              FORMAT(HR_SCHEMA) ", int precision) -> int");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("linear_cross_entropy_workspace", TORCH_BOX(&linear_cross_entropy_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
    m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
    m.impl("linear_cross_entropy_backward_", TORCH_BOX(&linear_cross_entropy_backward_));
}
