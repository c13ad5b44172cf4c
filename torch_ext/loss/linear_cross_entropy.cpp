// linear_cross_entropy.cpp: headroom::linear_cross_entropy, which returns the gradients with the
// loss, and the ops that compute them from a loss of rows.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/loss/loss_rows.h"

namespace
{

using namespace headroom;

// Bits of `results`, and of `options`.
enum { LSE = 1, LSE_LOW = 2, TARGET_LOGIT = 4, WEIGHTED = 8, LARGEST = 16, ENTROPY = 32 };
enum { ARGMAX = 64, RANK = 128 };
enum { ALLOW_TF32 = 1, REDUCED_PRECISION = 2, DETERMINISTIC = 4, ROUND_EACH_CHUNK = 8, SHIFT = 16 };
enum { CHECK_TARGET = 32 };

// The numbers that all ops take, in the order of their schemas.
struct Numbers {
    int64_t ignore_index, reduction;
    double label_smoothing, softcap, z_loss, logit_scale;
    int64_t mode, workspace, most_counted, first_class, all_classes, options;
};

// The tensors that all ops take.
class Layer : public LossRows
{
  public:
    Layer(const Tensor &hidden, const Tensor &weight, const OptionalTensor &bias,
          const Tensor &target, const OptionalTensor &class_weight,
          const OptionalTensor &token_weight, const Numbers &n)
        : LossRows(hidden, "hidden")
    {
        config.dtype = float_of(in, "hidden");
        config.grad_dtype = config.dtype == HR_F16 ? HR_F32 : config.dtype;
        config.reduction = reduction_of(n.reduction);
        config.mode = static_cast<hr_linear_cross_entropy_mode>(
            n.mode >= 0 && n.mode <= 2 ? static_cast<int>(n.mode) : -1);
        config.round_each_chunk = (n.options & ROUND_EACH_CHUNK) != 0;
        config.allow_tf32 = (n.options & ALLOW_TF32) != 0;
        config.allow_reduced_precision_reduction = (n.options & REDUCED_PRECISION) != 0;
        config.deterministic = (n.options & DETERMINISTIC) != 0;
        config.check_target = (n.options & CHECK_TARGET) != 0;
        config.ignore_index = n.ignore_index;
        config.label_smoothing = n.label_smoothing;
        config.softcap = n.softcap;
        config.z_loss = n.z_loss;
        config.logit_scale = n.logit_scale;
        config.first_class = n.first_class;
        config.all_classes = n.all_classes;
        config.most_counted = n.most_counted;
        if (n.workspace < 0)
            fail("workspace is " + std::to_string(n.workspace) + ", wanted 0 or more bytes");
        config.workspace_limit = static_cast<size_t>(n.workspace);
        const View matrix_view(weight);
        if (matrix_view.dim != 2 || matrix_view.sizes[1] != matrix.cols)
            fail("weight must be a matrix [classes, " + std::to_string(matrix.cols) + "]");
        require_same(matrix_view, "weight");
        classes = matrix_view.sizes[0];
        require_storage(hidden, "hidden");
        require_storage(weight, "weight");
        inputs.hidden = *matrices_.emplace_back(hidden, "hidden").get();
        inputs.weight = *matrices_.emplace_back(weight, "weight").get();
        if (bias) {
            const View view(*bias);
            if (view.dim != 1 || view.sizes[0] != classes)
                fail("bias must be a tensor [" + std::to_string(classes) + "]");
            require_same(view, "bias");
            inputs.bias = dense(*bias, "bias");
        }
        inputs.target = targets(target, &config.target_bytes);
        if ((n.options & SHIFT) != 0 && in.dim < 2)
            fail("hidden has no dimension of a sequence to shift along, wanted [..., sequence, "
                 "features]");
        config.sequence = (n.options & SHIFT) != 0 ? in.sizes[in.dim - 2] : 0;
        if (class_weight)
            inputs.class_weight =
                vector(*class_weight, "class_weight", n.all_classes > 0 ? n.all_classes : classes);
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
    hr_linear_cross_entropy_config config = HR_LINEAR_CROSS_ENTROPY_CONFIG_INIT;
    hr_linear_cross_entropy_inputs inputs = {};

  private:
    void require_same(const View &view, const char *name) const
    {
        require_with(view, name, in, "hidden");
        require_dtype_of(view, name, in, "hidden");
    }

    std::deque<RowsIn> matrices_;
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
                           Tensor, Tensor, Tensor, Tensor, Tensor>;

Forward linear_cross_entropy(const Tensor &hidden, const Tensor &weight, const OptionalTensor &bias,
                             const Tensor &target, const OptionalTensor &class_weight,
                             const OptionalTensor &token_weight, const OptionalTensor &denominator,
                             int64_t ignore_index, int64_t reduction, double label_smoothing,
                             double softcap, double z_loss, double logit_scale, int64_t mode,
                             int64_t workspace_limit, int64_t most_counted, int64_t first_class,
                             int64_t all_classes, int64_t options, int64_t results, int64_t wanted)
{
    Layer layer(hidden, weight, bias, target, class_weight, token_weight,
                {ignore_index, reduction, label_smoothing, softcap, z_loss, logit_scale, mode,
                 workspace_limit, most_counted, first_class, all_classes, options});
    layer.inputs.denominator = scalar_of(denominator, layer.in, "denominator");
    const bool reduces = reduction != NONE;
    const bool is_part = all_classes != 0 && all_classes != layer.classes;
    const Tensor loss = reduces ? layer.numbers(1, true) : layer.of_rows(!is_part);
    const Tensor factors = layer.numbers(2), scale = layer.numbers(1, true);
    const auto of = [&](int64_t bit, ScalarType type = ScalarType::Float) {
        return layer.of_rows((results & bit) != 0, type);
    };
    const Tensor lse = of(LSE), low = of(LSE_LOW), target_logit = of(TARGET_LOGIT);
    const Tensor weighted = of(WEIGHTED), largest = of(LARGEST), entropy = of(ENTROPY);
    const Tensor argmax = of(ARGMAX, ScalarType::Long), rank = of(RANK, ScalarType::Long);
    hr_linear_cross_entropy_rows rows = {};
    rows.loss = data_of<float>(loss, !reduces && !is_part);
    rows.lse = data_of<float>(lse, results & LSE);
    rows.lse_low = data_of<float>(low, results & LSE_LOW);
    rows.target_logit = data_of<float>(target_logit, results & TARGET_LOGIT);
    rows.weighted = data_of<float>(weighted, results & WEIGHTED);
    rows.largest = data_of<float>(largest, results & LARGEST);
    rows.entropy = data_of<float>(entropy, results & ENTROPY);
    rows.argmax = data_of<int64_t>(argmax, results & ARGMAX);
    rows.rank = data_of<int64_t>(rank, results & RANK);
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
            weighted,
            largest,
            entropy,
            argmax,
            rank,
            gradients.hidden,
            gradients.weight,
            gradients.bias};
}

void backward(Layer &layer, const hr_linear_cross_entropy_grads &grads, uint32_t wanted,
              const Tensor &dloss, const OptionalTensor &factors, const Tensor &lse,
              const Tensor &lse_low)
{
    int64_t stride = 0;
    const float *const gradients = layer.gradients(dloss, &stride);
    const int64_t rows = layer.matrix.rows;
    const auto [workspace, bytes] = layer.workspace(wanted);
    check(hr_linear_cross_entropy_backward(
        &grads, gradients, stride, factors ? layer.vector(*factors, "factors", 2) : nullptr,
        layer.vector(lse, "lse", rows), layer.vector(lse_low, "lse_low", rows), &layer.inputs, rows,
        layer.matrix.cols, layer.classes, &layer.config, data_of<void>(workspace), bytes,
        &layer.exec.exec));
}

std::tuple<Tensor, Tensor, Tensor> linear_cross_entropy_backward(
    const Tensor &dloss, const Tensor &hidden, const Tensor &weight, const OptionalTensor &bias,
    const Tensor &target, const OptionalTensor &class_weight, const OptionalTensor &token_weight,
    const OptionalTensor &factors, const Tensor &lse, const Tensor &lse_low, int64_t ignore_index,
    double label_smoothing, double softcap, double z_loss, double logit_scale, int64_t mode,
    int64_t workspace_limit, int64_t most_counted, int64_t first_class, int64_t all_classes,
    int64_t options, int64_t wanted)
{
    Layer layer(hidden, weight, bias, target, class_weight, token_weight,
                {ignore_index, SUM, label_smoothing, softcap, z_loss, logit_scale, mode,
                 workspace_limit, most_counted, first_class, all_classes, options});
    const Gradients gradients(layer, wanted);
    backward(layer, gradients.grads, gradients.wanted(), dloss, factors, lse, lse_low);
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

Tensor linear_cross_entropy_backward_(
    const Tensor &dloss, const Tensor &hidden, const Tensor &weight, const OptionalTensor &bias,
    const Tensor &target, const OptionalTensor &class_weight, const OptionalTensor &token_weight,
    const OptionalTensor &factors, const Tensor &lse, const Tensor &lse_low,
    OptionalTensor weight_grad, OptionalTensor bias_grad, int64_t ignore_index,
    double label_smoothing, double softcap, double z_loss, double logit_scale, int64_t mode,
    int64_t workspace_limit, int64_t most_counted, int64_t first_class, int64_t all_classes,
    int64_t options, bool want_hidden)
{
    Layer layer(hidden, weight, bias, target, class_weight, token_weight,
                {ignore_index, SUM, label_smoothing, softcap, z_loss, logit_scale, mode,
                 workspace_limit, most_counted, first_class, all_classes, options});
    layer.config.add_to_weight_grads = 1;
    Gradients gradients(layer, want_hidden ? HR_LINEAR_CROSS_ENTROPY_HIDDEN : 0);
    gradients.grads.weight.data = existing(weight_grad, layer, "weight_grad", 2);
    gradients.grads.bias = existing(bias_grad, layer, "bias_grad", 1);
    backward(layer, gradients.grads, gradients.wanted(), dloss, factors, lse, lse_low);
    return gradients.hidden;
}

} // namespace

#define LAYER                                                                           \
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight, " \
    "Tensor? token_weight, "
#define NUMBERS                                                                          \
    "float label_smoothing, float softcap, float z_loss, float logit_scale, int order, " \
    "int workspace, int most_counted, int first_class, int all_classes, int options, "

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("linear_cross_entropy(" LAYER
          "Tensor? denominator, int ignore_index, int reduction, " NUMBERS
          "int results, int wanted) -> (Tensor loss, Tensor factors, Tensor scale, Tensor lse, "
          "Tensor lse_low, Tensor target_logit, Tensor weighted, Tensor largest, Tensor entropy, "
          "Tensor argmax, Tensor rank, Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
    m.def("linear_cross_entropy_backward(Tensor dloss, " LAYER
          "Tensor? factors, Tensor lse, Tensor lse_low, int ignore_index, " NUMBERS
          "int wanted) -> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)");
    m.def("linear_cross_entropy_backward_(Tensor dloss, " LAYER
          "Tensor? factors, Tensor lse, Tensor lse_low, Tensor(a!)? weight_grad, "
          "Tensor(b!)? bias_grad, int ignore_index, " NUMBERS "bool want_hidden) -> Tensor");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("linear_cross_entropy", TORCH_BOX(&linear_cross_entropy));
    m.impl("linear_cross_entropy_backward", TORCH_BOX(&linear_cross_entropy_backward));
    m.impl("linear_cross_entropy_backward_", TORCH_BOX(&linear_cross_entropy_backward_));
}
