// Where hr_unscale_norm() meets NaN and infinity: none is overlooked, wherever it is, and the first
// tensor with one is named.
#include <cmath>

#include "tests/c/grad/unscale_norm_run.h"

using UnscaleNormSpecial = OnBackend;
ON_EVERY_BACKEND(UnscaleNormSpecial);

namespace
{
const double kOrders[] = {1, 2, 3, INFINITY};
const double kValues[] = {NAN, -NAN, INFINITY, -INFINITY};

void expect_found(Backend &backend, NormCase c, size_t tensor, size_t place, double value,
                  Tensors::Value other = noise)
{
    SCOPED_TRACE(testing::Message() << value << " at " << place << " of tensor " << tensor);
    c.value = [=](size_t k, size_t i) { return k == tensor && i == place ? value : other(k, i); };
    expect_exact(backend, c);
}
} // namespace

TEST_P(UnscaleNormSpecial, AtEveryPlaceOfATensor)
{
    for (const hr_dtype type : float_types())
        for (size_t place = 0; place < 35; place++) {
            NormCase c;
            c.numel = {35};
            c.types = {type};
            c.p = kOrders[place % 4];
            c.shift = place % 2;
            expect_found(*backend, c, 0, place, kValues[place / 4 % 4]);
        }
}

// Beside values of every size, for a kernel that looks at the size of the neighbors first.
TEST_P(UnscaleNormSpecial, BesideNeighborsOfAnySize)
{
    for (const double size : {0., 1e-30, 1., 1e30})
        for (const double value : kValues)
            for (const size_t place : {0, 7, 11})
                for (const double p : {2., double(INFINITY)}) {
                    NormCase c;
                    c.numel = {16};
                    c.p = p;
                    expect_found(*backend, c, 0, place, value,
                                 [=](size_t, size_t) { return size; });
                }
}

TEST_P(UnscaleNormSpecial, AtTheEndsOfChunks)
{
    for (const size_t place : {0, 255, 16383, 16384, 16391, 16392, 40000, 40002})
        for (const double p : kOrders) {
            NormCase c;
            c.numel = {3, 40003, 2};
            c.p = p;
            c.types = {HR_BF16};
            c.write = true;
            c.grad_scale = 2.0f;
            expect_found(*backend, c, 1, place, place % 2 ? NAN : -INFINITY);
        }
}

TEST_P(UnscaleNormSpecial, TheSmallestIndexIsNamed)
{
    for (size_t first = 0; first < 40; first += 13)
        for (const double p : kOrders) {
            NormCase c;
            c.numel.assign(40, 9);
            c.numel[(first + 1) % 40] = 0;
            c.p = p;
            c.value = [=](size_t k, size_t i) {
                return k >= first && (k - first) % 7 == 0 && i == k % 9 ? k % 2 ? NAN : INFINITY
                                                                        : noise(k, i);
            };
            expect_exact(*backend, c);
        }
}

TEST_P(UnscaleNormSpecial, AmongTensorsOfSeveralLaunches)
{
    for (const size_t first : {31, 1400, 2998}) {
        NormCase c;
        for (size_t k = 0; k < 3000; k++)
            c.numel.push_back(k == first || k % 100 == 98);
        c.value = [=](size_t k, size_t) { return k >= first ? NAN : 1; };
        expect_exact(*backend, c);
    }
}

TEST_P(UnscaleNormSpecial, FromTheFactor)
{
    NormCase c;
    c.numel = {0, 17, 5};
    c.write = true;
    for (const float coef : {float(NAN), float(INFINITY)}) {
        c.clip_coef = coef;
        expect_exact(*backend, c);
    }
    c.clip_coef = 0.0f;
    expect_exact(*backend, c);
    // The factor overflows, and so does each product but that of 0, which is NaN.
    c.clip_coef = std::nullopt;
    c.grad_scale = 0x1p-140f;
    c.value = [](size_t k, size_t i) { return k == 1 && i % 2 ? 0 : 1; };
    expect_exact(*backend, c);
}

// Large and finite is not infinite, even where the norm is.
TEST_P(UnscaleNormSpecial, LargeIsNotInfinite)
{
    NormCase c;
    c.numel = {64, 64};
    c.value = [](size_t, size_t) { return 3e38; };
    c.max_norm = 1;
    for (const double p : {1., 2., 3.}) {
        c.p = p;
        const NormRun run(*backend, c);
        const ExactNorm exact(run.grads, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        expect_exact(run, exact, c);
        EXPECT_EQ(run.norm(), float(exact.norm)); // infinity but for p = 3
        EXPECT_EQ(run.culprit(), -1);
        EXPECT_GT(run.clip_coef(), 0);
    }
}

// As the header says of orders whose powers leave binary64.
TEST_P(UnscaleNormSpecial, AnOrderTooHighCountsAsInfiniteOrZero)
{
    NormCase c;
    c.numel = {4, 4};
    c.p = 9;
    c.value = [](size_t k, size_t) { return k ? 3e38 : 1e-38; };
    const NormRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.norms(), (std::vector<float>{0, INFINITY}));
    EXPECT_EQ(run.culprit(), 1);
    EXPECT_EQ(run.found_inf(), 1);
}
