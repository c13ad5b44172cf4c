// Params that someone else wrote, with the residuals of other weights: what was written counts, for
// every param with every residual.
#include <cmath>
#include <cstring>

#include "tests/c/harness/tensors.h"
#include "tests/c/weights/residual_modes.h"
#include "tests/c/weights/weights_data.h"

namespace
{
// hr_join_weights() of one param with residuals of a given list of bits.
class Joined
{
  public:
    Joined(Backend &backend, hr_weights_mode mode, hr_dtype dtype,
           const std::vector<uint8_t> &residuals)
        : numel_(int64_t(residuals.size() / residual_bytes(mode))), backend_(backend),
          values_(backend, std::vector<uint8_t>(size_t(numel_) * 4)),
          params_(backend, std::vector<uint8_t>(size_t(numel_) * 2)),
          residuals_(backend, residuals), floats_(size_t(numel_)), exec_(backend.exec())
    {
        types_[0] = HR_F32;
        types_[1] = dtype;
        types_[2] = mode == HR_WEIGHTS_REMAINDER16 ? HR_I16
                    : is_remainder(mode)           ? HR_I8
                                                   : residual_type(mode, dtype);
        weights_.mode = mode;
        weights_.residuals = &lists_[2];
    }
    Joined(const Joined &) = delete;

    const std::vector<float> &with(uint16_t param)
    {
        const std::vector<uint16_t> params(size_t(numel_), param);
        backend_.upload(params_.data(), params.data(), params.size() * 2);
        EXPECT_EQ(hr_join_weights(&lists_[0], &lists_[1], &weights_, &exec_), HR_OK)
            << hr_last_error();
        backend_.download(floats_.data(), values_.data(), floats_.size() * 4);
        return floats_;
    }

  private:
    int64_t numel_;
    Backend &backend_;
    Buffer values_, params_, residuals_;
    std::vector<float> floats_;
    hr_exec exec_;
    hr_dtype types_[3];
    void *data_[3] = {values_.data(), params_.data(), residuals_.data()};
    hr_tensor_list lists_[3] = {{1, &data_[0], &numel_, &types_[0]},
                                {1, &data_[1], &numel_, &types_[1]},
                                {1, &data_[2], &numel_, &types_[2]}};
    hr_weights weights_ = HR_WEIGHTS_INIT;
};

std::vector<uint8_t> every_residual(hr_weights_mode mode)
{
    std::vector<uint8_t> all;
    for (int bits = 0; bits < (residual_bytes(mode) == 1 ? 256 : 65536); bits++) {
        all.push_back(uint8_t(bits));
        if (residual_bytes(mode) == 2)
            all.push_back(uint8_t(bits >> 8));
    }
    return all;
}

// The largest, the smallest and the special ones of both types, or all.
std::vector<uint16_t> some_params(bool all)
{
    std::vector<uint16_t> params;
    for (const uint32_t bits :
         {0x0000u, 0x0001u, 0x007Fu, 0x0080u, 0x0081u, 0x0100u, 0x03FFu, 0x0400u,
          0x0401u, 0x3C00u, 0x3F80u, 0x3F81u, 0x42FFu, 0x7BFFu, 0x7C00u, 0x7C01u,
          0x7E00u, 0x7F7Eu, 0x7F7Fu, 0x7F80u, 0x7F81u, 0x7FC0u, 0x7FFFu})
        for (const uint32_t sign : {0u, 0x8000u})
            params.push_back(uint16_t(bits | sign));
    for (uint32_t bits = 0; all && bits < 65536; bits++)
        params.push_back(uint16_t(bits));
    return params;
}

struct Special {
    size_t nans, infinities;
};

// Two at a time: there are four billion.
Special special_among(const std::vector<float> &values)
{
    const uint64_t both = 0x0000000100000001;
    const float *const begin = values.data(), *const end = begin + values.size();
    uint64_t nans = 0, not_finite = 0, words; // in both halves of a word
    for (const float *two = begin; two < end; two += 2) {
        std::memcpy(&words, two, sizeof words);
        words &= 0x7FFFFFFF * both;
        nans += (words + 0x007FFFFF * both) >> 31 & both;
        not_finite += (words + 0x00800000 * both) >> 31 & both;
    }
    const auto sum = [](uint64_t counts) { return (counts & 0xFFFFFFFF) + (counts >> 32); };
    return {sum(nans), sum(not_finite) - sum(nans)};
}
} // namespace

using WrittenWeights = OnBackend;
ON_EVERY_BACKEND(WrittenWeights);

// All pairs on the CPU; on CUDA, and where a sanitizer slows the loops, the params at the limits.
TEST_P(WrittenWeights, NoResidualMakesANanOrAnInfinity)
{
    const bool all = !backend->is_emulated() && !backend->sees_overruns();
    for (const auto mode :
         {HR_WEIGHTS_REMAINDER16, HR_WEIGHTS_REMAINDER8, HR_WEIGHTS_REMAINDER8_STOCHASTIC}) {
        Joined joined(*backend, mode, HR_BF16, every_residual(mode));
        for (const uint16_t param : some_params(all)) {
            const std::vector<float> &values = joined.with(param);
            const Special got = special_among(values);
            const bool is_infinity = (param & 0x7FFF) == 0x7F80;
            ASSERT_EQ(got.nans, (param & 0x7FFF) > 0x7F80 ? values.size() : 0) << param;
            // A negative remainder of an infinity is that of a number which bf16 has not.
            ASSERT_EQ(got.infinities, is_infinity ? values.size() / 2 : 0) << param;
        }
    }
}

TEST_P(WrittenWeights, AKahanResidualFitsItsParam)
{
    for (const hr_dtype type : {HR_BF16, HR_F16}) {
        const double unit = type == HR_BF16 ? 0x1p-7 : 0x1p-10; // in the last place of 1
        const double normal = type == HR_BF16 ? 0x1p-126 : 0x1p-14;
        std::vector<double> residuals;
        for (int bits = 0; bits < 65536; bits++)
            residuals.push_back(number(uint16_t(bits), type));
        Joined joined(*backend, HR_WEIGHTS_KAHAN, type, every_residual(HR_WEIGHTS_KAHAN));
        for (const uint16_t param : some_params(false)) {
            const double x = number(param, type), magnitude = std::fabs(x);
            const double half = std::isfinite(x) && magnitude >= normal
                                    ? unit / 2 * std::ldexp(1, std::ilogb(x))
                                    : 0;
            const std::vector<float> &values = joined.with(param);
            for (size_t i = 0; i < residuals.size(); i++) {
                if (std::isnan(x)) {
                    ASSERT_TRUE(std::isnan(values[i])) << param << " " << i;
                } else if (std::isinf(x)) {
                    if (std::isfinite(residuals[i])) { // as all that were ever written
                        ASSERT_EQ(values[i], x) << param << " " << i;
                    }
                } else {
                    const bool fits = std::fabs(residuals[i]) <= half;
                    ASSERT_EQ(values[i], float(fits ? x + residuals[i] : x)) << param << " " << i;
                }
            }
        }
    }
}

TEST_P(WrittenWeights, AMasterCountsIfItRoundsToItsParam)
{
    for (const hr_dtype type : {HR_BF16, HR_F16}) {
        std::vector<double> masters = {0.0, -0.0, NAN, INFINITY, -INFINITY, 1e-45, -1e-45, 3.4e38};
        for (const uint16_t param : some_params(false)) // it, halves of units about it, and near
            for (const int offset : {-0x18000, -0x8001, -0x8000, -0x7FFF, -0x1001, -0x1000, -0xFFF,
                                     -1, 0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001}) {
                const float x = float(number(param, type));
                uint32_t bits;
                std::memcpy(&bits, &x, sizeof bits);
                masters.push_back(decode(bytes_of_number(bits + uint32_t(offset)), HR_F32)[0]);
            }
        masters = decode(encode(masters, HR_F32), HR_F32);
        const std::vector<uint8_t> rounded = encode(masters, type);
        Joined joined(*backend, HR_WEIGHTS_MASTER, type, encode(masters, HR_F32));
        for (const uint16_t param : some_params(false)) {
            const double x = number(param, type);
            const std::vector<float> &values = joined.with(param);
            for (size_t i = 0; i < masters.size(); i++) {
                const bool fits = std::memcmp(&param, &rounded[2 * i], 2) == 0;
                const double expected = fits ? masters[i] : x;
                if (std::isnan(expected)) {
                    ASSERT_TRUE(std::isnan(values[i])) << param << " " << masters[i];
                } else {
                    ASSERT_EQ(values[i], expected) << param << " " << masters[i];
                    ASSERT_EQ(std::signbit(values[i]), std::signbit(expected)) << param;
                }
            }
        }
    }
}

// Binary32 numbers all over the range, those at the limits of a rounding among them.
TEST_P(WrittenWeights, AWeightThatWasSplitKeepsItsResidual)
{
    std::vector<uint8_t> bytes;
    const uint32_t step = backend->is_emulated() ? 61 : 1;
    for (uint32_t high = 0; high < 65536; high += high < 0x80 || high % 128 > 126 ? 1 : step)
        for (const uint32_t low :
             {0u,      1u,      0x7Fu,   0x80u,   0x81u,   0xFFFu,  0x1000u, 0x1001u,
              0x3000u, 0x5A5Au, 0x7F7Fu, 0x7F80u, 0x7F81u, 0x7FFFu, 0x8000u, 0x8001u,
              0x807Fu, 0x8080u, 0xA5A5u, 0xFF7Fu, 0xFF80u, 0xFF81u, 0xFFFFu}) {
            const std::vector<uint8_t> word = bytes_of_number(high << 16 | low);
            bytes.insert(bytes.end(), word.begin(), word.end());
        }
    const std::vector<double> wanted = decode(bytes, HR_F32);
    for (const ResidualMode &m : kResidualModes) {
        const std::vector<int64_t> numel = {int64_t(wanted.size())};
        const Tensors values(*backend, numel, {HR_F32}, 0,
                             [&](size_t, size_t i) { return wanted[i]; });
        const Tensors params(*backend, numel, {m.dtype}, 0, [](size_t, size_t) { return 3.0; });
        const WeightsData kept(*backend, {m.mode}, numel, params.dtype, params.buffers);
        const hr_exec exec = backend->exec();
        ASSERT_EQ(hr_split_weights(&params.list, &values.list, &kept.weights, &exec), HR_OK);
        ASSERT_EQ(hr_join_weights(&values.list, &params.list, &kept.weights, &exec), HR_OK);
        const std::vector<double> got = values.values(0), param = params.values(0);
        const std::vector<double> residuals = m.mode == HR_WEIGHTS_KAHAN
                                                  ? decode(kept.buffers[0].content(), m.dtype)
                                                  : std::vector<double>();
        for (size_t i = 0; i < wanted.size(); i++) {
            double expected = wanted[i];
            if (m.mode == HR_WEIGHTS_KAHAN)
                expected = double(float(param[i] + residuals[i]));
            if (m.mode >= HR_WEIGHTS_REMAINDER8 && std::isfinite(expected)) {
                int exponent;
                std::frexp(std::max(std::fabs(expected), 0x1p-126), &exponent);
                const double unit = std::ldexp(1, exponent - 16); // of 16 bits
                expected = double(float(std::nearbyint(expected / unit) * unit));
            }
            if (std::isnan(expected)) {
                ASSERT_TRUE(std::isnan(got[i])) << m.mode << " " << i;
            } else {
                ASSERT_EQ(got[i], expected) << m.mode << " " << wanted[i];
                if (m.mode != HR_WEIGHTS_KAHAN) {
                    ASSERT_EQ(std::signbit(got[i]), std::signbit(expected));
                }
            }
        }
    }
}
