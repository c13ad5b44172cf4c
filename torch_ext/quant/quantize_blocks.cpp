// quantize_blocks.cpp: registers headroom::quantize_blocks and headroom::dequantize_blocks.
//
// Blocks are counted in memory order, as in an optimizer's moments. A tensor with gaps in memory is
// counted in row-major order.
#include <tuple>

#include "torch_ext/core/layout.h"

namespace
{

using namespace headroom;

hr_quantize_config config_of(bool is_signed, int64_t block_size)
{
    hr_quantize_config config = HR_QUANTIZE_CONFIG_INIT;
    config.is_signed = is_signed;
    config.block_size = static_cast<int32_t>(block_size);
    if (config.block_size != block_size)
        fail("block_size is " + std::to_string(block_size) +
             ", wanted a power of two from 64 to "
             "4096");
    return config;
}

std::tuple<Tensor, Tensor> quantize_blocks(const Tensor &values, bool is_signed, int64_t block_size)
{
    const hr_quantize_config config = config_of(is_signed, block_size);
    const NoGrad no_grad;
    const View view(values);
    const Layout layout(view, "values", 0, true);
    Tensor codes = layout.empty(aoti_torch_dtype_uint8(), view);
    const int64_t blocks = hr_block_count(view.numel(), block_size);
    Tensor absmax = new_tensor(values, {&blocks, 1}, torch::headeronly::ScalarType::Float);
    List value_list, code_list, absmax_list;
    Staging staging;
    staging.add(value_list, view, &layout, "values", 0, false);
    code_list.add(View(codes), "codes", 0);
    absmax_list.add(View(absmax), "absmax", 0);
    const hr_tensor_list lists[] = {code_list.view(), absmax_list.view(), value_list.view()};
    const Exec exec(view);
    check(hr_quantize_blocks(&lists[0], &lists[1], &lists[2], &config, &exec.exec));
    return {codes, absmax};
}

Tensor dequantize_blocks(const Tensor &codes, const Tensor &absmax, bool is_signed,
                         int64_t block_size)
{
    const hr_quantize_config config = config_of(is_signed, block_size);
    const NoGrad no_grad;
    const View view(codes), scales(absmax);
    require_with(scales, "absmax", view, "codes");
    if (!scales.is_contiguous())
        fail("absmax must be contiguous");
    const Layout layout(view, "codes", 0, true);
    Tensor values = layout.empty(aoti_torch_dtype_float32(), view);
    List value_list, code_list, absmax_list;
    Staging staging;
    staging.add(code_list, view, &layout, "codes", 0, false);
    value_list.add(View(values), "values", 0);
    absmax_list.add(scales, "absmax", 0);
    const hr_tensor_list lists[] = {value_list.view(), code_list.view(), absmax_list.view()};
    const Exec exec(view);
    check(hr_dequantize_blocks(&lists[0], &lists[1], &lists[2], &config, &exec.exec));
    return values;
}

} // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(headroom, m)
{
    m.def("quantize_blocks(Tensor values, bool is_signed, int block_size=256) -> (Tensor, Tensor)");
    m.def("dequantize_blocks(Tensor codes, Tensor absmax, bool is_signed, int block_size=256) -> "
          "Tensor");
}

HR_IMPLEMENT_FOR_CPU_AND_CUDA(m)
{
    m.impl("quantize_blocks", TORCH_BOX(&quantize_blocks));
    m.impl("dequantize_blocks", TORCH_BOX(&dequantize_blocks));
}
