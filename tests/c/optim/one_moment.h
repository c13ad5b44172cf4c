// What the tests of optimizers with one moment state again: a product and a sum that are rounded once, and
// moments in codes.
#pragma once

#include <cmath>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "capi/headroom.h"

// A product and a sum of binary32, rounded once: binary64 has the product exactly, and rounds the sum
// to odd, so that the second rounding is that of the exact sum.
inline float fused(float a, float b, float c)
{
    const double product = double(a) * b, sum = product + c;
    const double virtual_c = sum - product, error = (product - (sum - virtual_c)) + (c - virtual_c);
    uint64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if (!std::isfinite(sum) || error == 0 || bits & 1)
        return float(sum);
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    std::memcpy(&odd, &bits, sizeof odd);
    return float(odd);
}

// What a tensor's codes stand for, on the CPU.
template <class Run, class List>
std::vector<double> decoded(const Run &run, List moments, List absmaxs, size_t k)
{
    const std::vector<double> codes = run.values(moments, k), scales = run.values(absmaxs, k);
    float map[256];
    EXPECT_EQ(hr_dynamic_map(map, 1), HR_OK);
    std::vector<double> values;
    for (size_t i = 0; i < codes.size(); i++)
        values.push_back(
            double(map[int(codes[i])] * float(scales[i / size_t(run.config.block_size)])));
    return values;
}

// That a tensor's codes are those that hr_quantize_blocks() gives the moments.
template <class Run, class List>
void expect_codes(const Run &run, List moments, List absmaxs, size_t k, std::vector<float> wanted)
{
    int64_t numel = int64_t(wanted.size()), blocks = hr_block_count(numel, run.config.block_size);
    std::vector<uint8_t> codes(wanted.size());
    std::vector<float> scales(static_cast<size_t>(blocks));
    void *const data[] = {codes.data(), scales.data(), wanted.data()};
    const hr_dtype types[] = {HR_U8, HR_F32};
    const hr_tensor_list lists[] = {{1, data, &numel, types},
                                    {1, data + 1, &blocks, types + 1},
                                    {1, data + 2, &numel, types + 1}};
    hr_quantize_config config = HR_QUANTIZE_CONFIG_INIT;
    config.is_signed = 1;
    config.block_size = run.config.block_size;
    const hr_exec cpu = {HR_CPU, nullptr};
    ASSERT_EQ(hr_quantize_blocks(lists, lists + 1, lists + 2, &config, &cpu), HR_OK);
    EXPECT_EQ(run.values(moments, k), std::vector<double>(codes.begin(), codes.end()));
    EXPECT_EQ(run.values(absmaxs, k), std::vector<double>(scales.begin(), scales.end()));
}
