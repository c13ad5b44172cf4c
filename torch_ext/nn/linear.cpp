// linear.cpp: registers headroom::linear_quantized and the op of its gradient.
#include "torch_ext/core/matrix.h"
#include "torch_ext/core/numbers.h"

namespace
{

using namespace headroom;

// How a call describes its matrix, beside its codes and scales.
struct Format {
    int64_t format, block_size;
    bool nested;
};

// The product of `in`, called `name`, with a matrix of `other` rows, or in backward with the transpose
// of one of `other` columns.
Tensor product(bool backward, const char *name, const Tensor &in, Tensor codes, Tensor scales,
               OptionalTensor bias, int64_t other, const Format &format, int64_t precision)
{
    const View view(in);
    const hr_dtype dtype = float_of(view, name);
    const auto [m, own] = matrix_of(view, name);
    FewBits bits(backward ? own : other, backward ? other : own, format.format, format.block_size,
                 format.nested);
    bits.matrix.dtype = dtype;
    require_with(View(codes), "codes", view, name);
    bits.point_to(codes, scales);
    const void *vector = nullptr;
    if (bias) {
        bias = dense_of(*bias, "bias");
        const View of(*bias);
        require_with(of, "bias", view, name);
        require_dtype_of(of, "bias", view, name);
        if (of.dim != 1 || of.sizes[0] != other)
            fail("bias must be a tensor [" + std::to_string(other) + "]");
        vector = of.data;
    }
    std::vector<int64_t> sizes(view.sizes, view.sizes + view.dim);
    sizes.back() = other;
    Tensor out = new_tensor(in, {sizes.data(), sizes.size()});
    if (bits.is_empty()) { // a sum of no terms
        if (bias)
            torch::stable::copy_(out, *bias);
        else
            torch::stable::zero_(out);
        return out;
    }
    hr_linear_config config = HR_LINEAR_CONFIG_INIT;
    set_precision(config, precision);
    const RowsIn from(in, name);
    const hr_rows to{View(out).data, other};
    const Exec exec(view);
    hr_linear_needs needs;
    check(hr_linear_query(&needs, m, &bits.matrix, backward, &config, &exec.exec));
    const Tensor workspace = workspace_of(needs.best, in);
    void *const memory = View(workspace).data;
    check(backward ? hr_linear_backward(&to, from.get(), &bits.matrix, m, &config, memory,
                                        needs.best, &exec.exec)
                   : hr_linear_forward(&to, from.get(), &bits.matrix, vector, m, &config, memory,
                                       needs.best, &exec.exec));
    return out;
}

Tensor linear_quantized(const Tensor &x, const Tensor &codes, const Tensor &scales,
                        const OptionalTensor &bias, int64_t rows, int64_t format,
                        int64_t block_size, bool nested, int64_t precision)
{
    return product(false, "x", x, codes, scales, bias, rows, {format, block_size, nested},
                   precision);
}

Tensor linear_quantized_backward(const Tensor &dy, const Tensor &codes, const Tensor &scales,
                                 int64_t cols, int64_t format, int64_t block_size, bool nested,
                                 int64_t precision)
{
    return product(true, "dy", dy, codes, scales, std::nullopt, cols, {format, block_size, nested},
                   precision);
}

// Bytes that the ops above allocate besides their results, for plans. `tokens` are rows of x or dy,
// dtype is its hr_dtype. Without CUDA they are those of the CPU.
int64_t linear_quantized_workspace(int64_t tokens, int64_t rows, int64_t cols, int64_t dtype,
                                   int64_t format, int64_t block_size, bool nested, bool backward,
                                   bool is_cuda, int64_t precision)
{
    FewBits bits(rows, cols, format, block_size, nested);
    set(bits.matrix.dtype, dtype, "dtype");
    if (bits.is_empty())
        return 0;
    bits.point_to_unread();
    hr_linear_config config = HR_LINEAR_CONFIG_INIT;
    set_precision(config, precision);
    hr_linear_needs needs;
    const auto query = [&](int32_t device) {
        const hr_exec exec = {device, nullptr};
        return hr_linear_query(&needs, tokens, &bits.matrix, backward, &config, &exec);
    };
    if (!is_cuda || query(0) != HR_OK)
        check(query(HR_CPU));
    return static_cast<int64_t>(needs.best);
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("linear_quantized(Tensor x, Tensor codes, Tensor scales, Tensor? bias, int rows, "
          "int format, int block_size, bool nested, int precision) -> Tensor y");
    m.def("linear_quantized_backward(Tensor dy, Tensor codes, Tensor scales, int cols, int format, "
          "int block_size, bool nested, int precision) -> Tensor dx");
    m.def("linear_quantized_workspace(int tokens, int rows, int cols, int dtype, int format, "
          "int block_size, bool nested, bool backward, bool is_cuda, int precision) -> int");
}

// For all devices, because no tensor argument names one.
STABLE_TORCH_LIBRARY_IMPL(headroom, CompositeExplicitAutograd, m)
{
    m.impl("linear_quantized_workspace", TORCH_BOX(&linear_quantized_workspace));
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("linear_quantized", TORCH_BOX(&linear_quantized));
    m.impl("linear_quantized_backward", TORCH_BOX(&linear_quantized_backward));
}
