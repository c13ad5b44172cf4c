// The count of weights that stall, which all threads of the CPU add to.
#include <atomic>
#include <thread>

#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/pool.h"

// Tensors are small, so that there are many additions, and another thread adds to the upper half of
// the count all the time: what is not added in one piece loses something of either.
TEST(StalledOnTheCpu, IsTheSameForAnyNumberOfThreads)
{
    constexpr int64_t kUpper = int64_t(1) << 32;
    AdamwCase c;
    c.numel.assign(1 << 15, 2);
    c.param = c.grad = HR_BF16;
    c.lr = 1e-5;
    c.weights = WeightsData::Ask{HR_WEIGHTS_NEAREST, false, true};
    const auto count = [&](bool disturbed) {
        AdamwRun run(cpu_backend(), c);
        int64_t *const stalled = run.weights->weights.stalled;
        std::atomic<bool> done(false);
        int64_t added = 0;
        std::thread disturber([&] {
            for (; disturbed && !done; added++)
                __atomic_fetch_add(stalled, kUpper, __ATOMIC_RELAXED);
        });
        for (int call = 0; call < 20; call++) // long enough for both to run at once
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        done = true;
        disturber.join();
        return *stalled - added * kUpper;
    };
    const int64_t alone = count(false);
    EXPECT_GT(alone, 1 << 14);
    for (int turn = 0; turn < 3; turn++) {
        const LentPool pool(4);
        EXPECT_EQ(count(true), alone);
    }
}
