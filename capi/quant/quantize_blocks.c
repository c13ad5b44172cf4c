/* quantize_blocks.c: hr_quantize_blocks and hr_dequantize_blocks: checks, then the kernel of the
 * device. */
#include "kernels/quant/quantize_blocks.h"

#include <inttypes.h>

#include "capi/check/quant.h"

static hr_status check_config(const char *function, hr_quantize_config *own,
                              const hr_quantize_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_quantize_config, is_signed), "HR_QUANTIZE_CONFIG_INIT"));
    const int32_t size = own->block_size;
    HR_REQUIRE(size >= QUANT_MIN_BLOCK && size <= QUANT_MAX_BLOCK && (size & (size - 1)) == 0,
               "%s: block_size is %" PRId32 ", wanted a power of two from 64 to 4096", function,
               size);
    return HR_OK;
}

static hr_status convert(const char *function, quantize_args args, const hr_quantize_config *config,
                         const hr_exec *exec)
{
    hr_quantize_config own = HR_QUANTIZE_CONFIG_INIT;
    HR_TRY(check_config(function, &own, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(args.values, "%s: values is NULL", function);
    const int64_t count = args.values->count;
    HR_TRY(hr_check_list(function, "values", args.values, count, NULL, HR_FLOATS));
    HR_TRY(hr_check_list(function, "codes", args.codes, count, args.values->numel, HR_BIT(HR_U8)));
    HR_TRY(quant_check_absmaxs(function, "absmaxs", args.absmaxs, args.values, own.block_size));
    args.config = &own;
    if (exec->device == HR_CPU)
        return quantize_blocks_cpu(&args);
    HR_RETURN_CUDA(quantize_blocks_cuda(&args, exec), exec);
}

hr_status hr_quantize_blocks(const hr_tensor_list *codes, const hr_tensor_list *absmaxs,
                             const hr_tensor_list *values, const hr_quantize_config *config,
                             const hr_exec *exec)
{
    const quantize_args args = {codes, absmaxs, values, NULL, 0};
    return convert("hr_quantize_blocks", args, config, exec);
}

hr_status hr_dequantize_blocks(const hr_tensor_list *values, const hr_tensor_list *codes,
                               const hr_tensor_list *absmaxs, const hr_quantize_config *config,
                               const hr_exec *exec)
{
    const quantize_args args = {codes, absmaxs, values, NULL, 1};
    return convert("hr_dequantize_blocks", args, config, exec);
}
