// The functions of kernels/core/math.h against those of the C library in binary64, at every exponent.
// They are inline, so this is the host's code; the tests of ops compare it with that of other devices.
#include <gtest/gtest.h>

#include <cmath>

#include "kernels/core/math.h"

namespace
{

// The distance to the exact result, in units of the last place of binary32 there.
double error_in_ulps(float got, double exact)
{
    if (std::isnan(exact) || std::isnan(got))
        return std::isnan(exact) && std::isnan(got) ? 0 : INFINITY;
    if (std::isinf(exact) || std::isinf(got) || float(exact) == got)
        return float(exact) == got ? 0 : INFINITY;
    int exponent;
    std::frexp(exact, &exponent);
    return std::fabs(double(got) - exact) / std::ldexp(1, std::max(exponent, -125) - 24);
}

template <typename Function, typename Exact>
void expect_close(Function function, Exact exact, double bound)
{
    double worst = 0;
    float where = 0;
    const auto visit = [&](uint32_t bits) {
        const float x = hr_float(bits);
        const double error = error_in_ulps(function(x), exact(double(x)));
        if (!(error <= worst))
            worst = error, where = x;
    };
    // Two thousand mantissas of each exponent, never the same; zeros, infinities and NaNs.
    for (uint64_t bits = 0; bits <= 0xFFFFFFFFu; bits += 4001)
        visit(uint32_t(bits));
    for (const uint32_t sign : {0u, 0x80000000u})
        for (uint32_t exponent = 0; exponent <= 255; exponent++)
            for (const uint32_t mantissa : {0u, 1u, 0x3504F3u, 0x7FFFFFu})
                visit(sign | exponent << 23 | mantissa);
    EXPECT_LE(worst, bound) << "at " << where;
}

} // namespace

TEST(MathOnTheCpu, ErrorsAreSmallEverywhere)
{
    expect_close(
        hr_exp, [](double x) { return std::exp(x); }, 1.5);
    expect_close(
        hr_log, [](double x) { return std::log(x); }, 1.5);
    expect_close(
        hr_tanh, [](double x) { return std::tanh(x); }, 1.5);
    expect_close(
        hr_erf, [](double x) { return std::erf(x); }, 1.5);
}

TEST(MathOnTheCpu, NormalDistributionIsCloseInTheTailToo)
{
    // Farther out the results are 0 before they are denormal.
    const auto is_far = [](double x) { return std::fabs(x) > 13.1; };
    expect_close(
        [=](float x) { return is_far(x) ? 0 : hr_normal(x).density; },
        [=](double x) { return is_far(x) ? 0 : std::exp(-x * x / 2) / std::sqrt(2 * M_PI); }, 8);
    expect_close([=](float x) { return is_far(x) ? 0 : hr_normal(x).below; },
                 [=](double x) { return is_far(x) ? 0 : std::erfc(-x / M_SQRT2) / 2; }, 8);
    for (const float x : {13.5f, 1e30f, HUGE_VALF}) {
        EXPECT_EQ(hr_normal(x).below, 1);
        EXPECT_EQ(hr_normal(-x).below, 0);
        EXPECT_EQ(hr_normal(x).density, 0);
    }
}

TEST(MathOnTheCpu, ZerosKeepTheirSign)
{
    EXPECT_TRUE(std::signbit(hr_tanh(-0.0f)) && std::signbit(hr_erf(-0.0f)));
    EXPECT_FALSE(std::signbit(hr_tanh(0.0f)) || std::signbit(hr_erf(0.0f)));
}

TEST(MathOnTheCpu, ExponentialsUpTo1AreCloseOrZero)
{
    for (float x = 0; x >= -88; x -= 0.00007f) {
        const float got = hr_exp_to_1(x);
        if (x < -87.7f)
            ASSERT_EQ(got, 0) << x;
        else if (x < -87.6f)
            ASSERT_TRUE(got == 0 || got >= 0x1p-127f) << x;
        else
            ASSERT_LE(error_in_ulps(got, std::exp(double(x))), 1.5 - x / 24) << x;
    }
}
