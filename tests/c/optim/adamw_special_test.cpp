// Where NaN and infinity go in hr_adamw(), one at a time: never lost, never into another element.
// An infinite first moment becomes NaN, because the step from it towards the gradient is infinite.
#include <cmath>

#include "tests/c/optim/adamw_run.h"

using AdamwSpecial = OnBackend;
ON_EVERY_BACKEND(AdamwSpecial);

TEST_P(AdamwSpecial, ValuesSpreadAsTheRuleSays)
{
    const char n = 'n', i = 'i', f = 'f'; // NaN, infinity, finite
    const struct {
        AdamwList list;
        double value;
        char param, exp_avg, exp_avg_sq, max_exp_avg_sq; // afterwards
    } rows[] = {
        {GRADS, NAN, n, n, n, n},           {GRADS, INFINITY, n, i, i, i},
        {PARAMS, NAN, n, f, f, f},          {PARAMS, INFINITY, i, f, f, f},
        {EXP_AVGS, NAN, n, n, f, f},        {EXP_AVGS, INFINITY, n, n, f, f},
        {EXP_AVG_SQS, NAN, n, f, n, n},     {EXP_AVG_SQS, INFINITY, f, f, i, i},
        {MAX_EXP_AVG_SQS, NAN, n, f, f, n}, {MAX_EXP_AVG_SQS, INFINITY, f, f, f, i},
    };
    for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16})
        for (const auto &row : rows) {
            SCOPED_TRACE(testing::Message() << row.value << " in " << adamw_list_names[row.list]);
            AdamwCase c;
            c.numel = {17};
            c.param = c.grad = c.state = type;
            c.amsgrad = true;
            const AdamwRun clean(*backend, c);
            c.spoiled = row.list;
            c.spoil = row.value;
            const AdamwRun run(*backend, c);
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const char wanted[] = {row.param, row.exp_avg, row.exp_avg_sq, row.max_exp_avg_sq};
            for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS}) {
                std::vector<double> got = run.values(l, 0), others = clean.values(l, 0);
                EXPECT_EQ(std::isnan(got[0])   ? n
                          : std::isinf(got[0]) ? i
                                               : f,
                          wanted[l])
                    << adamw_list_names[l] << " is " << got[0];
                got[0] = others[0] = 0;
                EXPECT_EQ(got, others) << adamw_list_names[l];
            }
        }
}

TEST_P(AdamwSpecial, ElementsOfGradientsThatAreNotFiniteMayBeLeftAlone)
{
    for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16})
        for (const double value : {double(NAN), double(INFINITY), -double(INFINITY)}) {
            AdamwCase c;
            c.numel = {17, 3};
            c.param = c.grad = c.state = type;
            c.amsgrad = true;
            const AdamwRun clean(*backend, c);
            c.skip_nonfinite = true;
            c.spoiled = GRADS;
            c.spoil = value;
            const AdamwRun before(*backend, c), run(*backend, c);
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS}) {
                std::vector<double> wanted = clean.values(l, 0);
                wanted[0] = before.values(l, 0)[0];
                EXPECT_EQ(run.values(l, 0), wanted) << adamw_list_names[l];
            }
            EXPECT_EQ(run.values(STEPS, 0), clean.values(STEPS, 0)); // the step counts
        }
}

TEST_P(AdamwSpecial, AGradientThatOverflowsWhenUnscaledCountsAsNotFinite)
{
    AdamwCase c;
    c.grad_scale = 0x1p-20f;
    c.skip_nonfinite = true;
    c.spoiled = GRADS;
    c.spoil = 3e38;
    const AdamwRun before(*backend, c), run(*backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(run.values(PARAMS, 0)[0], before.values(PARAMS, 0)[0]);
    EXPECT_NE(run.values(PARAMS, 0)[1], before.values(PARAMS, 0)[1]);
}
