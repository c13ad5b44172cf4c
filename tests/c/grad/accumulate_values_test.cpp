// hr_accumulate() against its formula, step by step, to the bit; and the compensated sum of many
// gradients against binary64.
#include <cmath>
#include <limits>

#include "tests/c/grad/accumulate_run.h"

using AccumulateValues = OnBackend;
ON_EVERY_BACKEND(AccumulateValues);

namespace
{
// One operation of binary32: two operands of 24 bits leave binary64 room enough that rounding twice
// is rounding once.
float rounded(double x)
{
    return float(x);
}

float minus(float a, float b)
{
    return rounded(double(a) - double(b));
}

// The element of a sum, its compensation and the gradient, before and then after.
struct Element {
    float sum, lost, grad;

    void add(const AccumulateCase &c)
    {
        const float factor =
            c.factor_on_device ? *c.factor_on_device : rounded(c.factor.value_or(1));
        const float x = rounded(double(grad) * double(factor));
        if (c.compensated) {
            const float y = minus(x, lost), t = rounded(double(sum) + double(y));
            lost = minus(minus(t, sum), y);
            sum = t;
        } else {
            sum = rounded(double(sum) + double(x));
        }
        if (c.zero_grads)
            grad = 0;
    }
};

testing::AssertionResult same(float got, float wanted)
{
    if ((std::isnan(got) && std::isnan(wanted)) ||
        (got == wanted && std::signbit(got) == std::signbit(wanted)))
        return testing::AssertionSuccess();
    return testing::AssertionFailure() << got << ", wanted " << wanted;
}

void expect_formula(Backend &backend, const AccumulateCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const AccumulateRun run(backend, c);
    std::vector<std::vector<Element>> wanted;
    for (size_t k = 0; k < c.numel.size(); k++) {
        const auto sum = run.sums.values(k), grad = run.grads.values(k);
        const auto lost = c.compensated ? run.losts.values(k) : sum;
        wanted.emplace_back();
        for (size_t i = 0; i < sum.size(); i++)
            wanted[k].push_back({float(sum[i]), float(lost[i]), float(grad[i])});
    }
    for (int call = 0; call < 2; call++) {
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        for (size_t k = 0; k < c.numel.size(); k++) {
            const auto sum = run.sums.values(k), grad = run.grads.values(k);
            const auto lost = c.compensated ? run.losts.values(k) : sum;
            for (size_t i = 0; i < sum.size(); i++) {
                Element &element = wanted[k][i];
                element.add(c);
                ASSERT_TRUE(same(float(sum[i]), element.sum)) << k << " " << i;
                ASSERT_TRUE(same(float(grad[i]), element.grad)) << k << " " << i;
                ASSERT_TRUE(!c.compensated || same(float(lost[i]), element.lost)) << k << " " << i;
            }
        }
    }
    EXPECT_TRUE(run.whole());
}
} // namespace

TEST_P(AccumulateValues, EveryTypeFlagAndFactor)
{
    for (int flags = 0; flags < 8; flags++)
        for (int factor = 0; factor < 3; factor++)
            for (size_t shift = 0; shift < 3; shift++) {
                AccumulateCase c;
                c.numel = {1, 3, 31, 32, 33, 0, 255, 256, 257};
                c.types = {float_types()[shift], HR_BF16, HR_F32, HR_F16};
                c.compensated = flags & 1;
                c.zero_grads = flags & 2;
                c.special = flags & 4;
                c.shift = shift;
                if (factor == 1)
                    c.factor = 1.0 / 3;
                if (factor == 2)
                    c.factor_on_device = -0.1f;
                expect_formula(*backend, c);
            }
}

TEST_P(AccumulateValues, EveryAddress)
{
    for (const hr_dtype type : float_types())
        for (size_t shift = 0; shift < 9; shift++)
            for (const bool compensated : {false, true}) {
                AccumulateCase c;
                c.numel = {2063, 7};
                c.types = {type};
                c.shift = shift;
                c.compensated = c.zero_grads = compensated;
                expect_formula(*backend, c);
            }
}

TEST_P(AccumulateValues, AroundAChunkAndLarger)
{
    for (const bool compensated : {false, true}) {
        AccumulateCase c;
        c.numel = {16383, 16384, 16385, 100003};
        c.types = float_types();
        c.compensated = compensated;
        c.zero_grads = true;
        expect_formula(*backend, c);
    }
}

TEST_P(AccumulateValues, FactorsAreRoundedToBinary32)
{
    for (const double factor : {0.1, 0.0, -1.0, 1e-45, 3e38, 1 + 0x1p-30}) {
        AccumulateCase c;
        c.numel = {40};
        c.types = {HR_BF16};
        c.factor = factor;
        expect_formula(*backend, c);
    }
}

TEST_P(AccumulateValues, ListsOfManyTensors)
{
    // One launch holds about 800.
    for (const int64_t count : {0, 1, 900, 1500, 3000})
        for (int shape = 0; shape < 3; shape++) {
            AccumulateCase c;
            c.types = float_types();
            c.compensated = shape == 1;
            for (int64_t k = 0; k < count; k++)
                c.numel.push_back(shape == 0   ? k * 7 % 11 < 3 ? k % 37 : 0
                                  : shape == 1 ? k == 0 || k + 1 == count ? 20000 : 0
                                               : 0);
            expect_formula(*backend, c);
        }
}

TEST_P(AccumulateValues, EmptyTensorsAnywhere)
{
    for (int empty = 0; empty < 16; empty++) {
        AccumulateCase c;
        c.numel = {5, 300, 16385, 9};
        for (size_t k = 0; k < 4; k++)
            if (empty >> k & 1)
                c.numel[k] = 0;
        c.zero_grads = true;
        expect_formula(*backend, c);
    }
}

TEST_P(AccumulateValues, AnEmptyTensorMayBeNullAndAnEmptyListNeedsNoArrays)
{
    AccumulateCase c;
    c.numel = {4, 0, 4};
    c.compensated = true;
    AccumulateRun run(*backend, c);
    for (Tensors *list : {&run.sums, &run.losts, &run.grads})
        list->data[1] = nullptr;
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    for (Tensors *list : {&run.sums, &run.losts, &run.grads})
        list->list = {0, nullptr, nullptr, nullptr};
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

// Gradients whose plain sum loses bits with every addition.
TEST_P(AccumulateValues, CompensationKeepsWhatAPlainSumLoses)
{
    constexpr int kCalls = 1000;
    constexpr double kRounding = 0x1p-24;
    AccumulateCase c;
    c.numel = {33};
    c.types = {HR_BF16};
    c.factor = 0.1;
    double worst_plain = 0, worst_compensated = 0;
    for (const bool compensated : {false, true}) {
        c.compensated = compensated;
        const AccumulateRun run(*backend, c);
        const auto begin = run.sums.values(0), grad = run.grads.values(0);
        const auto lost = compensated ? run.losts.values(0) : std::vector<double>(33);
        for (int call = 0; call < kCalls; call++)
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const auto end = run.sums.values(0);
        for (size_t i = 0; i < 33; i++) {
            const double x = rounded(grad[i] * double(0.1f)); // as the header's x
            const double exact = begin[i] - lost[i] + kCalls * x;
            const double size = std::fabs(begin[i]) + std::fabs(lost[i]) + kCalls * std::fabs(x);
            const double error = std::fabs(end[i] - exact) / (kRounding * size);
            double &worst = compensated ? worst_compensated : worst_plain;
            worst = std::max(worst, error);
        }
    }
    EXPECT_LE(worst_compensated, 2);
    EXPECT_GT(worst_plain, 20);
}
