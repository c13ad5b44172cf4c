// What hr_adamw8bit() reads from the device: found_inf, counters, and the other scalars.
#include <cmath>

#include "tests/c/optim/adamw8bit_run.h"

using Adamw8bitScalars = OnBackend;
ON_EVERY_BACKEND(Adamw8bitScalars);

namespace
{
Adamw8bitCase with_everything()
{
    Adamw8bitCase c;
    c.numel = {5, 300, 0, 17};
    c.steps = HR_F64;
    c.lr_on_device = HR_F32;
    c.grad_scale = 2.0f;
    c.clip_coef = 0.5f;
    return c;
}
} // namespace

TEST_P(Adamw8bitScalars, FoundInfKeepsEveryByte)
{
    for (const float found : {1.0f, -1.0f, 1e-45f, INFINITY, NAN})
        for (const bool bnb_exact : {false, true}) {
            Adamw8bitCase c = with_everything();
            c.bnb_exact = bnb_exact;
            c.found_inf = found;
            c.special = true;
            const Adamw8bitRun run(*backend, c);
            const std::vector<uint8_t> before = run.image();
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(run.image(), before) << found;
        }
    for (const float not_found : {0.0f, -0.0f}) {
        Adamw8bitCase c = with_everything();
        c.found_inf = not_found;
        const Adamw8bitRun run(*backend, c);
        const std::vector<uint8_t> before = run.image();
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_NE(run.image(), before);
        EXPECT_EQ(run.steps.values(1)[0], 4);
    }
}

TEST_P(Adamw8bitScalars, AbsentFactorsAreOne)
{
    Adamw8bitCase with = with_everything(), without = with_everything();
    with.grad_scale = with.clip_coef = 1.0f;
    with.found_inf = 0.0f;
    without.grad_scale = without.clip_coef = std::nullopt;
    const Adamw8bitRun a(*backend, with), b(*backend, without);
    ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    for (size_t k = 0; k < 4; k++) {
        EXPECT_EQ(a.params.values(k), b.params.values(k));
        EXPECT_EQ(a.exp_avgs.values(k), b.exp_avgs.values(k));
        EXPECT_EQ(a.exp_avg_sqs.values(k), b.exp_avg_sqs.values(k));
    }
}

// Every parameter has a counter of its own, an empty one too.
TEST_P(Adamw8bitScalars, CountersMatchTheStepOfTheConfig)
{
    for (const hr_dtype counter : {HR_F32, HR_F64})
        for (const bool stochastic : {false, true}) {
            Adamw8bitCase on_device, on_host;
            on_device.numel = {600, 0};
            on_host.numel = {600, 0};
            on_device.stochastic = on_host.stochastic = stochastic;
            on_device.steps = counter;
            const Adamw8bitRun a(*backend, on_device), b(*backend, on_host);
            ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(a.params.values(0), b.params.values(0));
            EXPECT_EQ(a.exp_avgs.values(0), b.exp_avgs.values(0));
            EXPECT_EQ(a.exp_avg_sqs.values(0), b.exp_avg_sqs.values(0));
            EXPECT_EQ(a.steps.values(0)[0], double(on_host.step));
            EXPECT_EQ(a.steps.values(1)[0], double(on_host.step) + 1);
        }
}

TEST_P(Adamw8bitScalars, AHundredStepsInARow)
{
    Adamw8bitCase on_device, on_host;
    on_device.step = on_host.step = 1;
    on_device.steps = HR_F64;
    Adamw8bitRun a(*backend, on_device), b(cpu_backend(), on_host);
    for (int step = 1; step <= 100; step++) {
        b.config.adamw.step.t = step;
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    }
    EXPECT_EQ(a.params.values(0), b.params.values(0));
    EXPECT_EQ(a.exp_avgs.values(0), b.exp_avgs.values(0));
    EXPECT_EQ(a.steps.values(0)[0], 100);
}
