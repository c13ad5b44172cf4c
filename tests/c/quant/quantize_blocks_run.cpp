#include "tests/c/quant/quantize_blocks_run.h"

namespace
{
std::vector<int64_t> blocks_of(const QuantizeCase &c)
{
    std::vector<int64_t> blocks;
    for (const int64_t n : c.numel)
        blocks.push_back(hr_block_count(n, c.block_size));
    return blocks;
}

double untouched(size_t, size_t)
{
    return 99;
}
} // namespace

QuantizeRun::QuantizeRun(Backend &backend, const QuantizeCase &c)
    : codes(backend, c.numel, {HR_U8}, c.shift, untouched),
      absmaxs(backend, blocks_of(c), {HR_F32}, c.shift, untouched),
      values(backend, c.numel, c.types, c.shift, c.value), exec(backend.exec())
{
    config.is_signed = c.is_signed;
    config.block_size = c.block_size;
}

hr_status QuantizeRun::call() const
{
    return hr_quantize_blocks(codes.argument, absmaxs.argument, values.argument, config_argument,
                              exec_argument);
}

hr_status QuantizeRun::decode() const
{
    return hr_dequantize_blocks(values.argument, codes.argument, absmaxs.argument, config_argument,
                                exec_argument);
}

std::vector<uint8_t> QuantizeRun::image() const
{
    return image_of({&codes.buffers, &absmaxs.buffers, &values.buffers});
}

bool QuantizeRun::whole() const
{
    return intact({&codes.buffers, &absmaxs.buffers, &values.buffers});
}
