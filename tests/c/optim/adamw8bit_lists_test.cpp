// hr_adamw8bit() on lists of every shape: empty tensors anywhere, short blocks, and more tensors
// than one launch holds.
#include "tests/c/optim/adamw8bit_run.h"

using Adamw8bitLists = OnBackend;
ON_EVERY_BACKEND(Adamw8bitLists);

namespace
{
// Each tensor comes out as it does alone.
void expect_independent(Backend &backend, const Adamw8bitCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const Adamw8bitRun together(backend, c);
    ASSERT_EQ(together.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(together.whole());
    const Adamw8bitRun one_by_one(cpu_backend(), c);
    for (size_t k = 0; k < c.numel.size(); k++) {
        const auto alone = [k](const Tensors &t) {
            return hr_tensor_list{1, &t.data[k], &t.numel[k], &t.dtype[k]};
        };
        const Adamw8bitRun &r = one_by_one;
        const hr_tensor_list params = alone(r.params), exp_avgs = alone(r.exp_avgs),
                             absmaxs = alone(r.exp_avg_absmaxs), exp_avg_sqs = alone(r.exp_avg_sqs),
                             sq_absmaxs = alone(r.exp_avg_sq_absmaxs), steps = alone(r.steps),
                             grads = alone(r.grads);
        hr_adamw8bit_config config = r.config;
        if (config.seeds)
            config.seeds += k;
        const hr_exec cpu = {HR_CPU, nullptr};
        ASSERT_EQ(hr_adamw8bit(&params, &exp_avgs, &absmaxs, &exp_avg_sqs, &sq_absmaxs,
                               c.steps ? &steps : nullptr, &grads, &config, &cpu),
                  HR_OK)
            << hr_last_error();
    }
    EXPECT_EQ(together.image(), one_by_one.image());
}
} // namespace

TEST_P(Adamw8bitLists, EmptyTensorsAnywhere)
{
    for (int empty = 0; empty < 16; empty++) {
        Adamw8bitCase c;
        c.numel = {5, 300, 1, 256};
        for (size_t k = 0; k < 4; k++)
            if (empty >> k & 1)
                c.numel[k] = 0;
        expect_independent(*backend, c);
        c.steps = HR_F64;
        c.stochastic = true;
        expect_independent(*backend, c);
    }
}

TEST_P(Adamw8bitLists, AnEmptyTensorMayBeNull)
{
    Adamw8bitCase c;
    c.numel = {4, 0, 4};
    Adamw8bitRun r(*backend, c);
    for (Tensors *list : {&r.params, &r.exp_avgs, &r.exp_avg_absmaxs, &r.exp_avg_sqs,
                          &r.exp_avg_sq_absmaxs, &r.grads})
        list->data[1] = nullptr;
    EXPECT_EQ(r.call(), HR_OK) << hr_last_error();
}

TEST_P(Adamw8bitLists, AnEmptyListNeedsNoArrays)
{
    Adamw8bitCase c;
    c.numel = {};
    Adamw8bitRun r(*backend, c);
    for (Tensors *list : {&r.params, &r.exp_avgs, &r.exp_avg_absmaxs, &r.exp_avg_sqs,
                          &r.exp_avg_sq_absmaxs, &r.grads})
        list->list = {0, nullptr, nullptr, nullptr};
    EXPECT_EQ(r.call(), HR_OK) << hr_last_error();
}

TEST_P(Adamw8bitLists, ManyTensors)
{
    for (const size_t count : {1, 2, 500, 1300})
        for (const std::optional<hr_dtype> steps : {std::optional<hr_dtype>(), {HR_F64}}) {
            Adamw8bitCase c;
            c.numel.resize(count);
            for (size_t k = 0; k < count; k++)
                c.numel[k] = int64_t(k * 7 % 11); // some are empty
            c.steps = steps;
            c.stochastic = steps.has_value();
            expect_independent(*backend, c);
        }
}

TEST_P(Adamw8bitLists, LargeAndSmallTogether)
{
    for (const int32_t block_size : {64, 512}) {
        Adamw8bitCase c;
        c.numel = {3, 40001, 0, 16384, 16385, 1, 511, 513};
        c.block_size = block_size;
        expect_independent(*backend, c);
    }
}
