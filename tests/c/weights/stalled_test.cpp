// The count of weights that stall, which all threads of the CPU add to.
#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/pool.h"

TEST(StalledOnTheCpu, IsTheSameForAnyNumberOfThreads)
{
    AdamwCase c;
    c.numel = {1 << 19, 70001};
    c.param = c.grad = HR_BF16;
    c.lr = 1e-5;
    for (const hr_weights_mode mode : {HR_WEIGHTS_NEAREST, HR_WEIGHTS_REMAINDER8}) {
        c.weights = WeightsData::Ask{mode, false, true};
        const auto count = [&](int64_t before) {
            AdamwRun run(cpu_backend(), c);
            *run.weights->weights.stalled = before;
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            return *run.weights->weights.stalled - before;
        };
        const int64_t alone = count(0);
        EXPECT_GT(alone, 100) << mode;
        for (int turn = 0; turn < 10; turn++) {
            const LentPool pool(8);
            EXPECT_EQ(count(turn), alone) << mode;
        }
    }
}
