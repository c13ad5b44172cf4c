// The maps against their recipe, the codes against a search of the whole map, and hr_adamw8bit()
// against the published rule in binary64.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/adamw_rule.h"
#include "tests/c/optim/step_suites.h"

// 7 decades, the i-th with 2^i codes (2^(i+1) unsigned) in the middles of equal parts of [0.1, 1],
// of either sign; and 0 and 1.
TEST(DynamicMap, FollowsItsRecipe)
{
    for (const bool is_signed : {false, true}) {
        std::vector<double> recipe = {0, 1};
        for (int i = 0; i < 7; i++) {
            const int parts = is_signed ? 1 << i : 2 << i;
            for (int j = 0; j < parts; j++) {
                const double magnitude = std::pow(10, i - 6) * (0.1 + 0.9 * (j + 0.5) / parts);
                recipe.push_back(magnitude);
                if (is_signed)
                    recipe.push_back(-magnitude);
            }
        }
        std::sort(recipe.begin(), recipe.end());
        ASSERT_EQ(recipe.size(), 256u);
        const std::vector<double> &map = dynamic_map(is_signed);
        for (size_t code = 0; code < 256; code++)
            EXPECT_NEAR(map[code], recipe[code], 2e-7 * std::fabs(recipe[code])) << code;
    }
}

// FNV-1a of the bytes that the recipe gives with torch.linspace() in binary32, as bitsandbytes
// runs it.
TEST(DynamicMap, HasBitsandbytesBits)
{
    for (const int32_t is_signed : {0, 1}) {
        float map[256];
        ASSERT_EQ(hr_dynamic_map(map, is_signed), HR_OK);
        uint8_t bytes[sizeof map];
        std::memcpy(bytes, map, sizeof map);
        uint64_t hash = 0xCBF29CE484222325u;
        for (const uint8_t byte : bytes)
            hash = (hash ^ byte) * 0x100000001B3u;
        EXPECT_EQ(hash, is_signed ? 0xD677F22A96665BC4u : 0x43811B16730A873Eu);
    }
}

using Adamw8bitValues = OnBackend;
ON_EVERY_BACKEND(Adamw8bitValues);

namespace
{
// With both betas 0 the moments are g and g * g, so that what a code stands for is known to the
// bit. Returns a case whose gradients are `values`, a block's first being 1.
Adamw8bitCase gradients_of(const std::vector<float> &values, int32_t block_size)
{
    const int64_t rest = block_size - 1, count = int64_t(values.size());
    Adamw8bitCase c;
    c.numel = {count + (count + rest - 1) / rest};
    c.block_size = block_size;
    c.beta1 = c.beta2 = 0;
    c.grads = [=](size_t, size_t i) {
        const size_t block = i / size_t(block_size);
        return i % size_t(block_size) == 0 ? 1 : double(values[i - block - 1]);
    };
    return c;
}

// Every code's value, every midpoint between two, and the numbers next to these. Their roots too,
// because a second moment is a square.
std::vector<float> where_codes_change()
{
    std::vector<float> all;
    const auto add = [&](float x) {
        for (const float y : {x, std::sqrt(std::fabs(x)), -std::sqrt(std::fabs(x))})
            for (const float near : {y, std::nextafter(y, -1.0f), std::nextafter(y, 1.0f)})
                if (std::fabs(near) <= 1)
                    all.push_back(near);
    };
    for (const bool is_signed : {false, true}) {
        const std::vector<double> &map = dynamic_map(is_signed);
        for (size_t code = 0; code < 256; code++) {
            add(float(map[code]));
            if (code > 0)
                add(float((map[code - 1] + map[code]) / 2));
        }
    }
    for (const float x : {0.0f, -0.0f, 1e-45f, -1e-45f, 1e-38f, 1e-30f, -1e-20f, 1e-10f, 1e-19f})
        all.push_back(x);
    return all;
}

// y as the interface defines it: the reciprocal has 24 bits and any exponent.
float quotient(float x, float absmax)
{
    int exponent;
    const float reciprocal = float(1 / std::frexp(absmax, &exponent));
    return float(std::ldexp(double(x) * double(reciprocal), -exponent));
}
} // namespace

TEST_P(Adamw8bitValues, CodesAreTheNearest)
{
    for (const int32_t block_size : {64, 256, 512}) {
        const Adamw8bitCase c = gradients_of(where_codes_change(), block_size);
        const Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        for (const double absmax : run.exp_avg_absmaxs.values(0))
            EXPECT_EQ(absmax, 1);
        for (const double absmax : run.exp_avg_sq_absmaxs.values(0))
            EXPECT_EQ(absmax, 1);
        const std::vector<double> g = run.grads.values(0);
        const std::vector<double> first = run.exp_avgs.values(0),
                                  second = run.exp_avg_sqs.values(0);
        for (size_t i = 0; i < g.size(); i++) {
            const float square = float(g[i]) * float(g[i]);
            ASSERT_EQ(first[i], nearest(dynamic_map(true), g[i])) << g[i];
            ASSERT_EQ(second[i], square > 0 ? std::max(1, nearest(dynamic_map(false), square)) : 0)
                << g[i];
        }
    }
}

TEST_P(Adamw8bitValues, CodesAreThoseOfTheQuotient)
{
    Adamw8bitCase c;
    c.numel = {64 * 200 + 17};
    c.block_size = 64;
    c.beta1 = c.beta2 = 0;
    // Of every size that a block can have, denormals included, but so that squares are finite.
    c.grads = [](size_t, size_t i) {
        const double block = double(i / 64) / 200, u = noise(1, i);
        return std::ldexp(std::copysign(std::exp(14 * std::fabs(u) - 14), u),
                          int(block * 212) - 149);
    };
    const Adamw8bitRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    const std::vector<double> g = run.grads.values(0), first = run.exp_avgs.values(0),
                              second = run.exp_avg_sqs.values(0),
                              first_absmax = run.exp_avg_absmaxs.values(0),
                              second_absmax = run.exp_avg_sq_absmaxs.values(0);
    for (size_t begin = 0; begin < g.size(); begin += 64) {
        const size_t end = std::min(begin + 64, g.size());
        float largest = 0, largest_square = 0;
        for (size_t i = begin; i < end; i++) {
            largest = std::max(largest, std::fabs(float(g[i])));
            largest_square = std::max(largest_square, float(g[i]) * float(g[i]));
        }
        ASSERT_EQ(first_absmax[begin / 64], largest);
        ASSERT_EQ(second_absmax[begin / 64], largest_square);
        for (size_t i = begin; i < end; i++) {
            const float square = float(g[i]) * float(g[i]);
            ASSERT_EQ(first[i], nearest(dynamic_map(true), quotient(float(g[i]), largest))) << g[i];
            const int code =
                square > 0 ? nearest(dynamic_map(false), quotient(square, largest_square)) : 0;
            ASSERT_EQ(second[i], square > 0 ? std::max(1, code) : 0) << g[i];
        }
    }
}

namespace
{
// The block's scale is the largest of the moments, and each has a code as near to it as there is,
// both to the error of binary32 at the size of the terms.
void expect_coded(const std::vector<Sum> &exact, const std::vector<double> &codes,
                  const std::vector<double> &absmaxs, size_t block_size, bool is_signed)
{
    const std::vector<double> &map = dynamic_map(is_signed);
    constexpr double unit = 0x1p-23;
    for (size_t begin = 0; begin < exact.size(); begin += block_size) {
        const size_t end = std::min(begin + block_size, exact.size());
        const double absmax = absmaxs[begin / block_size];
        double largest = 0, size = 0;
        for (size_t i = begin; i < end; i++) {
            largest = std::max(largest, std::fabs(exact[i].value));
            size = std::max(size, exact[i].size);
        }
        ASSERT_NEAR(absmax, largest, 3 * unit * size);
        for (size_t i = begin; i < end; i++) {
            const int code = int(codes[i]);
            const int floor = !is_signed && exact[i].value > 0;
            const int best = std::max(floor, nearest(map, exact[i].value / absmax));
            const double slack = 4 * unit * exact[i].size;
            ASSERT_GE(code, floor);
            ASSERT_LE(std::fabs(map[size_t(code)] * absmax - exact[i].value),
                      std::fabs(map[size_t(best)] * absmax - exact[i].value) + slack)
                << "code " << code << ", best " << best;
        }
    }
}

void expect_accurate(Backend &backend, const Adamw8bitCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Adamw8bitRun fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    StorageError error;
    for (size_t k = 0; k < c.numel.size(); k++) {
        const std::vector<double> p = fresh.params.values(k), g = fresh.grads.values(k),
                                  m = fresh.exp_avg(k), v = fresh.exp_avg_sq(k),
                                  new_p = run.params.values(k);
        const double t = double(c.step) + (c.steps ? double(k) : 0);
        EXPECT_EQ(run.grads.values(k), g);
        EXPECT_EQ(run.steps.values(k)[0], c.steps ? t : double(c.step - 1 + int64_t(k)));
        std::vector<Sum> first, second;
        for (size_t i = 0; i < p.size(); i++) {
            const hr_adamw_config &h = run.config.adamw;
            const Updated exact = adamw_rule<double>(c, h, t, p[i], g[i], m[i], v[i]);
            const Updated plain =
                adamw_rule<float>(c, h, t, float(p[i]), float(g[i]), float(m[i]), float(v[i]));
            error.add(new_p[i], plain.param.value, exact.param, run.params.dtype[k]);
            first.push_back(exact.exp_avg);
            second.push_back(exact.exp_avg_sq);
        }
        const size_t block_size = size_t(c.block_size);
        expect_coded(first, run.exp_avgs.values(k), run.exp_avg_absmaxs.values(k), block_size,
                     true);
        expect_coded(second, run.exp_avg_sqs.values(k), run.exp_avg_sq_absmaxs.values(k),
                     block_size, false);
    }
    error.expect_small("params");
}
} // namespace

TEST_P(Adamw8bitValues, EveryTypeFlagAndBlockSize)
{
    for (const int32_t block_size : {64, 128, 256, 512})
        for (int flags = 0; flags < 4; flags++) {
            Adamw8bitCase c;
            c.numel.assign(9, 65 + block_size);
            c.param = float_types();
            c.grad = {HR_F32, HR_F32, HR_F32, HR_BF16, HR_BF16, HR_BF16, HR_F16, HR_F16, HR_F16};
            c.block_size = block_size;
            c.decoupled = flags & 1;
            c.maximize = flags & 2;
            expect_accurate(*backend, c);
        }
}

TEST_P(Adamw8bitValues, EveryWayToGiveStepAndScalars)
{
    Adamw8bitCase c;
    c.numel = {9, 333, 0, 17};
    for_every_way_to_give_scalars(
        c, [&](const Adamw8bitCase &each) { expect_accurate(*backend, each); });
}

TEST_P(Adamw8bitValues, FirstAndLateSteps)
{
    Adamw8bitCase c;
    for_steps(c, {1, 2, 10, 1000, 1000000, 1 << 24},
              [&](const Adamw8bitCase &each) { expect_accurate(*backend, each); });
}

// The step from zeros, with codes that say anything, as the interface allows.
TEST_P(Adamw8bitValues, TheFirstStepIsAdamws)
{
    Adamw8bitCase c;
    c.step = 1;
    c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = [](size_t, size_t) { return 0.0; };
    expect_accurate(*backend, c);
}
