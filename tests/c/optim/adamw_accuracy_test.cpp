// hr_adamw() against the published rule in binary64. Errors are counted in units of the storage
// type's epsilon, at the size of the terms summed; the same rule in plain binary32 sets the bar:
// its root mean square error may be exceeded by a factor of 2.
#include <algorithm>
#include <cmath>

#include "tests/c/optim/adamw_run.h"

namespace
{
// A value and the size of the terms that it was summed from.
struct Sum {
    double value, size;
};
struct Updated {
    Sum param, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

// Algorithm 2 of arXiv:1711.05101 in the precision of T, scalars in binary64.
template <class T>
Updated adamw_rule(const AdamwCase &c, const hr_adamw_config &h, double t, T p, T g, T m, T v,
                   T v_max)
{
    const double lr = c.lr_on_device == HR_F32 ? double(float(c.lr)) : c.lr;
    const double factor =
        (c.maximize ? -1 : 1) * double(c.clip_coef.value_or(1)) / double(c.grad_scale.value_or(1));
    g = g * T(factor);
    T g_size = std::fabs(g);
    if (c.decoupled) {
        p = p - T(lr * h.weight_decay) * p;
    } else {
        g_size += std::fabs(T(h.weight_decay) * p);
        g = g + T(h.weight_decay) * p;
    }
    const T m_size = std::fabs(T(h.beta1) * m) + T(1 - h.beta1) * g_size;
    m = T(h.beta1) * m + T(1 - h.beta1) * g;
    const T v_size = T(h.beta2) * v + T(1 - h.beta2) * g_size * g_size;
    v = T(h.beta2) * v + T(1 - h.beta2) * g * g;
    v_max = std::max(v_max, v);
    const T root = std::sqrt(c.amsgrad ? v_max : v) / T(std::sqrt(1 - std::pow(h.beta2, t)));
    const T step_size = T(lr / (1 - std::pow(h.beta1, t)));
    const T new_p = p - step_size * (m / (root + T(h.eps)));
    const T p_size = std::fabs(p) + step_size * (m_size / (root + T(h.eps)));
    return {{new_p, p_size}, {m, m_size}, {v, v_size}, {v_max, v_max + v_size}};
}

class Error
{
  public:
    // `plain` is what binary32 gives before it is stored.
    void add(double got, double plain, Sum exact, hr_dtype dtype)
    {
        // Below `least` the format has no more bits to be precise with.
        const double least = dtype == HR_F16 ? 0x1p-14 : 0x1p-126;
        const double unit = epsilon_of(dtype) * std::max(exact.size, least);
        uint8_t stored[4];
        encode(plain, stored, dtype);
        const double error = std::fabs(got - exact.value) / unit;
        const double plain_error = std::fabs(decode(stored, dtype) - exact.value) / unit;
        largest = std::max(largest, error);
        squares += error * error;
        plain_squares += plain_error * plain_error;
    }
    double largest = 0, squares = 0, plain_squares = 0;
};

void expect_accurate(Backend &backend, const AdamwCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const AdamwRun fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    Error error[LISTS];
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
    for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS}) {
        EXPECT_LE(error[l].largest, 3) << adamw_list_names[l];
        EXPECT_LE(std::sqrt(error[l].squares), 2 * std::sqrt(error[l].plain_squares))
            << adamw_list_names[l];
    }
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
    for (const std::optional<hr_dtype> steps : {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}})
        for (const std::optional<hr_dtype> lr : {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}})
            for (int scalars = 0; scalars < 8; scalars++) {
                AdamwCase c;
                c.numel = {9, 33, 0, 17};
                c.steps = steps;
                c.lr_on_device = lr;
                if (scalars & 1)
                    c.grad_scale = 1024.0f / 3;
                if (scalars & 2)
                    c.clip_coef = 0.3f;
                if (scalars & 4)
                    c.found_inf = 0.0f;
                expect_accurate(*backend, c);
            }
}

TEST_P(AdamwAccuracy, FirstAndLateSteps)
{
    for (const int64_t step : {1, 2, 10, 1000, 1000000, 1 << 24}) {
        AdamwCase c;
        c.numel = {257};
        c.step = step;
        expect_accurate(*backend, c);
        c.steps = HR_F64;
        expect_accurate(*backend, c);
    }
    for (const int64_t step : {(int64_t(1) << 32) + 1, (int64_t(1) << 52) + 3}) {
        AdamwCase c;
        c.numel = {257};
        c.step = step;
        expect_accurate(*backend, c);
        c.steps = HR_F64;
        expect_accurate(*backend, c);
    }
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
