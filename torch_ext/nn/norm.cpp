// norm.cpp: headroom::rms_norm, headroom::layer_norm and their backward ops.
//
// What a call does not ask for is returned as a tensor without elements, because a schema has no
// optional results.
#include <tuple>

#include "torch_ext/core/numbers.h"
#include "torch_ext/core/rows.h"

namespace
{

using namespace headroom;

// x, and the weights that multiply its rows.
class Norm
{
  public:
    Norm(hr_norm_kind kind, const Tensor &x, const OptionalTensor &weight,
         const OptionalTensor &bias)
        : x(x), matrix(matrix_of(this->x, "x")), exec(this->x)
    {
        config.kind = kind;
        config.dtype = float_of(this->x, "x");
        config.weight_dtype = config.dtype;
        this->weight = vector(weight, "weight", nullptr);
        this->bias = vector(bias, "bias", weight ? &*weight : nullptr);
    }

    const float *of_rows(const Tensor &tensor, const char *name) const
    {
        const View view(tensor);
        if (!view.is_with(x) || dtype_of(view.torch_dtype) != HR_F32 ||
            view.numel() != matrix.rows || !view.is_contiguous())
            fail(std::string(name) + " must be a contiguous float32 tensor of " +
                 std::to_string(matrix.rows) + " elements on " + x.device_name());
        require_memory(view, name);
        return static_cast<const float *>(view.data);
    }

    const View x;
    const Matrix matrix;
    const Exec exec;
    hr_norm_config config = HR_NORM_CONFIG_INIT;
    const void *weight, *bias;

  private:
    const void *vector(const OptionalTensor &tensor, const char *name, const Tensor *other)
    {
        if (!tensor)
            return nullptr;
        const View view(*tensor);
        if (view.dim != 1 || view.sizes[0] != matrix.cols || !view.is_with(x))
            fail(std::string(name) + " must be a tensor [" + std::to_string(matrix.cols) + "] on " +
                 x.device_name());
        const hr_dtype dtype = float_of(view, name);
        if (other && dtype != config.weight_dtype)
            fail(std::string(name) + " has another dtype than weight");
        config.weight_dtype = dtype;
        return View(kept_.emplace_back(dense_of(*tensor, name))).data;
    }

    Tensors kept_;
};

using Forward = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Forward forward(Norm &norm, const OptionalTensor &residual)
{
    const View &x = norm.x;
    const RowsIn in(x.tensor, "x");
    std::optional<RowsIn> added;
    if (residual)
        added.emplace(require_like(x, "x", *residual, "residual"), "residual");
    const bool layer = norm.config.kind == HR_NORM_LAYER;
    Tensor y = empty_rows(x, x.tensor), sum = empty_like_if(residual.has_value(), x);
    Tensor mean = empty_of_rows(x, layer), rstd = empty_of_rows(x, true);
    const hr_rows y_rows = rows_of(y), sum_rows = rows_of(sum);
    check(hr_norm_forward(&y_rows, added ? &sum_rows : nullptr,
                          layer ? static_cast<float *>(mean.mutable_data_ptr()) : nullptr,
                          static_cast<float *>(rstd.mutable_data_ptr()), in.get(),
                          added ? added->get() : nullptr, norm.weight, norm.bias, norm.matrix.rows,
                          norm.matrix.cols, &norm.config, &norm.exec.exec));
    return {y, sum, mean, rstd};
}

struct Wanted {
    bool dx, dweight, dbias, y;
};

// dx, dweight, dbias, y.
Forward backward(Norm &norm, const Tensor &dy, const OptionalTensor &dsum, const Tensor *mean,
                 const Tensor &rstd, const Wanted &wanted)
{
    const View &x = norm.x;
    const RowsIn in(x.tensor, "x"), dy_in(require_like(x, "x", dy, "dy"), "dy");
    std::optional<RowsIn> dsum_in;
    if (dsum)
        dsum_in.emplace(require_like(x, "x", *dsum, "dsum"), "dsum");
    Tensor dx = empty_like_if(wanted.dx, x), y = empty_like_if(wanted.y, x);
    const auto vector = [&](bool is_wanted) {
        if (!is_wanted)
            return nothing(x.tensor);
        return new_tensor(x.tensor, {&norm.matrix.cols, 1},
                          scalar_type_of(norm.config.weight_dtype));
    };
    Tensor dweight = vector(wanted.dweight), dbias = vector(wanted.dbias);
    Tensor workspace;
    size_t bytes = 0;
    if (wanted.dweight || wanted.dbias) {
        check(hr_norm_workspace(&bytes, norm.matrix.rows, norm.matrix.cols, &norm.config));
        workspace = workspace_of(bytes, x.tensor);
    }
    const hr_rows dx_rows = rows_of(dx), y_rows = rows_of(y);
    const float *const means = mean ? norm.of_rows(*mean, "mean") : nullptr;
    const float *const rstds = norm.of_rows(rstd, "rstd"); // wrong ones are refused in any case
    if (wanted.dx || wanted.dweight || wanted.dbias || wanted.y)
        check(hr_norm_backward(
            wanted.dx ? &dx_rows : nullptr, wanted.dweight ? dweight.mutable_data_ptr() : nullptr,
            wanted.dbias ? dbias.mutable_data_ptr() : nullptr, wanted.y ? &y_rows : nullptr,
            dy_in.get(), dsum_in ? dsum_in->get() : nullptr, in.get(), norm.weight, norm.bias,
            means, rstds, norm.matrix.rows, norm.matrix.cols, &norm.config,
            bytes ? workspace.mutable_data_ptr() : nullptr, bytes, &norm.exec.exec));
    return {dx, dweight, dbias, y};
}

void set_casting(Norm &norm, double offset, int64_t casting)
{
    norm.config.offset = offset;
    set(norm.config.casting, casting, "casting");
}

std::tuple<Tensor, Tensor, Tensor> rms_norm(const Tensor &x, const OptionalTensor &weight,
                                            const OptionalTensor &residual, double eps,
                                            double offset, int64_t casting)
{
    Norm norm(HR_NORM_RMS, x, weight, std::nullopt);
    norm.config.eps = eps;
    set_casting(norm, offset, casting);
    const auto [y, sum, mean, rstd] = forward(norm, residual);
    return {y, sum, rstd};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_backward(const Tensor &dy, const OptionalTensor &dsum,
                                                     const Tensor &x, const OptionalTensor &weight,
                                                     const Tensor &rstd, double offset,
                                                     int64_t casting, bool want_dx,
                                                     bool want_dweight, bool want_y)
{
    Norm norm(HR_NORM_RMS, x, weight, std::nullopt);
    set_casting(norm, offset, casting);
    const auto [dx, dweight, dbias, y] =
        backward(norm, dy, dsum, nullptr, rstd, {want_dx, want_dweight, false, want_y});
    return {dx, dweight, y};
}

Forward layer_norm(const Tensor &x, const OptionalTensor &weight, const OptionalTensor &bias,
                   const OptionalTensor &residual, double eps)
{
    Norm norm(HR_NORM_LAYER, x, weight, bias);
    norm.config.eps = eps;
    return forward(norm, residual);
}

Forward layer_norm_backward(const Tensor &dy, const OptionalTensor &dsum, const Tensor &x,
                            const OptionalTensor &weight, const OptionalTensor &bias,
                            const Tensor &mean, const Tensor &rstd, bool want_dx, bool want_dweight,
                            bool want_dbias, bool want_y)
{
    Norm norm(HR_NORM_LAYER, x, weight, bias);
    return backward(norm, dy, dsum, &mean, rstd, {want_dx, want_dweight, want_dbias, want_y});
}

// Bytes that the backward ops above allocate besides their results where a gradient of the weight or
// the bias is wanted, for plans.
int64_t norm_workspace(int64_t rows, int64_t cols, bool layer)
{
    hr_norm_config config = HR_NORM_CONFIG_INIT;
    config.kind = layer ? HR_NORM_LAYER : HR_NORM_RMS;
    size_t bytes;
    check(hr_norm_workspace(&bytes, rows, cols, &config));
    return 8 * doubles_of(bytes);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("rms_norm(Tensor x, Tensor? weight, Tensor? residual, float eps, float offset, "
          "int casting) -> (Tensor y, Tensor sum, Tensor rstd)");
    m.def("rms_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor rstd, "
          "float offset, int casting, bool want_dx, bool want_dweight, bool want_y) -> "
          "(Tensor dx, Tensor dweight, Tensor y)");
    m.def("layer_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, float eps) -> "
          "(Tensor y, Tensor sum, Tensor mean, Tensor rstd)");
    m.def("layer_norm_backward(Tensor dy, Tensor? dsum, Tensor x, Tensor? weight, Tensor? bias, "
          "Tensor mean, Tensor rstd, bool want_dx, bool want_dweight, bool want_dbias, "
          "bool want_y) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor y)");
    m.def("norm_workspace(int rows, int cols, bool layer) -> int");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("norm_workspace", TORCH_BOX(&norm_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("rms_norm", TORCH_BOX(&rms_norm));
    m.impl("rms_norm_backward", TORCH_BOX(&rms_norm_backward));
    m.impl("layer_norm", TORCH_BOX(&layer_norm));
    m.impl("layer_norm_backward", TORCH_BOX(&layer_norm_backward));
}
