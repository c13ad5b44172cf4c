// Blocks of codes: against a search of the map in binary64, against the codes that a step of 8-bit Adam
// stores, and between the CPU's instruction sets and CUDA.
#include <cmath>

#include "tests/c/harness/suites.h"
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/quant/quantize_blocks_run.h"

using QuantizeBlocks = OnBackend;
ON_EVERY_BACKEND(QuantizeBlocks);

namespace
{

// Numbers of many sizes, and zeros; no two magnitudes of a block alike.
double sizes(size_t k, size_t i)
{
    const double x = noise(k, i);
    return i % 11 == 3 ? 0.0 : std::ldexp(x, -int(i * 7 % 25));
}

double special(size_t k, size_t i)
{
    constexpr double kSpecial[] = {NAN,   INFINITY, -INFINITY, 1e-40, -3e-41, 3e38,
                                   -3e38, 1e-30,    0,         -0.0,  7e-6,   -1e-38};
    if (i / 64 % 3 == 0) // a block of what is finite, or zeros
        return i / 64 % 2 ? noise(k, i) * 1e-39 : 0.0;
    return noise(k + 7, i) < -0.5 ? kSpecial[i * 5 % 12] : noise(k, i);
}

std::vector<QuantizeCase> cases()
{
    std::vector<QuantizeCase> all;
    for (const bool is_signed : {true, false})
        for (const int32_t size : {64, 256, 1024, 4096})
            for (const size_t shift : {0, 1}) {
                QuantizeCase c;
                c.numel = {1, 64, 0, 300, 4096, 20000};
                c.types = float_types();
                c.is_signed = is_signed;
                c.block_size = size;
                c.shift = shift;
                c.value = sizes;
                all.push_back(c);
            }
    return all;
}

} // namespace

TEST_P(QuantizeBlocks, NearestCodesAndLargestMagnitudes)
{
    for (const QuantizeCase &c : cases()) {
        const QuantizeRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        const std::vector<double> &map = dynamic_map(c.is_signed);
        for (size_t k = 0; k < c.numel.size(); k++) {
            const std::vector<double> values = run.values.values(k), codes = run.codes.values(k);
            const std::vector<double> absmaxs = run.absmaxs.values(k);
            for (size_t b = 0; b < absmaxs.size(); b++) {
                const size_t begin = b * size_t(c.block_size);
                const size_t end = std::min(values.size(), begin + size_t(c.block_size));
                double largest = 0;
                for (size_t i = begin; i < end; i++)
                    largest = std::max(largest, std::fabs(values[i]));
                ASSERT_EQ(absmaxs[b], largest);
                for (size_t i = begin; i < end; i++) {
                    const float y = float(values[i]) * (1.0f / float(largest));
                    int code = largest == 0 ? (c.is_signed ? 127 : 0) : nearest(map, double(y));
                    if (!c.is_signed && values[i] > 0 && code == 0)
                        code = 1;
                    ASSERT_EQ(codes[i], code) << values[i] << " of " << largest;
                }
            }
        }
    }
}

// On either side of every place where a kernel's table could change the answer: numbers with up to 8
// bits of mantissa, and the midpoints between codes. Blocks begin with 1, so the numbers are their
// own quotients.
TEST_P(QuantizeBlocks, EveryCellAndEveryBorder)
{
    std::vector<float> edges = {0.0f, 0x1p-149f, 0x1p-126f, 1.0f};
    for (int i = 256; i < 512; i++)
        for (int exponent = -40; exponent < -8; exponent++)
            edges.push_back(std::ldexp(float(i), exponent));
    for (const bool is_signed : {true, false})
        for (size_t code = 0; code < 255; code++)
            edges.push_back(std::fabs(
                float((dynamic_map(is_signed)[code] + dynamic_map(is_signed)[code + 1]) / 2)));
    std::vector<float> numbers;
    for (const float edge : edges)
        for (const float x :
             {edge, std::nextafter(edge, 0.0f), std::nextafter(std::nextafter(edge, 2.0f), 2.0f),
              std::nextafter(edge, 2.0f)})
            if (std::fabs(x) <= 1)
                numbers.insert(numbers.end(), {x, -x});
    for (const bool is_signed : {true, false}) {
        QuantizeCase c;
        c.numel = {int64_t(numbers.size() + numbers.size() / 4095 + 1)};
        c.is_signed = is_signed;
        c.block_size = 4096;
        c.value = [&](size_t, size_t i) {
            const float x = i % 4096 == 0 ? 1.0f : numbers[i - i / 4096 - 1];
            return double(is_signed ? x : std::fabs(x));
        };
        const QuantizeRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        const std::vector<double> values = run.values.values(0), codes = run.codes.values(0);
        for (size_t i = 0; i < values.size(); i++) {
            int code = nearest(dynamic_map(is_signed), values[i]);
            if (!is_signed && values[i] > 0 && code == 0)
                code = 1;
            ASSERT_EQ(codes[i], code) << values[i];
        }
    }
}

TEST_P(QuantizeBlocks, DecodeIsTheMapTimesTheScale)
{
    for (const QuantizeCase &c : cases()) {
        const QuantizeRun run(*backend, c);
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(run.decode(), HR_OK) << hr_last_error();
        EXPECT_TRUE(run.whole());
        for (size_t k = 0; k < c.numel.size(); k++) {
            const std::vector<double> values = run.values.values(k), codes = run.codes.values(k);
            const std::vector<double> absmaxs = run.absmaxs.values(k);
            for (size_t i = 0; i < values.size(); i++) {
                const float exact = float(dynamic_map(c.is_signed)[size_t(codes[i])]) *
                                    float(absmaxs[i / size_t(c.block_size)]);
                const hr_dtype type = c.types[k % c.types.size()];
                ASSERT_EQ(values[i], decode(encode({double(exact)}, type), type)[0]);
            }
        }
    }
}

// With betas of 0 the new moments are the gradient and its square.
TEST_P(QuantizeBlocks, TheCodesAreThoseOfAStep)
{
    for (const Tensors::Value &value : {Tensors::Value(sizes), Tensors::Value(special)})
        for (const int32_t size : {64, 256, 512}) {
            Adamw8bitCase step;
            step.numel = {3000};
            step.block_size = size;
            step.beta1 = step.beta2 = 0;
            step.grads = value;
            step.exp_avg_absmaxs = step.exp_avg_sq_absmaxs = [](size_t, size_t) { return 0.0; };
            const Adamw8bitRun stepped(*backend, step);
            ASSERT_EQ(stepped.call(), HR_OK) << hr_last_error();
            for (const bool is_signed : {true, false}) {
                QuantizeCase c;
                c.numel = step.numel;
                c.block_size = size;
                c.is_signed = is_signed;
                c.value = [&](size_t k, size_t i) {
                    const float g = float(value(k, i));
                    return is_signed ? double(g) : double(g * g);
                };
                const QuantizeRun run(*backend, c);
                ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                const Tensors &codes = is_signed ? stepped.exp_avgs : stepped.exp_avg_sqs;
                const Tensors &absmaxs =
                    is_signed ? stepped.exp_avg_absmaxs : stepped.exp_avg_sq_absmaxs;
                EXPECT_EQ(run.codes.buffers[0].content(), codes.buffers[0].content());
                EXPECT_EQ(run.absmaxs.buffers[0].content(), absmaxs.buffers[0].content());
            }
        }
}

TEST_P(QuantizeBlocks, SameBitsOnEveryInstructionSetAndDevice)
{
    std::vector<QuantizeCase> all = cases();
    for (const bool is_signed : {true, false}) {
        QuantizeCase c;
        c.numel = {5000};
        c.is_signed = is_signed;
        c.block_size = 64;
        c.value = special;
        all.push_back(c);
    }
    Digest digest;
    for (const QuantizeCase &c : all) {
        const CpuLevel baseline(HR_CPU_BASELINE);
        const QuantizeRun expected(cpu_backend(), c);
        ASSERT_EQ(expected.call(), HR_OK) << hr_last_error();
        digest.add(expected.image());
        for (const hr_cpu_level l : {HR_CPU_BASELINE, HR_CPU_AVX2, HR_CPU_AVX512}) {
            const CpuLevel level(l);
            if (!level.available)
                continue;
            const QuantizeRun run(*backend, c);
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.image(), expected.image());
        }
    }
}

namespace
{
struct Quantize {
    using Case = QuantizeCase;
    using Run = QuantizeRun;

    static void expect(Backend &backend, const Case &c)
    {
        const Run run(backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    }
    static Case everything()
    {
        Case c;
        c.numel = {7, 0, 300};
        return c;
    }
    static std::vector<ListRule<Run>> rules()
    {
        using Rule = ListRule<Run>;
        return {{"values", &Run::values, float_types(), Rule::LEADS},
                {"codes", &Run::codes, {HR_U8}},
                {"absmaxs", &Run::absmaxs, {HR_F32}, Rule::MEASURED, false, 2}};
    }
    static BadInputs<Run> refused()
    {
        BadInputs<Run> all = {{"absmaxs\\[2\\] has numel 1, wanted 2, one per 256",
                               [](Run &r) { r.absmaxs.numel[2] = 1; }}};
        for (const int32_t size : {0, -256, 1, 32, 96, 255, 8192, INT32_MIN})
            all.push_back({"block_size is " + std::to_string(size) + ", wanted a power of two",
                           [=](Run &r) { r.config.block_size = size; }});
        return all;
    }
};
} // namespace

BAD_INPUTS_SUITE(Quantize);

TEST(QuantizeBlocksHelpers, SizesAndCounts)
{
    EXPECT_EQ(hr_block_count(0, 256), 0);
    EXPECT_EQ(hr_block_count(1, 256), 1);
    EXPECT_EQ(hr_block_count(256, 256), 1);
    EXPECT_EQ(hr_block_count(257, 256), 2);
    EXPECT_EQ(hr_block_count(INT64_MAX, 64), INT64_MAX / 64 + 1);
    EXPECT_EQ(hr_block_count(-5, 64), 0);
    EXPECT_EQ(hr_block_count(5, 0), 0);
    EXPECT_EQ(hr_dtype_size(HR_F32), 4u);
    EXPECT_EQ(hr_dtype_size(HR_BF16), 2u);
    EXPECT_EQ(hr_dtype_size(HR_U8), 1u);
    EXPECT_EQ(hr_dtype_size(HR_F64), 8u);
    EXPECT_EQ(hr_dtype_size(hr_dtype(77)), 0u);
}
