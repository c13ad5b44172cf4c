// hr_adamw() on lists of every shape: empty tensors anywhere, and more tensors than one launch
// holds.
#include "tests/c/optim/adamw_run.h"

using AdamwLists = OnBackend;
ON_EVERY_BACKEND(AdamwLists);

namespace
{
// Each tensor comes out as it does alone.
void expect_independent(Backend &backend, const AdamwCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const AdamwRun together(backend, c);
    ASSERT_EQ(together.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(together.whole());
    const AdamwRun one_by_one(cpu_backend(), c);
    for (size_t k = 0; k < c.numel.size(); k++) {
        hr_tensor_list lists[LISTS];
        for (int l = 0; l < LISTS; l++)
            lists[l] = {1, &one_by_one.data[l][k], &one_by_one.numel[l][k],
                        &one_by_one.dtype[l][k]};
        const hr_exec cpu = {HR_CPU, nullptr};
        ASSERT_EQ(hr_adamw(&lists[PARAMS], &lists[EXP_AVGS], &lists[EXP_AVG_SQS], nullptr,
                           c.steps ? &lists[STEPS] : nullptr, &lists[GRADS], &one_by_one.config,
                           &cpu),
                  HR_OK);
    }
    EXPECT_EQ(together.image(), one_by_one.image());
}
} // namespace

TEST_P(AdamwLists, EmptyTensorsAnywhere)
{
    for (int empty = 0; empty < 16; empty++) {
        AdamwCase c;
        c.numel = {5, 300, 1, 9};
        for (size_t k = 0; k < 4; k++)
            if (empty >> k & 1)
                c.numel[k] = 0;
        expect_independent(*backend, c);
        c.steps = HR_F64;
        expect_independent(*backend, c);
    }
}

TEST_P(AdamwLists, AnEmptyTensorMayBeNull)
{
    AdamwCase c;
    c.numel = {4, 0, 4};
    AdamwRun run(*backend, c);
    for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, GRADS})
        run.data[l][1] = nullptr;
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST_P(AdamwLists, AnEmptyListNeedsNoArrays)
{
    AdamwCase c;
    c.numel = {};
    AdamwRun run(*backend, c);
    for (hr_tensor_list &list : run.lists)
        list = {0, nullptr, nullptr, nullptr};
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST_P(AdamwLists, ManyTensors)
{
    for (const size_t count : {1, 2, 600, 2000})
        for (const std::optional<hr_dtype> steps : {std::optional<hr_dtype>(), {HR_F64}}) {
            AdamwCase c;
            c.numel.resize(count);
            for (size_t k = 0; k < count; k++)
                c.numel[k] = int64_t(k * 7 % 11); // some are empty
            c.steps = steps;
            expect_independent(*backend, c);
        }
}

TEST_P(AdamwLists, LargeAndSmallTogether)
{
    AdamwCase c;
    c.numel = {3, 40001, 0, 16384, 16385, 1};
    expect_independent(*backend, c);
}
