// hr_adamw() against the published rule in binary64.
#include <cmath>

#include "tests/c/optim/adamw_rule.h"
#include "tests/c/optim/adamw_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
void expect_accurate(Backend &backend, const AdamwCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const AdamwRun fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    StorageError error[LISTS];
    for (size_t k = 0; k < c.numel.size(); k++) {
        std::vector<double> before[LISTS], after[LISTS];
        for (int l = 0; l < LISTS; l++) {
            before[l] = fresh.values(AdamwList(l), k);
            after[l] = run.values(AdamwList(l), k);
        }
        const double t = double(c.step) + (c.steps ? double(k) : 0);
        EXPECT_EQ(after[STEPS], c.steps ? std::vector<double>{t} : std::vector<double>{});
        EXPECT_EQ(after[GRADS], before[GRADS]);
        for (size_t i = 0; i < size_t(c.numel[k]); i++) {
            const auto rule = [&](auto zero) {
                using T = decltype(zero);
                const T v_max = c.amsgrad ? T(before[MAX_EXP_AVG_SQS][i]) : zero;
                return adamw_rule<T>(c, run.config, t, T(before[PARAMS][i]), T(before[GRADS][i]),
                                     T(before[EXP_AVGS][i]), T(before[EXP_AVG_SQS][i]), v_max);
            };
            const Updated exact = rule(double()), plain = rule(float());
            const auto type = [&](int l) { return run.tensors[size_t(l)].dtype[k]; };
            error[PARAMS].add(after[PARAMS][i], plain.param.value, exact.param, type(PARAMS));
            error[EXP_AVGS].add(after[EXP_AVGS][i], plain.exp_avg.value, exact.exp_avg,
                                type(EXP_AVGS));
            error[EXP_AVG_SQS].add(after[EXP_AVG_SQS][i], plain.exp_avg_sq.value, exact.exp_avg_sq,
                                   type(EXP_AVG_SQS));
            if (c.amsgrad)
                error[MAX_EXP_AVG_SQS].add(after[MAX_EXP_AVG_SQS][i], plain.max_exp_avg_sq.value,
                                           exact.max_exp_avg_sq, type(MAX_EXP_AVG_SQS));
        }
    }
    for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS})
        error[l].expect_small(adamw_list_names[l]);
}
} // namespace

using AdamwAccuracy = OnBackend;
ON_EVERY_BACKEND(AdamwAccuracy);

TEST_P(AdamwAccuracy, EveryTypeAndFlag)
{
    for (int flags = 0; flags < 8; flags++) {
        AdamwCase c;
        c.numel.assign(27, 65);
        c.all_types = true;
        c.amsgrad = flags & 1;
        c.decoupled = flags & 2;
        c.maximize = flags & 4;
        expect_accurate(*backend, c);
    }
}

TEST_P(AdamwAccuracy, EveryWayToGiveStepAndScalars)
{
    AdamwCase c;
    c.numel = {9, 33, 0, 17};
    for_every_way_to_give_scalars(c,
                                  [&](const AdamwCase &each) { expect_accurate(*backend, each); });
}

TEST_P(AdamwAccuracy, FirstAndLateSteps)
{
    AdamwCase c;
    c.numel = {257};
    for_steps(c, {1, 2, 10, 1000, 1000000, 1 << 24, (int64_t(1) << 32) + 1, (int64_t(1) << 52) + 3},
              [&](const AdamwCase &each) { expect_accurate(*backend, each); });
}

TEST_P(AdamwAccuracy, CountersOfEitherTypeBesideEachOther)
{
    AdamwCase c;
    c.numel = {9, 33, 0, 17};
    c.steps = HR_F64;
    c.mixed_counters = true;
    c.step = 1;
    expect_accurate(*backend, c);
}

// From moments of 1 the first step moves a parameter of 0 by lr / (1 - beta1), rounded once.
TEST_P(AdamwAccuracy, TheDigitsOfLrThatBinary32Lacks)
{
    int differ = 0; // of those whose step would be another one if lr were rounded before
    for (const double lr : {0.1, 1e-3 / 3, 3e-4 / 7, 1.7e-5, 0.3, 2.2e-3})
        for (const std::optional<hr_dtype> on_device : {std::optional<hr_dtype>(), {HR_F64}}) {
            AdamwCase c;
            c.lr = lr;
            c.lr_on_device = on_device;
            c.step = 1;
            c.value = [](AdamwList list, size_t, size_t) { return list == PARAMS ? 0 : 1; };
            AdamwRun run(*backend, c);
            run.config.eps = run.config.weight_decay = 0;
            run.config.beta2 = 0;
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            const double correction = 1 - run.config.beta1;
            EXPECT_EQ(run.values(PARAMS, 0)[0], -double(float(lr / correction))) << lr;
            differ += float(lr / correction) != float(double(float(lr)) / correction);
        }
    EXPECT_GE(differ, 4);
}
