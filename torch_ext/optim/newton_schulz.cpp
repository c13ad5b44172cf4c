// newton_schulz.cpp: registers headroom::newton_schulz_.
#include "torch_ext/core/numbers.h"

namespace
{

using namespace headroom;

void newton_schulz_(const Tensor &x, const Tensor &squares, const Tensor &workspace,
                    const std::vector<double> &coefficients, double eps, bool gram,
                    int64_t precision)
{
    const View matrices(x), norms(squares), space(workspace);
    if (matrices.dim != 3 || !matrices.is_contiguous())
        fail("x must be a contiguous tensor [batch, m, n]");
    const int dtype = dtype_of(matrices.torch_dtype);
    if (dtype != HR_F32 && dtype != HR_BF16 && dtype != HR_F16)
        fail("x must be float32, bfloat16 or float16");
    require_with(norms, "squares", matrices, "x");
    require_with(space, "workspace", matrices, "x");
    if (dtype_of(norms.torch_dtype) != HR_F32 || norms.numel() != matrices.sizes[0] ||
        !norms.is_contiguous())
        fail("squares must be a contiguous float32 tensor of " + std::to_string(matrices.sizes[0]) +
             " elements");
    if (dtype_of(space.torch_dtype) != HR_U8 || !space.is_contiguous())
        fail("workspace must be a contiguous uint8 tensor");
    if (coefficients.empty() || coefficients.size() % 3 != 0)
        fail("coefficients has " + std::to_string(coefficients.size()) +
             " numbers, wanted three for each step");
    require_memory(matrices, "x");
    require_memory(norms, "squares");
    require_memory(space, "workspace");
    hr_newton_schulz_config config = HR_NEWTON_SCHULZ_CONFIG_INIT;
    config.dtype = static_cast<hr_dtype>(dtype);
    config.variant = gram ? HR_NEWTON_SCHULZ_GRAM : HR_NEWTON_SCHULZ_STANDARD;
    config.coefficients = coefficients.data();
    config.steps = static_cast<int64_t>(coefficients.size() / 3);
    config.eps = eps;
    set_precision(config, precision);
    const Exec exec(matrices);
    check(hr_newton_schulz(matrices.data, static_cast<const float *>(norms.data), matrices.sizes[0],
                           matrices.sizes[1], matrices.sizes[2], &config, space.data,
                           static_cast<size_t>(space.numel()), &exec.exec));
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("newton_schulz_(Tensor(a!) x, Tensor squares, Tensor(b!) workspace, *, "
          "float[] coefficients, float eps, bool gram, int precision) -> ()");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("newton_schulz_", TORCH_BOX(&newton_schulz_));
}
