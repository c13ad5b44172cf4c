// What is between codes and values, exhaustively and on every instruction set: each code's value,
// and on either side of each border between two codes the numbers next to it.
#include <algorithm>
#include <cmath>

#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/harness/pool.h"

using DynamicMapCodes = OnBackend;
ON_EVERY_BACKEND(DynamicMapCodes);

namespace
{
// Runs the test on each level that there is; a GPU has but one.
template <typename Test> void on_every_level(const Backend &backend, const Test &test)
{
    if (&backend != &cpu_backend())
        return test();
    for (const hr_cpu_level l : {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512, HR_CPU_AVX512_VBMI}) {
        const CpuLevel level(l);
        if (level.available) {
            SCOPED_TRACE(l);
            test();
        }
    }
}

// The largest number not above the exact midpoint of a code and the next.
float border(const std::vector<double> &map, size_t code)
{
    const double middle = (map[code] + map[code + 1]) / 2;
    const float rounded = float(middle);
    return rounded > middle ? std::nextafter(rounded, -2.0f) : rounded;
}

// Gradients g and absmax * absmax whose squares' quotient is y, in the arithmetic of the interface;
// of pairs that are tried in turn.
bool find_quotient(float y, uint64_t seed, float *g, float *absmax)
{
    for (uint64_t attempt = 0; attempt < 1000; attempt++) {
        const float a = float(1.5 + noise(seed, attempt) / 2), square = a * a;
        const float reciprocal = 1 / square;
        const float root = float(std::sqrt(double(y) * double(square)));
        for (const float x : {root, std::nextafter(root, 0.0f), std::nextafter(root, 2.0f)}) {
            const float x2 = x * x;
            if (x2 * reciprocal == y && x <= a) {
                *g = x;
                *absmax = a;
                return true;
            }
        }
    }
    return false;
}
} // namespace

// With betas that round to 1 and no gradient, moments stay what they were decoded to; and where a
// block has one that is not zero, its absmax becomes that.
TEST_P(DynamicMapCodes, EveryCodeHasItsValue)
{
    for (const double absmax : {1.0, 0x1.8cp-40, 3.0}) {
        Adamw8bitCase c;
        c.numel = {256 * 64};
        c.block_size = 64;
        c.beta1 = c.beta2 = 1 - 0x1p-53;
        c.grads = [](size_t, size_t) { return 0.0; };
        const auto code = [](size_t i, int zero) {
            const size_t block = i / 64;
            return double(i % 64 == block * 7 % 64 ? int(block) : zero);
        };
        c.exp_avgs = [=](size_t, size_t i) { return code(i, 127); };
        c.exp_avg_sqs = [=](size_t, size_t i) { return code(i, 0); };
        c.exp_avg_absmaxs = c.exp_avg_sq_absmaxs = [=](size_t, size_t) { return absmax; };
        on_every_level(*backend, [&] {
            const Adamw8bitRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const std::vector<double> first = run.exp_avg_absmaxs.values(0);
            const std::vector<double> second = run.exp_avg_sq_absmaxs.values(0);
            for (size_t block = 0; block < 256; block++) {
                const float m = float(dynamic_map(true)[block]) * float(absmax);
                const float v = float(dynamic_map(false)[block]) * float(absmax);
                ASSERT_EQ(first[block], std::fabs(m)) << block;
                ASSERT_EQ(second[block], v) << block;
            }
        });
    }
}

// With beta1 = 0 the new moment is the gradient, and with a 1 in its block the quotient is that.
TEST_P(DynamicMapCodes, BordersOfTheSignedMap)
{
    const std::vector<double> &map = dynamic_map(true);
    std::vector<float> values;
    for (size_t code = 0; code < 255; code++) {
        const float last = border(map, code);
        for (const float y : {std::nextafter(last, -2.0f), last, std::nextafter(last, 2.0f)})
            values.push_back(y);
    }
    for (uint64_t i = 0; i < 20000; i++) // of any size above 2^-30
        values.push_back(float(std::ldexp(noise(1, i), int(15 * noise(2, i)) - 15)));
    Adamw8bitCase c;
    c.numel = {int64_t(values.size() + values.size() / 255 + 1)};
    c.beta1 = 0;
    c.grads = [&](size_t, size_t i) { return i % 256 == 0 ? 1 : double(values[i - i / 256 - 1]); };
    on_every_level(*backend, [&] {
        const Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> codes = run.exp_avgs.values(0), g = run.grads.values(0);
        std::vector<bool> reached(256);
        for (size_t i = 0; i < g.size(); i++) {
            ASSERT_EQ(codes[i], nearest(map, g[i])) << g[i];
            reached[size_t(codes[i])] = true;
        }
        EXPECT_EQ(std::count(reached.begin(), reached.end(), true), 256);
    });
}

// With beta2 = 0 the new moment is a square. A block for each quotient.
TEST_P(DynamicMapCodes, BordersOfTheUnsignedMap)
{
    const std::vector<double> &map = dynamic_map(false);
    std::vector<float> quotients, g, absmax;
    for (size_t code = 0; code < 255; code++) {
        const float last = border(map, code);
        for (const float y : {std::nextafter(last, -2.0f), last, std::nextafter(last, 2.0f)}) {
            quotients.push_back(y);
            g.push_back(0);
            absmax.push_back(0);
            ASSERT_TRUE(find_quotient(y, quotients.size(), &g.back(), &absmax.back())) << y;
        }
    }
    Adamw8bitCase c;
    c.numel = {int64_t(64 * g.size())};
    c.block_size = 64;
    c.beta2 = 0;
    c.grads = [&](size_t, size_t i) {
        const size_t block = i / 64, lane = i % 64;
        return lane == 0 ? double(absmax[block]) : lane == 1 + block % 63 ? double(g[block]) : 0.0;
    };
    on_every_level(*backend, [&] {
        const Adamw8bitRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> codes = run.exp_avg_sqs.values(0);
        std::vector<bool> reached(256);
        for (size_t block = 0; block < g.size(); block++) {
            const int wanted = std::max(1, nearest(map, quotients[block]));
            ASSERT_EQ(codes[64 * block + 1 + block % 63], wanted) << quotients[block];
            ASSERT_EQ(codes[64 * block], 255);
            ASSERT_EQ(codes[64 * block + 1 + (block + 1) % 63], 0);
            reached[size_t(wanted)] = reached[0] = true;
        }
        EXPECT_EQ(std::count(reached.begin(), reached.end(), true), 256);
    });
}
