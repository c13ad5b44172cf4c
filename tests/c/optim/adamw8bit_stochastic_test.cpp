// Stochastic rounding of hr_adamw8bit(): a value between two codes gets either, the upper one as
// often as it should, and the choice depends on seed, step and element alone. What is counted is
// compared with a normal distribution at 6 standard deviations: each comparison is false by chance
// once in 5 * 10^8 choices of the seeds, which are fixed.
#include <cmath>

#include "tests/c/optim/adamw8bit_run.h"

using Adamw8bitStochastic = OnBackend;
ON_EVERY_BACKEND(Adamw8bitStochastic);

namespace
{
constexpr int64_t kNumel = 1 << 15;

// Moments g and g * g with g = `value`, but 1 at the start of every block, the block's scale.
Adamw8bitCase all_equal(float value)
{
    Adamw8bitCase c;
    c.numel = {kNumel};
    c.beta1 = c.beta2 = 0;
    c.stochastic = true;
    c.grads = [=](size_t, size_t i) { return i % 256 == 0 ? 1 : double(value); };
    return c;
}

struct Choice {
    int lower;     // code
    double chance; // of the next one
};

Choice choice_of(bool is_signed, double y)
{
    const std::vector<double> &map = dynamic_map(is_signed);
    int lower = 0;
    while (lower < 254 && map[size_t(lower) + 1] <= y)
        lower++;
    const double a = map[size_t(lower)], b = map[size_t(lower) + 1];
    return {lower, (y - a) / (b - a)};
}

void expect_about(double count, double trials, double chance)
{
    const double deviation = std::sqrt(trials * chance * (1 - chance));
    EXPECT_LE(std::fabs(count - trials * chance), 6 * deviation + 1e-9 * trials)
        << count << " of " << trials << ", wanted a fraction of " << chance;
}

// 1 where the upper code was chosen, without the first of each block.
std::vector<int> uppers(const Tensors &codes, Choice choice)
{
    const std::vector<double> all = codes.values(0);
    std::vector<int> up;
    for (size_t i = 0; i < all.size(); i++) {
        if (i % 256 == 0)
            continue;
        const int above = int(all[i]) - choice.lower;
        EXPECT_TRUE(above == 0 || above == 1) << above;
        up.push_back(above);
    }
    return up;
}

double sum(const std::vector<int> &values)
{
    double total = 0;
    for (const int value : values)
        total += value;
    return total;
}
} // namespace

TEST_P(Adamw8bitStochastic, IsUnbiased)
{
    for (const float value :
         {0.3f, 0.7071f, 0.0451f, 0.00123f, 1.9e-4f, -0.31f, -0.9f, -2e-6f, -0.00456f, 0.995f})
        for (const int64_t step : {1, 77}) {
            SCOPED_TRACE(value);
            Adamw8bitCase c = all_equal(value);
            c.step = step;
            const Adamw8bitRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const Choice first = choice_of(true, value), second = choice_of(false, value * value);
            const std::vector<int> up1 = uppers(run.exp_avgs, first);
            const std::vector<int> up2 = uppers(run.exp_avg_sqs, second);
            const double n = double(up1.size());
            expect_about(sum(up1), n, first.chance);
            // Below the lowest code above zero there is no choice: a positive one is never zero.
            if (second.lower == 0) {
                EXPECT_EQ(sum(up2), n);
                continue;
            }
            expect_about(sum(up2), n, second.chance);
            // The two choices of an element know nothing of each other, nor do neighbors'.
            double both = 0, neighbors = 0;
            for (size_t i = 0; i < up1.size(); i++) {
                both += up1[i] && up2[i];
                neighbors += i > 0 && up1[i] && up1[i - 1];
            }
            expect_about(both, n, first.chance * second.chance);
            expect_about(neighbors / 2, n / 2, first.chance * first.chance);
        }
}

TEST_P(Adamw8bitStochastic, ValuesOfCodesStay)
{
    Adamw8bitCase c = all_equal(0);
    c.numel = {1 << 17}; // of every code 512, whatever is drawn for it
    c.grads = [](size_t, size_t i) { return i % 256 == 0 ? 1 : dynamic_map(true)[i % 256]; };
    const Adamw8bitRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    const std::vector<double> codes = run.exp_avgs.values(0);
    for (size_t i = 0; i < codes.size(); i++)
        ASSERT_EQ(codes[i], double(i % 256 == 0 ? 255 : i % 256)) << i;
}

TEST_P(Adamw8bitStochastic, BelowTheLowestCodeThereIsNoChoice)
{
    const Adamw8bitRun run(*backend, all_equal(-1)); // the signed map ends at -0.993
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    for (size_t i = 1; i < 256; i++)
        ASSERT_EQ(run.exp_avgs.values(0)[i], 0);
}

TEST_P(Adamw8bitStochastic, DependsOnSeedAndStep)
{
    const auto codes = [&](uint64_t seed, int64_t step, std::optional<hr_dtype> counter) {
        Adamw8bitCase c = all_equal(0.3f);
        c.step = step;
        c.steps = counter;
        Adamw8bitRun run(*backend, c);
        run.seeds[0] = seed;
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        return uppers(run.exp_avgs, choice_of(true, 0.3f));
    };
    const double chance = choice_of(true, 0.3f).chance;
    const std::vector<int> first = codes(1, 5, std::nullopt);
    EXPECT_EQ(codes(1, 5, std::nullopt), first);
    EXPECT_EQ(codes(1, 5, HR_F64), first);
    const struct {
        uint64_t seed;
        int64_t step;
    } others[] = {{2, 5}, {uint64_t(1) << 32 | 1, 5}, {1, 6}, {1, (int64_t(1) << 32) + 5}};
    for (const auto &other : others) {
        const std::vector<int> second = codes(other.seed, other.step, std::nullopt);
        double differ = 0;
        for (size_t i = 0; i < first.size(); i++)
            differ += first[i] != second[i];
        expect_about(differ, double(first.size()), 2 * chance * (1 - chance));
    }
}

// A tensor's choices are its seed's, wherever it stands in the list.
TEST_P(Adamw8bitStochastic, SeedsBelongToTensors)
{
    Adamw8bitCase c = all_equal(0.3f);
    c.numel = {5, 512, 0, 512};
    Adamw8bitRun run(*backend, c);
    run.seeds = {1, 2, 3, 2};
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.exp_avgs.values(1), run.exp_avgs.values(3));
    run.seeds[3] = 4;
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_NE(run.exp_avgs.values(1), run.exp_avgs.values(3));
}
