// quantize_matrix.cpp: registers headroom::quantize_matrix and headroom::dequantize_matrix.
#include <tuple>

#include "torch_ext/core/layout.h"
#include "torch_ext/core/matrix.h"

namespace
{

using namespace headroom;

std::tuple<Tensor, Tensor> quantize_matrix(const Tensor &matrix, int64_t format, int64_t block_size,
                                           bool nested, bool search)
{
    const NoGrad no_grad;
    const View view(matrix);
    if (view.dim != 2)
        fail("matrix has " + std::to_string(view.dim) + " dimensions, wanted [rows, cols]");
    const hr_dtype dtype = float_of(view, "matrix");
    FewBits bits(view.sizes[0], view.sizes[1], format, block_size, nested);
    const bool rows = format == HR_INT8_ROWS;
    const int64_t packed[] = {bits.codes, 1};
    Tensor codes = new_tensor(matrix, {rows ? view.sizes : packed, 2},
                              rows ? ScalarType::Char : ScalarType::Byte);
    Tensor scales = torch::stable::new_zeros(matrix, {&bits.bytes, 1}, ScalarType::Byte);
    if (bits.is_empty())
        return {codes, scales};
    const RowsIn x(matrix, "matrix");
    bits.point_to(codes, scales);
    const Tensor workspace = workspace_of(nested ? size_t(bits.blocks) * 4 : 0, matrix);
    if (nested)
        bits.matrix.absmax = static_cast<float *>(View(workspace).data);
    hr_quantize_matrix_config config = HR_QUANTIZE_MATRIX_CONFIG_INIT;
    config.search = search;
    const Exec exec(view);
    check(hr_quantize_matrix(&bits.matrix, x.get(), dtype, &config, &exec.exec));
    return {codes, scales};
}

Tensor dequantize_matrix(const Tensor &codes, const Tensor &scales, int64_t rows, int64_t cols,
                         int64_t format, int64_t block_size, bool nested, ScalarType dtype)
{
    const NoGrad no_grad;
    FewBits bits(rows, cols, format, block_size, nested);
    const View like(codes);
    Tensor own_codes = codes, own_scales = scales;
    bits.point_to(own_codes, own_scales);
    const int64_t sizes[] = {rows, cols};
    Tensor out = new_tensor(codes, {sizes, 2}, dtype);
    bits.matrix.dtype = float_of(View(out), "dtype");
    if (bits.is_empty())
        return out;
    const hr_rows to = rows_of(out);
    const Exec exec(like);
    check(hr_dequantize_matrix(&to, &bits.matrix, 0, rows, 0, cols, &exec.exec));
    return out;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("quantize_matrix(Tensor matrix, int format, int block_size, bool nested, bool search) -> "
          "(Tensor codes, Tensor scales)");
    m.def("dequantize_matrix(Tensor codes, Tensor scales, int rows, int cols, int format, "
          "int block_size, bool nested, ScalarType dtype) -> Tensor");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("quantize_matrix", TORCH_BOX(&quantize_matrix));
    m.impl("dequantize_matrix", TORCH_BOX(&dequantize_matrix));
}
