// hr_join_weights() and hr_split_weights(): every mode, on every backend, and what they refuse.
#include <cmath>

#include "tests/c/harness/bits.h"
#include "tests/c/harness/refused.h"
#include "tests/c/weights/weights_data.h"

namespace
{
const std::vector<int64_t> kNumel = {1, 7, 0, 257, 20001};

// A call on values spread over the exponents, with NaN, infinities and denormals among them.
struct Call {
    // `shifted` has a bit for values, params and residuals.
    Call(Backend &backend, hr_weights_mode mode, hr_dtype dtype, size_t shift = 0,
         unsigned shifted = 7)
        : values(backend, kNumel, {HR_F32}, shifted & 1 ? shift : 0, value),
          params(backend, kNumel, {dtype}, shifted & 2 ? shift : 0,
                 [](size_t, size_t) { return 3.0; }),
          weights(backend, {mode, false, false, shifted & 4 ? shift : 0}, kNumel, params.dtype,
                  params.buffers),
          exec(backend.exec())
    {
    }

    static double value(size_t tensor, size_t i)
    {
        constexpr double kSpecial[] = {NAN, INFINITY, -INFINITY, 1e-40, -3e-41,
                                       0,   -0.0,     3e38,      65519};
        if (i % 11 == 5)
            return kSpecial[i / 11 % 9];
        return std::ldexp(noise(tensor, i), int(i % 29) - 14);
    }

    hr_status split() const
    {
        return hr_split_weights(params.argument, values.argument, argument, exec_argument);
    }

    hr_status join() const
    {
        return hr_join_weights(values.argument, params.argument, argument, exec_argument);
    }

    hr_status call() const
    {
        return splits ? split() : join();
    }

    bool whole() const
    {
        return intact({&values.buffers, &params.buffers, &weights.buffers});
    }

    std::vector<uint8_t> image() const
    {
        return image_of({&values.buffers, &params.buffers, &weights.buffers});
    }

    Tensors values, params;
    WeightsData weights;
    hr_exec exec;
    const hr_weights *argument = &weights.weights;
    const hr_exec *exec_argument = &exec;
    bool splits = true; // what call() does
};

struct Mode {
    hr_weights_mode mode;
    hr_dtype dtype;
    double error; // relative to the value, of what is kept
};

const std::vector<Mode> kModes = {
    {HR_WEIGHTS_NEAREST, HR_F32, 0},
    {HR_WEIGHTS_NEAREST, HR_BF16, 0x1p-8},
    {HR_WEIGHTS_NEAREST, HR_F16, 0x1p-11},
    {HR_WEIGHTS_STOCHASTIC, HR_BF16, 0x1p-8},
    {HR_WEIGHTS_STOCHASTIC, HR_F16, 0x1p-11},
    {HR_WEIGHTS_KAHAN, HR_BF16, 0x1p-16},
    {HR_WEIGHTS_KAHAN, HR_F16, 0x1p-14},
    {HR_WEIGHTS_MASTER, HR_BF16, 0},
    {HR_WEIGHTS_MASTER, HR_F16, 0},
    {HR_WEIGHTS_REMAINDER16, HR_BF16, 0},
    {HR_WEIGHTS_REMAINDER8, HR_BF16, 0x1p-16},
    {HR_WEIGHTS_REMAINDER8_STOCHASTIC, HR_BF16, 0x1p-16},
};

// To nearest, a tie to either side: by the definition of the type.
bool is_rounding_of(double param, double value, hr_dtype dtype)
{
    const double nearest = decode(encode({value}, dtype), dtype)[0];
    return (std::isnan(value) && std::isnan(param)) || param == nearest ||
           std::fabs(param - value) == std::fabs(nearest - value);
}
} // namespace

using Weights = OnBackend;
ON_EVERY_BACKEND(Weights);

TEST_P(Weights, AreKeptToTheErrorOfTheirMode)
{
    for (const Mode &m : kModes)
        for (const size_t shift : {size_t(0), size_t(1)}) {
            SCOPED_TRACE(std::to_string(m.mode) + ", type " + std::to_string(m.dtype));
            Call run(*backend, m.mode, m.dtype, shift);
            std::vector<std::vector<double>> before;
            for (size_t k = 0; k < kNumel.size(); k++)
                before.push_back(run.values.values(k));
            ASSERT_EQ(run.split(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.join(), HR_OK) << hr_last_error();
            for (size_t k = 0; k < kNumel.size(); k++) {
                const std::vector<double> after = run.values.values(k),
                                          param = run.params.values(k);
                for (size_t i = 0; i < after.size(); i++) {
                    const double x = before[k][i];
                    // A double rounding may miss the nearest by half a unit of what is kept.
                    if (m.mode < HR_WEIGHTS_REMAINDER8) {
                        ASSERT_TRUE(is_rounding_of(param[i], x, m.dtype)) << x << " " << param[i];
                    }
                    if (std::isnan(x)) {
                        ASSERT_TRUE(std::isnan(after[i]) && std::isnan(param[i]));
                    } else if (std::isinf(x) || m.error == 0) {
                        ASSERT_EQ(after[i], x);
                    } else if (std::isfinite(param[i])) {
                        const double tiny = m.dtype == HR_F16 ? 0x1p-25 : 0x1p-133;
                        ASSERT_NEAR(after[i], x, std::max(m.error * std::fabs(x), tiny)) << i;
                    }
                }
            }
            EXPECT_TRUE(run.whole());
        }
}

TEST_P(Weights, HaveTheBitsOfTheCpu)
{
    Digest digest;
    for (const Mode &m : kModes)
        for (const unsigned shifted : {0, 1, 2, 4, 7}) { // every list alone at an odd address
            Call here(*backend, m.mode, m.dtype, 1, shifted), there(cpu_backend(), m.mode, m.dtype);
            for (Call *run : {&here, &there}) {
                ASSERT_EQ(run->split(), HR_OK) << hr_last_error();
                ASSERT_EQ(run->join(), HR_OK) << hr_last_error();
            }
            EXPECT_EQ(here.image(), there.image()) << m.mode << ", shifted " << shifted;
            digest.add(there.image());
        }
}

TEST_P(Weights, BadInputs)
{
    const BadInputs<Call> all = {
        {"params is NULL", [](Call &r) { r.params.argument = nullptr; }},
        {"values is NULL", [](Call &r) { r.values.argument = nullptr; }},
        {"weights is NULL", [](Call &r) { r.argument = nullptr; }},
        {"exec is NULL", [](Call &r) { r.exec_argument = nullptr; }},
        {"weights->size is 1", [](Call &r) { r.weights.weights.size = 1; }},
        {"weights->mode is 9", [](Call &r) { r.weights.weights.mode = hr_weights_mode(9); }},
        {"residuals is NULL", [](Call &r) { r.weights.weights.residuals = nullptr; }},
        {"residuals\\[1\\] has dtype i8", [](Call &r) { r.weights.dtype[1] = HR_I8; }},
        {"values\\[1\\] has dtype bf16", [](Call &r) { r.values.dtype[1] = HR_BF16; }},
        {"values\\[3\\] has numel 256", [](Call &r) { r.values.numel[3] = 256; }},
        {"params\\[3\\] has dtype f16", [](Call &r) { r.params.dtype[3] = HR_F16; }},
        {"params\\[3\\] is NULL", [](Call &r) { r.params.data[3] = nullptr; }},
    };
    for (const bool split : {false, true})
        for (BadInput<Call> bad : all) {
            bad.message = (split ? "hr_split_weights: .*" : "hr_join_weights: .*") + bad.message;
            Call run(*backend, HR_WEIGHTS_REMAINDER16, HR_BF16);
            run.splits = split;
            expect_refused(run, bad);
        }
    for (const bool split : {false, true}) {
        Call run(cpu_backend(), HR_WEIGHTS_REMAINDER16, HR_BF16);
        run.splits = split;
        expect_no_such_device(run);
    }
}
