// Zeros, denormals, tiny second moments, NaN and infinity in hr_adamw8bit(): what a block does with
// them, and that no other block notices.
#include <algorithm>
#include <cmath>
#include <random>

#include "tests/c/optim/adamw8bit_run.h"

using Adamw8bitSpecial = OnBackend;
ON_EVERY_BACKEND(Adamw8bitSpecial);

namespace
{
constexpr double kZero[2] = {0, 127}; // the codes of zero: unsigned, signed

double zero(size_t, size_t)
{
    return 0;
}

bool all_equal(const std::vector<double> &values, double wanted)
{
    return std::all_of(values.begin(), values.end(), [=](double x) { return x == wanted; });
}
} // namespace

TEST_P(Adamw8bitSpecial, ABlockOfZerosStaysZero)
{
    for (const bool stochastic : {false, true})
        for (const float sign : {1.0f, -1.0f}) {
            Adamw8bitCase c;
            c.numel = {700};
            c.stochastic = stochastic;
            c.grads = [=](size_t, size_t) { return double(0 * sign); };
            c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = zero; // whatever the codes say
            const Adamw8bitRun fresh(*backend, c), run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_TRUE(all_equal(run.exp_avg_absmaxs.values(0), 0));
            EXPECT_TRUE(all_equal(run.exp_avg_sq_absmaxs.values(0), 0));
            EXPECT_TRUE(all_equal(run.exp_avgs.values(0), kZero[1]));
            EXPECT_TRUE(all_equal(run.exp_avg_sqs.values(0), kZero[0]));
            // Nothing but the weight decay.
            const float keep = float(1 - c.lr * c.weight_decay);
            for (size_t i = 0; i < 700; i++)
                ASSERT_EQ(run.params.values(0)[i], keep * float(fresh.params.values(0)[i]));
        }
}

TEST_P(Adamw8bitSpecial, ZerosAmongOthersStayZero)
{
    for (const bool stochastic : {false, true}) {
        Adamw8bitCase c;
        c.stochastic = stochastic;
        c.exp_avgs = [](size_t, size_t) { return kZero[1]; };
        c.exp_avg_sqs = zero;
        c.grads = [](size_t, size_t i) { return i % 3 == 0 ? 0.0 : i % 3 == 1 ? -0.0 : 1.5; };
        const Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        for (size_t i = 0; i < 600; i++) {
            ASSERT_EQ(run.exp_avgs.values(0)[i], i % 3 == 2 ? 255 : kZero[1]) << i;
            ASSERT_EQ(run.exp_avg_sqs.values(0)[i], i % 3 == 2 ? 255 : kZero[0]) << i;
        }
    }
}

// The floor of the second moment, to the smallest number that there is.
TEST_P(Adamw8bitSpecial, APositiveSecondMomentNeverGetsTheCodeOfZero)
{
    for (const bool stochastic : {false, true}) {
        Adamw8bitCase c;
        c.numel = {256 * 8};
        c.beta2 = 0; // the second moment is the gradient's square
        c.stochastic = stochastic;
        c.grads = [](size_t, size_t i) {
            return i % 256 == 0 ? 1e4 : std::pow(10.0, 4 - double(i % 256) / 9);
        };
        const Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> g = run.grads.values(0), codes = run.exp_avg_sqs.values(0);
        int zeros = 0, ones = 0;
        for (size_t i = 0; i < g.size(); i++) {
            const bool positive = float(g[i]) * float(g[i]) > 0;
            ASSERT_EQ(codes[i] >= 1, positive) << g[i];
            zeros += !positive;
            ones += codes[i] == 1;
        }
        EXPECT_GT(zeros, 10); // the data has both
        EXPECT_GT(ones, 100);
    }
}

// Gradients that differ by orders of magnitude within a block: the update of binary32 Adam is about
// lr at most, and so is ours; the plain map without the floor exceeds that by far.
TEST_P(Adamw8bitSpecial, UpdatesStayBounded)
{
    const auto largest_update = [&](bool bnb_exact) {
        Adamw8bitCase c;
        c.numel = {256};
        c.bnb_exact = bnb_exact;
        c.weight_decay = 0;
        c.lr = 1;
        c.params = c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = zero;
        c.grads = zero;
        Adamw8bitRun run(*backend, c);
        std::mt19937 random(5); // its bits are the same everywhere, unlike those of distributions
        const auto normal = [&] {
            double sum = -6;
            for (int i = 0; i < 12; i++)
                sum += random() * 0x1p-32;
            return sum;
        };
        std::vector<double> scale(256), grad(256), previous(256);
        for (double &s : scale)
            s = 1e-3 * std::exp(2 * normal());
        double largest = 0;
        for (int step = 1; step <= 200; step++) {
            for (size_t i = 0; i < 256; i++)
                grad[i] = scale[i] * normal();
            run.grads.put(0, grad);
            run.config.adamw.step.t = step;
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> now = run.params.values(0);
            for (size_t i = 0; step > 20 && i < 256; i++)
                largest = std::max(largest, std::fabs(now[i] - previous[i]));
            previous = now;
        }
        return largest;
    };
    EXPECT_LT(largest_update(false), 2.5);
    EXPECT_GT(largest_update(true), 50);
}

TEST_P(Adamw8bitSpecial, NonfiniteValuesSpoilTheirBlockAlone)
{
    for (const bool stochastic : {false, true})
        for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
            Adamw8bitCase c;
            c.numel = {1024};
            c.stochastic = stochastic;
            const Adamw8bitRun clean(*backend, c);
            c.grads = [&](size_t k, size_t i) { return i == 300 ? bad : clean.grads.values(k)[i]; };
            Adamw8bitRun run(*backend, c);
            c.grads = nullptr;
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const auto without_block = [](std::vector<double> values, size_t each) {
                values.erase(values.begin() + long(256 / each), values.begin() + long(512 / each));
                return values;
            };
            const auto expect_others_equal = [&](const Tensors &a, const Tensors &b, size_t each) {
                EXPECT_EQ(without_block(a.values(0), each), without_block(b.values(0), each));
            };
            expect_others_equal(run.params, clean.params, 1);
            expect_others_equal(run.exp_avgs, clean.exp_avgs, 1);
            expect_others_equal(run.exp_avg_sqs, clean.exp_avg_sqs, 1);
            expect_others_equal(run.exp_avg_absmaxs, clean.exp_avg_absmaxs, 256);
            expect_others_equal(run.exp_avg_sq_absmaxs, clean.exp_avg_sq_absmaxs, 256);
            // In the block, only the parameter of that gradient is hit, but all moments are.
            for (size_t i = 256; i < 512; i++)
                ASSERT_EQ(std::isnan(run.params.values(0)[i]), i == 300) << i;
            EXPECT_FALSE(std::isfinite(run.exp_avg_absmaxs.values(0)[1]));
            EXPECT_FALSE(std::isfinite(run.exp_avg_sq_absmaxs.values(0)[1]));
            for (size_t i = 256; i < 512; i++)
                ASSERT_TRUE(!std::isfinite(run.exp_avg(0)[i])) << i;
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            for (size_t i = 256; i < 512; i++)
                ASSERT_TRUE(std::isnan(run.params.values(0)[i])) << i;
            EXPECT_TRUE(std::isnan(run.exp_avg_absmaxs.values(0)[1]));
            EXPECT_TRUE(std::isnan(run.exp_avg_sq_absmaxs.values(0)[1]));
        }
}

// The others come out as if the gradient had been one that changes neither the block's scale nor
// them, and its own parameter and moments stay.
TEST_P(Adamw8bitSpecial, SkipNonfiniteLeavesElementsOut)
{
    for (const bool stochastic : {false, true})
        for (const double bad : {double(NAN), double(INFINITY), -double(INFINITY)}) {
            Adamw8bitCase c;
            c.numel = {700};
            c.stochastic = stochastic;
            c.skip_nonfinite = true;
            const Adamw8bitRun clean(*backend, c);
            const std::vector<double> grads = clean.grads.values(0);
            const auto skipped = [](size_t i) { return i % 5 == 1; };
            c.grads = [&](size_t, size_t i) { return skipped(i) ? bad : grads[i]; };
            const Adamw8bitRun before(*backend, c), run(*backend, c);
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> m = before.exp_avg(0), v = before.exp_avg_sq(0);
            for (size_t i = 0; i < 700; i++) {
                const Adamw8bitRun &source = skipped(i) ? before : clean;
                ASSERT_EQ(run.params.values(0)[i], source.params.values(0)[i]) << i;
                if (!skipped(i) || stochastic)
                    continue;
                // Coded anew, with the block's new scale.
                const double first = run.exp_avg_absmaxs.values(0)[i / 256],
                             second = run.exp_avg_sq_absmaxs.values(0)[i / 256];
                const auto error = [](double got, double x, double absmax, bool is_signed) {
                    const std::vector<double> &map = dynamic_map(is_signed);
                    const double best = map[size_t(nearest(map, x / absmax))] * absmax;
                    return std::fabs(got - x) - std::fabs(best - x);
                };
                ASSERT_LE(error(run.exp_avg(0)[i], m[i], first, true), 1e-6 * std::fabs(m[i]));
                if (run.exp_avg_sqs.values(0)[i] != 1) {
                    ASSERT_LE(error(run.exp_avg_sq(0)[i], v[i], second, false), 1e-6 * v[i]);
                }
                ASSERT_EQ(run.exp_avg_sq(0)[i] > 0, v[i] > 0);
            }
        }
}

TEST_P(Adamw8bitSpecial, SkipNonfiniteChangesNothingElse)
{
    Adamw8bitCase c;
    c.skip_nonfinite = true;
    const Adamw8bitRun with(*backend, c);
    c.skip_nonfinite = false;
    const Adamw8bitRun without(*backend, c);
    ASSERT_EQ(with.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(without.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(with.image(), without.image());
}

TEST_P(Adamw8bitSpecial, DenormalScalesAreKept)
{
    for (const double size : {1e-45, 1e-42, 1e-40, 1e-38, 1.2e-38, 3e-38}) {
        Adamw8bitCase c;
        c.beta1 = c.beta2 = 0;
        c.numel = {256};
        c.grads = [=](size_t, size_t i) { return i == 7 ? size : i % 2 ? -size / 2 : 0.0; };
        c.params = zero;
        Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(run.exp_avg_absmaxs.values(0)[0], double(float(size)));
        // Within the map's coarsest step, and exact at the scale itself.
        const std::vector<double> m = run.exp_avg(0), g = run.grads.values(0);
        EXPECT_EQ(m[7], g[7]);
        for (size_t i = 0; i < 256; i++)
            ASSERT_NEAR(m[i], g[i], 0.01 * size) << i;
    }
}
