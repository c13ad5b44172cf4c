// The modes of 16-bit weights that keep residuals, and residuals as bytes.
#pragma once

#include <cstring>
#include <vector>

#include "tests/c/harness/elements.h"

inline bool is_remainder(hr_weights_mode mode)
{
    return mode >= HR_WEIGHTS_REMAINDER16;
}

inline size_t residual_bytes(hr_weights_mode mode)
{
    return mode == HR_WEIGHTS_MASTER ? 4 : mode >= HR_WEIGHTS_REMAINDER8 ? 1 : 2;
}

inline hr_dtype residual_type(hr_weights_mode mode, hr_dtype param)
{
    return mode == HR_WEIGHTS_KAHAN ? param : HR_F32;
}

template <class T> std::vector<uint8_t> bytes_of_number(T x)
{
    std::vector<uint8_t> bytes(sizeof x);
    std::memcpy(bytes.data(), &x, sizeof x);
    return bytes;
}

inline double number(uint16_t bits, hr_dtype type)
{
    return decode(bytes_of_number(bits), type)[0];
}

struct ResidualMode {
    hr_weights_mode mode;
    hr_dtype dtype;
};

inline const std::vector<ResidualMode> kResidualModes = {
    {HR_WEIGHTS_KAHAN, HR_BF16},
    {HR_WEIGHTS_KAHAN, HR_F16},
    {HR_WEIGHTS_MASTER, HR_BF16},
    {HR_WEIGHTS_MASTER, HR_F16},
    {HR_WEIGHTS_REMAINDER16, HR_BF16},
    {HR_WEIGHTS_REMAINDER8, HR_BF16},
    {HR_WEIGHTS_REMAINDER8_STOCHASTIC, HR_BF16},
};
