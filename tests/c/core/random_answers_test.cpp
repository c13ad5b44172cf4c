// Known answers of stochastic rounding. The numbers come from an implementation of Philox4x32-10
// written apart from ours, which gives the answers that its authors publish with Random123
// (examples/kat_vectors, github.com/DEShawResearch/random123). They are what makes a resumed run, or
// one on another device, draw the same, so a change here breaks the promise of the header.
#include <cmath>
#include <cstring>

#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/adamw_run.h"

using RandomAnswers = OnBackend;
ON_EVERY_BACKEND(RandomAnswers);

namespace
{
// 16 bits for each weight: the counter is the element / 8 in 64 bits and the step in 64, whose
// highest is set; the words of the answer are for two elements each, the lower half first.
struct WeightAnswer {
    uint64_t seed;
    int64_t step, element;
    uint32_t random;
};
const WeightAnswer kWeights[] = {
    {0x0000000000000000u, 1, 0, 0x9C55},
    {0x0000000000000001u, 1, 1, 0xBE0E},
    {0x0000000000000001u, 2, 2, 0xF5F3},
    {0x0123456789ABCDEFu, 3, 3, 0x2AFA},
    {0x0123456789ABCDEFu, 77, 4, 0x09D3},
    {0x0000000100000000u, 77, 5, 0xF596},
    {0xFFFFFFFFFFFFFFFFu, 1000000, 6, 0xBBE8},
    {0x0000000000000005u, 4294967301, 7, 0xF792},
    {0x0000000000000005u, 4503599627382841, 8, 0x8345},
    {0x8000000000000005u, 9007199254740991, 1000003, 0xE5FE},
    {0x0000000000000006u, 3, 4294967307, 0xCDBF},
    {0x0000000000000006u, 3, 34359738367, 0x847C},
    {0x0000000000000006u, 3, 34359738368, 0x051A},
    {0x0000000000000006u, 3, 34359738381, 0xAEA0},
    {0x0000000000000007u, 1099511627777, 1152921504730303765, 0x922F},
};

// 32 bits for each code: the counter is the element / 2 and the step; the words of the answer are
// for exp_avg and exp_avg_sq of the first element, then of the second.
struct CodeAnswer {
    uint64_t seed;
    int64_t step;
    size_t element;
    uint32_t exp_avg, exp_avg_sq;
};
const CodeAnswer kCodes[] = {
    {0x0000000000000000u, 1, 1, 0x0F19C053, 0x83F875F0},
    {0x0000000000000001u, 1, 2, 0x3B539B4F, 0xF04A5080},
    {0x0000000000000001u, 2, 3, 0x44541F91, 0x0E0B3CF3},
    {0x0123456789ABCDEFu, 3, 255, 0xC2AD7821, 0x6E64F434},
    {0x0123456789ABCDEFu, 77, 257, 0x1D8D5CCA, 0x133DBE89},
    {0x0000000100000000u, 77, 258, 0xCD91C0F4, 0x3217D6B6},
    {0xFFFFFFFFFFFFFFFFu, 1000000, 511, 0xB0561B10, 0xC97AD375},
    {0x0000000000000005u, 4294967301, 700, 0x4260A1BA, 0x72F50BB3},
    {0x0000000000000005u, 4503599627382841, 701, 0x8A0FFCB6, 0x5B981813},
    {0x8000000000000005u, 9007199254740991, 1999, 0x017C713B, 0xBD982ADA},
};

float from_bits(uint32_t bits)
{
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// The weight of one element after a step that takes it from `before` to `after` in binary32.
struct Stored {
    double param;
    int residual;
};

Stored step_to(Backend &backend, const WeightAnswer &answer, hr_weights_mode mode, hr_dtype type,
               double before, float after)
{
    AdamwCase c;
    c.numel = {40};
    c.param = c.grad = type;
    c.step = answer.step;
    c.lr = before - after; // exact
    c.value = [=](AdamwList list, size_t, size_t) {
        return list == PARAMS ? before : list == GRADS;
    };
    c.weights = WeightsData::Ask{mode, true, false, 0, true};
    AdamwRun run(backend, c);
    run.config.beta1 = run.config.beta2 = run.config.eps = run.config.weight_decay = 0;
    // The elements around it as well, eight of them together.
    const int64_t first = answer.element / 8 * 8;
    run.weights->places[0] = {first, 40, 0};
    run.weights->seeds[0] = answer.seed;
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    const size_t i = size_t(answer.element - first);
    const bool plain = mode == HR_WEIGHTS_STOCHASTIC;
    return {run.values(PARAMS, 0)[i], plain ? 0 : int8_t(run.weights->buffers[0].content()[i])};
}
} // namespace

// One step up where the bits that are cut off and the random ones have a carry, and none below.
TEST_P(RandomAnswers, OfWeightsInBf16)
{
    for (const WeightAnswer &answer : kWeights) {
        const uint32_t below = 0x3F7F0000u, up = 0x10000u - answer.random;
        const auto param = [&](uint32_t low) {
            return step_to(*backend, answer, HR_WEIGHTS_STOCHASTIC, HR_BF16, 1,
                           from_bits(below + low))
                .param;
        };
        EXPECT_EQ(param(up), 1) << answer.element;
        EXPECT_EQ(param(up - 1), from_bits(below)) << answer.element;
    }
}

TEST_P(RandomAnswers, OfWeightsInF16)
{
    for (const WeightAnswer &answer : kWeights) {
        const auto param = [&](double before, float after) {
            return step_to(*backend, answer, HR_WEIGHTS_STOCHASTIC, HR_F16, before, after).param;
        };
        const uint32_t below = 0x3F7FE000u, up = 0x2000u - (answer.random & 0x1FFFu);
        EXPECT_EQ(param(1, from_bits(below + up)), 1) << answer.element;
        EXPECT_EQ(param(1, from_bits(below + up - 1)), from_bits(below)) << answer.element;
        // Below 2^-14 the gap is 2^-24, cut into 2^16 parts.
        const double part = 0x1p-40, low = 7 * 0x1p-24, high = 8 * 0x1p-24;
        EXPECT_EQ(param(high, float(low + (answer.random + 1) * part)), high) << answer.element;
        EXPECT_EQ(param(high, float(low + answer.random * part)), low) << answer.element;
    }
}

TEST_P(RandomAnswers, OfRemaindersOf8Bits)
{
    for (const WeightAnswer &answer : kWeights) {
        const uint32_t below = 0x3F7F1200u, up = 0x100u - (answer.random & 0xFFu);
        for (const uint32_t carry : {0, 1}) {
            const Stored stored = step_to(*backend, answer, HR_WEIGHTS_REMAINDER8_STOCHASTIC,
                                          HR_BF16, 1, from_bits(below + up - 1 + carry));
            EXPECT_EQ(stored.param, from_bits(0x3F7F0000u)) << answer.element;
            EXPECT_EQ(stored.residual, 0x12 + int(carry)) << answer.element;
        }
    }
}

// Between two codes, just above and below the place that the random number names.
TEST_P(RandomAnswers, OfCodes)
{
    constexpr size_t kLower = 200;
    for (const CodeAnswer &answer : kCodes)
        for (const bool is_signed : {false, true}) {
            const double uniform = (is_signed ? answer.exp_avg : answer.exp_avg_sq) * 0x1p-32;
            const double low = dynamic_map(is_signed)[kLower],
                         high = dynamic_map(is_signed)[kLower + 1];
            for (const int side : {-1, 1}) {
                const double y = low + (uniform + side * 0x1p-14) * (high - low);
                Adamw8bitCase c;
                c.numel = {2000};
                c.beta1 = c.beta2 = 0;
                c.stochastic = true;
                c.step = answer.step;
                c.grads = [=](size_t, size_t i) {
                    return i % 256 == 0 ? 1 : is_signed ? y : std::sqrt(y);
                };
                Adamw8bitRun run(*backend, c);
                run.seeds[0] = answer.seed;
                ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
                const Tensors &codes = is_signed ? run.exp_avgs : run.exp_avg_sqs;
                EXPECT_EQ(codes.values(0)[answer.element], double(kLower + (side > 0)))
                    << answer.element << (is_signed ? ", signed" : "");
            }
        }
}

// Every number of a type, two of most, none of which has anything to draw for.
TEST_P(RandomAnswers, NumbersOfTheTypeStay)
{
    const struct {
        hr_weights_mode mode;
        hr_dtype type;
    } cases[] = {{HR_WEIGHTS_STOCHASTIC, HR_BF16},
                 {HR_WEIGHTS_STOCHASTIC, HR_F16},
                 {HR_WEIGHTS_REMAINDER8_STOCHASTIC, HR_BF16}};
    for (const auto &[mode, type] : cases) {
        AdamwCase c;
        c.numel = {1 << 17};
        c.param = c.grad = type;
        c.lr = 0;
        c.value = [type = type, mode = mode](AdamwList list, size_t, size_t i) {
            const uint8_t bytes[] = {uint8_t(i), uint8_t(i >> 8)};
            const double x = decode(bytes, type);
            // With a residual, zero and infinity are no numbers that a weight is split into.
            const bool odd =
                std::isnan(x) || (mode != HR_WEIGHTS_STOCHASTIC && (x == 0 || std::isinf(x)));
            return list == PARAMS ? (odd ? 1 : x) : list == GRADS ? noise(1, i) : 0.25;
        };
        c.weights = WeightsData::Ask{mode};
        AdamwRun run(*backend, c);
        run.config.weight_decay = 0;
        const auto stored = [&] {
            std::pair<std::vector<double>, std::vector<uint8_t>> both;
            both.first = run.values(PARAMS, 0);
            if (mode != HR_WEIGHTS_STOCHASTIC)
                both.second = run.weights->buffers[0].content();
            return both;
        };
        const auto before = stored();
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_TRUE(stored() == before) << mode << ", type " << type;
    }
}
