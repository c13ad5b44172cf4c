// hr_unscale_norm() on lists of every shape: empty tensors anywhere, more tensors than one launch
// holds, and a workspace of exactly the bytes asked for.
#include <cmath>
#include <iterator>

#include "tests/c/grad/unscale_norm_run.h"
#include "tests/c/harness/suites.h"

namespace
{
struct UnscaleNorm {
    using Case = NormCase;
    using Run = NormRun;

    static void expect(Backend &backend, const Case &c)
    {
        expect_exact(backend, c);
    }
    static std::vector<Case> list_cases()
    {
        Case measures, writes;
        writes.p = INFINITY;
        writes.write = true;
        writes.grad_scale = 2.0f;
        measures.types = writes.types = float_types();
        return {measures, writes};
    }
    static std::vector<int64_t> many()
    {
        return {1, 1400};
    }
};
} // namespace

LISTS_SUITE(UnscaleNorm);

TEST_P(UnscaleNormLists, AnEmptyListHasNoNorm)
{
    NormCase c;
    c.numel = {};
    const NormRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.norm(), 0);
    EXPECT_EQ(run.clip_coef(), 1);
}

// One launch holds about 1,300 tensors. Where whole launches are empty, where a launch begins or
// ends with empty tensors, and where nothing is.
TEST_P(UnscaleNormLists, ManyTensorsOfWhichFewHaveElements)
{
    using Size = int64_t (*)(size_t k, size_t count);
    const Size sizes[] = {
        [](size_t k, size_t) -> int64_t { return k * 7 % 43 < 3 ? 1 + k % 37 : 0; },
        [](size_t, size_t) -> int64_t { return 0; },
        [](size_t k, size_t) -> int64_t { return k == 0 ? 5 : 0; },
        [](size_t k, size_t count) -> int64_t { return k + 1 == count ? 16385 : 0; },
        [](size_t k, size_t count) -> int64_t { return k + 1 == count || k == 0 ? 40000 : 0; },
        [](size_t k, size_t count) -> int64_t { return k == count / 2 ? 16384 : 0; },
        [](size_t k, size_t) -> int64_t { return k % 1300 >= 1290 || k % 1400 < 30 ? 3 : 0; },
    };
    for (const size_t count : {1, 1500, 3000})
        for (size_t shape = 0; shape < std::size(sizes); shape++) {
            if (count == 3000 && shape != 1 && shape != 4)
                continue; // the emulator takes a while
            NormCase c;
            c.types = float_types();
            for (size_t k = 0; k < count; k++)
                c.numel.push_back(sizes[shape](k, count));
            c.p = shape % 2 ? INFINITY : 2;
            c.write = shape % 2;
            c.clip_coef = 0.25f;
            expect_exact(*backend, c);
        }
}

TEST_P(UnscaleNormLists, NoTensorOfManyIsEmpty)
{
    NormCase c;
    c.types = float_types();
    for (size_t k = 0; k < 1400; k++)
        c.numel.push_back(1 + int64_t(k % 5));
    expect_exact(*backend, c);
}

TEST_P(UnscaleNormLists, MultiplyWithoutMeasuring)
{
    NormCase c;
    c.types = float_types();
    c.numel = {5, 0, 300, 16385};
    c.write = true;
    c.grad_scale = 3.0f;
    const NormRun both(*backend, c);
    c.outputs = std::nullopt;
    const NormRun run(*backend, c);
    ASSERT_EQ(run.workspace, nullptr);
    ASSERT_EQ(both.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.gradients(), both.gradients());
    EXPECT_TRUE(run.whole());
}

TEST_P(UnscaleNormLists, EachOutputAlone)
{
    NormCase c;
    c.numel = {5, 0, 300, 16385};
    c.value = [](size_t k, size_t i) { return k == 2 && i == 7 ? INFINITY : noise(k, i); };
    const NormRun all(*backend, c);
    ASSERT_EQ(all.call(), HR_OK) << hr_last_error();
    for (unsigned outputs = 0; outputs < 32; outputs++) {
        c.outputs = outputs;
        const NormRun run(*backend, c);
        const std::vector<uint8_t> untouched = run.results();
        ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
        std::vector<uint8_t> wanted = all.results();
        // norm [4 bytes], norms [4 x 4], found_inf [4], culprit [8], clip_coef [4]
        const size_t begins[] = {0, 4, 20, 24, 32, 36};
        for (int o = 0; o < 5; o++)
            if (!(outputs >> o & 1))
                std::copy(untouched.begin() + begins[o], untouched.begin() + begins[o + 1],
                          wanted.begin() + begins[o]);
        EXPECT_EQ(run.results(), wanted) << "outputs " << outputs;
        EXPECT_TRUE(run.whole());
    }
}

// Several calls can share a flag, and the clip_coef of one can be the factor of the next.
TEST_P(UnscaleNormLists, MeasureThenClip)
{
    NormCase c;
    c.numel = {5, 300, 16385};
    c.max_norm = 2;
    NormRun run(*backend, c);
    const ExactNorm exact(run.grads, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    expect_exact(run, exact, c);
    run.config.clip_coef = run.result.clip_coef;
    run.config.write = 1;
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_NEAR(run.norm(), 2, 1e-6);
    EXPECT_NEAR(run.clip_coef(), 1, 1e-6);
}

TEST(UnscaleNormWorkspace, ReadsOnlyCountAndNumel)
{
    const int64_t numel[] = {5, 0, 16385};
    const hr_tensor_list list = {3, nullptr, numel, nullptr};
    size_t bytes = 0;
    ASSERT_EQ(hr_unscale_norm_workspace(&bytes, &list), HR_OK) << hr_last_error();
    EXPECT_GE(bytes, 8u * (3 + 3 + 3));
    EXPECT_LE(bytes, 8u * (3 + 3 + 3 + 1));
}
