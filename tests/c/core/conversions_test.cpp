// How elements are loaded and stored, seen through hr_adamw(): with beta1 = 0 the new exp_avg is
// the gradient, converted. Every 16-bit pattern is loaded; every midpoint between two and its
// neighbors are stored. Infinity and the sign of zero cannot be seen so, for the formula multiplies
// by 0 and adds.
#include <cmath>
#include <cstring>

#include "tests/c/harness/backend.h"
#include "tests/c/harness/elements.h"

using Conversions = OnBackend;
ON_EVERY_BACKEND(Conversions);

namespace
{
std::vector<double> converted(Backend &backend, const std::vector<uint8_t> &grads, hr_dtype from,
                              hr_dtype to)
{
    const int64_t n = int64_t(grads.size() / bytes_of(from));
    const std::vector<uint8_t> zeros(size_t(n) * 4);
    const std::vector<uint8_t> states(size_t(n) * bytes_of(to));
    const Buffer param(backend, zeros), grad(backend, grads), m(backend, states),
        v(backend, states);
    const hr_dtype f32 = HR_F32;
    void *const data[] = {param.data(), grad.data(), m.data(), v.data()};
    const hr_tensor_list params = {1, &data[0], &n, &f32}, gradients = {1, &data[1], &n, &from};
    const hr_tensor_list ms = {1, &data[2], &n, &to}, vs = {1, &data[3], &n, &to};
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.beta1 = 0;
    config.step.t = 1;
    const hr_exec exec = backend.exec();
    EXPECT_EQ(hr_adamw(&params, &ms, &vs, nullptr, nullptr, &gradients, &config, &exec), HR_OK);
    return decode(m.content(), to);
}

// The numbers with these bits as bf16; with a shift the addresses allow no vectors.
std::vector<uint16_t> stored(Backend &backend, const std::vector<uint32_t> &patterns, size_t shift)
{
    const int64_t n = int64_t(patterns.size());
    std::vector<uint8_t> grads(patterns.size() * 4);
    memcpy(grads.data(), patterns.data(), grads.size());
    const Buffer param(backend, std::vector<uint8_t>(grads.size())), grad(backend, grads, shift);
    const Buffer m(backend, std::vector<uint8_t>(grads.size() / 2));
    const Buffer v(backend, std::vector<uint8_t>(grads.size() / 2));
    const hr_dtype f32 = HR_F32, bf16 = HR_BF16;
    void *const data[] = {param.data(), grad.data(), m.data(), v.data()};
    const hr_tensor_list params = {1, &data[0], &n, &f32}, gradients = {1, &data[1], &n, &f32};
    const hr_tensor_list ms = {1, &data[2], &n, &bf16}, vs = {1, &data[3], &n, &bf16};
    hr_adamw_config config = HR_ADAMW_CONFIG_INIT;
    config.beta1 = 0;
    config.step.t = 1;
    const hr_exec exec = backend.exec();
    EXPECT_EQ(hr_adamw(&params, &ms, &vs, nullptr, nullptr, &gradients, &config, &exec), HR_OK);
    const std::vector<uint8_t> content = m.content();
    std::vector<uint16_t> halves(patterns.size());
    memcpy(halves.data(), content.data(), content.size());
    return halves;
}

void expect_equal(const std::vector<double> &got, const std::vector<double> &wanted)
{
    ASSERT_EQ(got.size(), wanted.size());
    for (size_t i = 0; i < got.size(); i++)
        ASSERT_TRUE(got[i] == wanted[i] || (std::isnan(got[i]) && std::isnan(wanted[i])))
            << "element " << i << " is " << got[i] << ", wanted " << wanted[i];
}
} // namespace

TEST_P(Conversions, EveryPatternLoads)
{
    for (const hr_dtype type : {HR_BF16, HR_F16}) {
        const int infinity = type == HR_BF16 ? 0x7F80 : 0x7C00;
        std::vector<uint8_t> patterns;
        for (int i = 0; i < 65536; i++) {
            if ((i & 0x7FFF) == infinity)
                continue;
            patterns.push_back(uint8_t(i));
            patterns.push_back(uint8_t(i >> 8));
        }
        expect_equal(converted(*backend, patterns, type, HR_F32), decode(patterns, type));
    }
}

TEST_P(Conversions, StoresRoundToNearestEven)
{
    for (const hr_dtype type : {HR_BF16, HR_F16}) {
        std::vector<double> values;
        for (int i = 0; i < 0x7FFF; i++) {
            const uint16_t low = uint16_t(i), high = uint16_t(i + 1);
            const double a = decode(reinterpret_cast<const uint8_t *>(&low), type);
            const double b = decode(reinterpret_cast<const uint8_t *>(&high), type);
            if (!std::isfinite(a) || !std::isfinite(b))
                continue;
            const float middle = float((a + b) / 2);
            for (const float x : {float(a), std::nextafter(middle, -INFINITY), middle,
                                  std::nextafter(middle, INFINITY)}) {
                values.push_back(x);
                values.push_back(-x);
            }
        }
        for (const double x :
             {65504.0, 65519.99, 65520.0, 1e5, 3.3895e38, 3.3961e38, 3.4e38, double(NAN)})
            values.push_back(x);
        expect_equal(converted(*backend, encode(values, HR_F32), HR_F32, type),
                     decode(encode(decode(encode(values, HR_F32), HR_F32), type), type));
    }
}

// On a GPU, every number there is, in pairs and one by one: two instructions of its own.
TEST_P(Conversions, EveryNumberRoundsToBfloat16)
{
    if (backend != cuda_backend() || backend->sees_overruns())
        GTEST_SKIP() << "the CPU and the emulator take the formula that this compares with";
    const auto rounded = [](uint32_t bits) {
        const uint32_t magnitude = bits & 0x7FFFFFFFu; // of infinity and -0 see above
        if (bits == 0x80000000u)
            return 0u;
        return magnitude >= 0x7F800000u ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
    };
    const uint32_t step = 1u << 24;
    std::vector<uint32_t> patterns(step);
    for (const size_t shift : {0, 4})
        for (uint32_t part = 0; part < 256; part++) {
            for (uint32_t i = 0; i < step; i++)
                patterns[i] = part * step + i;
            const std::vector<uint16_t> got = stored(*backend, patterns, shift);
            for (uint32_t i = 0; i < step; i++)
                ASSERT_EQ(got[i], rounded(patterns[i])) << std::hex << patterns[i];
        }
}
