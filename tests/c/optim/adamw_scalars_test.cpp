// What hr_adamw() reads from the device: found_inf, counters, and the other scalars.
#include <cmath>

#include "tests/c/optim/adamw_run.h"

using AdamwScalars = OnBackend;
ON_EVERY_BACKEND(AdamwScalars);

namespace
{
AdamwCase with_everything()
{
    AdamwCase c;
    c.numel = {5, 300, 0, 17};
    c.steps = HR_F64;
    c.amsgrad = true;
    c.lr_on_device = HR_F32;
    c.grad_scale = 2.0f;
    c.clip_coef = 0.5f;
    return c;
}
} // namespace

TEST_P(AdamwScalars, FoundInfKeepsEveryByte)
{
    for (const float found : {1.0f, -1.0f, 1e-45f, INFINITY, NAN}) {
        AdamwCase c = with_everything();
        c.found_inf = found;
        const AdamwRun run(*backend, c);
        const std::vector<uint8_t> before = run.image();
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(run.image(), before) << found;
    }
    for (const float not_found : {0.0f, -0.0f}) {
        AdamwCase c = with_everything();
        c.found_inf = not_found;
        const AdamwRun run(*backend, c);
        const std::vector<uint8_t> before = run.image();
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
        EXPECT_NE(run.image(), before);
        EXPECT_EQ(run.values(STEPS, 1)[0], 4);
    }
}

TEST_P(AdamwScalars, AbsentFactorsAreOne)
{
    AdamwCase with = with_everything(), without = with_everything();
    with.grad_scale = with.clip_coef = 1.0f;
    with.found_inf = 0.0f;
    without.grad_scale = without.clip_coef = std::nullopt;
    const AdamwRun a(*backend, with), b(*backend, without);
    ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    for (size_t k = 0; k < 4; k++)
        EXPECT_EQ(a.values(PARAMS, k), b.values(PARAMS, k));
}

TEST_P(AdamwScalars, CountersMatchTheStepOfTheConfig)
{
    for (const hr_dtype counter : {HR_F32, HR_F64}) {
        AdamwCase on_device, on_host;
        on_device.steps = counter;
        const AdamwRun a(*backend, on_device), b(*backend, on_host);
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
        EXPECT_EQ(a.values(PARAMS, 0), b.values(PARAMS, 0));
        EXPECT_EQ(a.values(STEPS, 0)[0], double(on_host.step));
    }
}

TEST_P(AdamwScalars, AnF32CounterStaysAtItsLastInteger)
{
    AdamwCase c;
    c.steps = HR_F32;
    c.step = (1 << 24) + 1;
    const AdamwRun run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.values(STEPS, 0)[0], 1 << 24);
}

TEST_P(AdamwScalars, TwoHundredStepsInARow)
{
    AdamwCase on_device, on_host;
    on_device.step = on_host.step = 1;
    on_device.steps = HR_F64;
    AdamwRun a(*backend, on_device), b(cpu_backend(), on_host);
    for (int step = 1; step <= 200; step++) {
        b.config.step.t = step;
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    }
    EXPECT_EQ(a.values(PARAMS, 0), b.values(PARAMS, 0));
    EXPECT_EQ(a.values(STEPS, 0)[0], 200);
}
