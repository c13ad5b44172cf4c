// What hr_unscale_norm() measures and writes, against the definition in long double.
#include <cmath>
#include <limits>

#include "tests/c/grad/unscale_norm_run.h"

using UnscaleNormAccuracy = OnBackend;
ON_EVERY_BACKEND(UnscaleNormAccuracy);

namespace
{
const double kOrders[] = {1, 2, 3, 0.5, INFINITY};
}

TEST_P(UnscaleNormAccuracy, EveryOrderTypeAndSize)
{
    for (const double p : kOrders)
        for (const hr_dtype type : float_types())
            for (const int64_t n : {0, 1, 3, 31, 32, 33, 255, 256, 257, 2049}) {
                NormCase c;
                c.numel = {n};
                c.types = {type};
                c.p = p;
                c.max_norm = 3;
                expect_exact(*backend, c);
            }
}

TEST_P(UnscaleNormAccuracy, AroundAChunkAndLarger)
{
    for (const double p : {1., 2., double(INFINITY)})
        for (const bool write : {false, true})
            for (const size_t shift : {0, 1}) {
                NormCase c;
                c.numel = {16383, 16384, 16385, 100003};
                c.types = float_types();
                c.p = p;
                c.write = write;
                c.shift = shift;
                c.grad_scale = 3.0f;
                expect_exact(*backend, c);
            }
}

TEST_P(UnscaleNormAccuracy, MixedTypesAndFactors)
{
    for (const double p : kOrders)
        for (int scalars = 0; scalars < 8; scalars++)
            for (size_t shift = 0; shift < 8; shift += 3) {
                NormCase c;
                c.numel = {9, 33, 0, 17, 300, 8, 64};
                c.types = float_types();
                c.p = p;
                c.write = scalars & 4;
                c.shift = shift;
                if (scalars & 1)
                    c.grad_scale = 1024.0f / 3;
                if (scalars & 2)
                    c.clip_coef = 0.3f;
                expect_exact(*backend, c);
            }
}

TEST_P(UnscaleNormAccuracy, EveryAddress)
{
    for (const hr_dtype type : float_types())
        for (size_t shift = 0; shift < 9; shift++) {
            NormCase c;
            c.numel = {2063, 7};
            c.types = {type};
            c.shift = shift;
            c.write = true;
            c.clip_coef = 0.7f;
            expect_exact(*backend, c);
        }
}

// Squares around the places where binary32 overflows, loses precision or underflows, and where the
// kernels change over from one precision to the other.
TEST_P(UnscaleNormAccuracy, NearTheLimitsOfBinary32)
{
    const double largest = std::numeric_limits<float>::max(), least = 0x1p-149;
    const std::vector<std::vector<double>> rows = {
        {largest},
        {largest, least},
        {-largest, largest}, // the norm is stored as infinity
        {least},
        {least, -least, least, least},
        {1e-40, 3e-41, 1e-42},
        {0x1p-126, 0x1p-127},
        {1e38, 1e38, 1e38},
        {0x1p60, 0x1p59, 1},
        {std::nextafterf(0x1p60f, 0), 0x1p30},
        {std::nextafterf(0x1p60f, INFINITY), 0x1p30},
        {0x1p-40, 0x1p-41},
        {std::nextafterf(0x1p-40f, 0), 0x1p-41},
        {std::nextafterf(0x1p-40f, 1), 0x1p-41},
        {0x1.b3p-67, 0x1.7p-69},
        {0x1p64, 0x1p-64, 0},
        {-largest},
        {-largest, -least},
        {-least},
        {-1e38, -1e38, -1e38},
        {-0x1p60, -0x1p59, -1},
        {-0x1p90},
        {-0x1p-41, -0x1p-42},
        {-0x1p-80},
        {0, -0.0},
        {1, 0x1p-12, 0x1p-13, 0x1p-24, 0x1p-75, 0x1p-149},
    };
    for (const auto &row : rows)
        for (const double p : {1., 2., 3., double(INFINITY)})
            for (const int64_t n : {1, 8, 16, 300}) {
                NormCase c;
                c.numel = {n, 0, n};
                c.p = p;
                c.max_norm = 1e-3;
                c.value = [&row](size_t k, size_t i) { return row[(i + k) % row.size()]; };
                expect_exact(*backend, c);
            }
}

TEST_P(UnscaleNormAccuracy, AFactorThatBringsValuesToTheLimits)
{
    for (const float scale : {0x1p-100f, 0x1p100f, 0x1p126f})
        for (const hr_dtype type : float_types()) {
            NormCase c;
            c.numel = {33, 257};
            c.types = {type};
            c.grad_scale = scale;
            c.write = type != HR_F16; // a binary16 overflows here; that is the next test
            expect_exact(*backend, c);
        }
}

TEST_P(UnscaleNormAccuracy, MeasuresBeforeRoundingToTheType)
{
    NormCase c;
    c.types = {HR_F16};
    c.numel = {16};
    c.value = [](size_t, size_t) { return 60000; };
    c.clip_coef = 2.0f;
    c.write = true;
    const NormRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_LE(ulps(run.norm(), 4 * 120000), 2.5);
    EXPECT_EQ(run.found_inf(), NormRun::kFoundBefore);
    EXPECT_EQ(run.grads.values(0), std::vector<double>(16, INFINITY));
}

TEST_P(UnscaleNormAccuracy, AFactorOfOneWritesNothing)
{
    NormCase c;
    c.types = float_types();
    c.numel = {40, 40, 40};
    c.value = [](size_t, size_t i) { return i ? noise(1, i) : NAN; };
    c.grad_scale = c.clip_coef = 0.5f;
    c.write = true;
    for (const std::optional<unsigned> outputs :
         {std::optional<unsigned>(EVERYTHING), std::optional<unsigned>()}) {
        c.outputs = outputs;
        const NormRun run(*backend, c);
        const std::vector<uint8_t> before = run.gradients();
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(run.gradients(), before);
    }
}

// The sum has to be many more bits wide than what is added.
TEST_P(UnscaleNormAccuracy, ManyEqualElements)
{
    // The emulator takes a while.
    const int64_t n = backend->sees_overruns() ? 1000003 : 30000001;
    std::vector<uint8_t> value(4), bytes(size_t(n) * 4);
    encode(0.1, value.data(), HR_F32);
    for (size_t i = 0; i < bytes.size(); i++)
        bytes[i] = value[i % 4];
    const Buffer buffer(*backend, bytes);
    NormCase c;
    for (const double p : {1., 2.}) {
        c.p = p;
        NormRun run(*backend, c);
        void *const data[] = {buffer.data()};
        const hr_dtype type = HR_F32;
        const hr_tensor_list list = {1, data, &n, &type};
        size_t bytes_wanted = 0;
        ASSERT_EQ(hr_unscale_norm_workspace(&bytes_wanted, &list), HR_OK);
        const Buffer workspace(*backend, std::vector<uint8_t>(bytes_wanted));
        run.grads.argument = &list;
        run.workspace = workspace.data();
        run.workspace_bytes = bytes_wanted;
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const long double exact =
            (long double)decode(value.data(), HR_F32) * (p == 1 ? n : std::sqrt((long double)n));
        EXPECT_LE(ulps(run.norm(), exact), p == 2 && run.exec.device != HR_CPU ? 2.5 : 0.501);
    }
}

// Eight values whose roundings in binary32 all go the same way: the worst that neighbors can do
// to a sum of squares.
TEST_P(UnscaleNormAccuracy, RoundingsThatAllGoTheSameWay)
{
    for (int place = 0; place < 8; place++)
        for (const int64_t groups : {1, 3, 1023, 4091, 4093})
            for (const double small : {0x1p-12, 0x1p-12 - 0x1p-36, 0x1.6ap-13}) {
                NormCase c;
                c.numel = {groups * 8};
                c.value = [=](size_t, size_t i) {
                    return int(i % 8) == place ? 1 + 0x1p-12 : small;
                };
                expect_exact(*backend, c);
            }
}
