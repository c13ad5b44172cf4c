// hr_momentum(): both rules, to the bit, against a second statement of them; lists of every shape, the
// scalars of a step, everything that it refuses, and equal bits wherever it runs.
#include "tests/c/optim/momentum_run.h"
#include "tests/c/optim/one_moment.h"
#include "tests/c/optim/step_suites.h"

namespace
{
// With a moment, without one, and with every option; Lion; and both with moments in codes.
std::vector<MomentumCase> every_rule()
{
    std::vector<MomentumCase> all(6);
    all[1].momentum = 0;
    all[2].nesterov = all[2].maximize = true;
    all[3].rule = all[5].rule = HR_LION;
    all[4].moment = all[5].moment = HR_U8;
    all[4].nesterov = true;
    return all;
}

struct Momentum {
    using Case = MomentumCase;
    using Run = MomentumRun;
    static constexpr int kSteps = 200;

    template <MomentumList list> static Tensors &tensors(Run &r)
    {
        return r.tensors[list];
    }

    // ---- Lists -----------------------------------------------------------------------------------

    static void expect(Backend &backend, const Case &c)
    {
        expect_independent<Momentum>(backend, c);
    }
    static void narrow(Run &run, size_t k)
    {
        narrow_lists(run, k);
    }
    static std::vector<Case> list_cases()
    {
        std::vector<Case> all = every_rule();
        all[2].steps = all[3].steps = all[5].steps = HR_F64;
        all[4].block_size = 64;
        return all;
    }
    static std::vector<int64_t> many()
    {
        return {1, 2, 600, 2000};
    }

    // ---- Scalars ---------------------------------------------------------------------------------

    static hr_step_config &step(Run &run)
    {
        return run.config.step;
    }
    static const Tensors &steps(const Run &run)
    {
        return run.tensors[STEPS];
    }
    static Case all_scalars()
    {
        Case c;
        c.numel = {5, 300, 0, 17};
        c.steps = HR_F64;
        c.dampening = 0.25;
        c.lr_on_device = HR_F32;
        c.grad_scale = 2.0f;
        c.clip_coef = 0.5f;
        return c;
    }
    static std::vector<Case> skipped()
    {
        Case lion = all_scalars();
        lion.rule = HR_LION;
        return {all_scalars(), lion};
    }
    static std::vector<Case> counted()
    {
        std::vector<Case> all = every_rule();
        for (const int64_t step : {1, 2}) {
            Case damped;
            damped.dampening = 0.5;
            damped.step = step;
            all.push_back(damped);
        }
        return all;
    }

    // ---- Bad inputs ------------------------------------------------------------------------------

    // Everything given, so that everything can be spoiled.
    static Case everything()
    {
        Case c;
        c.numel = {5, 0, 300};
        c.steps = HR_F64;
        c.grad_scale = 2.0f;
        c.found_inf = 0.0f;
        c.clip_coef = 0.5f;
        return c;
    }
    static std::vector<ListRule<Run>> rules()
    {
        using Rule = ListRule<Run>;
        return {
            {"params", tensors<PARAMS>, float_types(), Rule::LEADS},
            {"moments", tensors<MOMENTS>, float_types()},
            {"steps", tensors<STEPS>, {HR_F32, HR_F64}, Rule::MEASURED, true, 1},
            {"grads", tensors<GRADS>, float_types()},
        };
    }
    static BadInputs<Run> refused()
    {
        const auto numbers = [](const char *message, double hr_momentum_config::*member,
                                const std::vector<double> &values, hr_momentum_rule rule) {
            return bad_numbers<Run>(
                message,
                [=](Run &r) -> double & {
                    r.config.rule = rule;
                    return r.config.*member;
                },
                values);
        };
        using Config = hr_momentum_config;
        BadInputs<Run> all = joined<Run>(
            {bad_step<Run>([](Run &r) -> hr_step_config & { return r.config.step; },
                           tensors<STEPS>),
             numbers("momentum is .*, wanted a finite", &Config::momentum, {-0.1, NAN, INFINITY},
                     HR_SGD),
             numbers("dampening is .*, wanted a finite", &Config::dampening, {NAN, -INFINITY},
                     HR_SGD),
             numbers("beta1 is .*, wanted \\[0, 1\\)", &Config::beta1, {-0.1, 1, NAN}, HR_LION),
             numbers("beta2 is .*, wanted \\[0, 1\\)", &Config::beta2, {-0.1, 1, NAN}, HR_LION),
             numbers("weight_decay is .*, wanted a finite", &Config::weight_decay,
                     {-1, NAN, INFINITY}, HR_LION)});
        for (const int rule : {-1, 2})
            all.push_back({"rule is " + std::to_string(rule) + ", wanted HR_SGD or HR_LION",
                           [=](Run &r) { r.config.rule = hr_momentum_rule(rule); }});
        all.push_back({"nesterov is 1, momentum 0.9 and dampening 0.5", [](Run &r) {
                           r.config.nesterov = 1;
                           r.config.dampening = 0.5;
                       }});
        all.push_back({"nesterov is 1, momentum 0 and", [](Run &r) {
                           r.config.nesterov = 1;
                           r.config.momentum = 0;
                       }});
        all.push_back({"moments is given, but SGD without momentum has none",
                       [](Run &r) { r.config.momentum = 0; }});
        return all;
    }
};

// ---- Values --------------------------------------------------------------------------------------

float rounded(double x)
{
    return float(x);
}

// The rule at hr_momentum in headroom.h, in binary32.
void expect_rule(Backend &backend, const MomentumCase &c)
{
    SCOPED_TRACE(testing::PrintToString(c));
    const MomentumRun fresh(backend, c), run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_TRUE(run.whole());
    const hr_momentum_config &h = run.config;
    const double lr = c.lr_on_device == HR_F32 ? double(1e-2f) : 1e-2;
    const float factor = float((c.maximize ? -1.0 : 1.0) * double(c.clip_coef.value_or(1)) /
                               double(c.grad_scale.value_or(1)));
    for (size_t k = 0; k < c.numel.size(); k++) {
        const double t = double(c.step) + (c.steps ? double(k) : 0);
        EXPECT_EQ(run.values(STEPS, k), c.steps ? std::vector<double>{t} : std::vector<double>{});
        EXPECT_EQ(run.values(GRADS, k), fresh.values(GRADS, k));
        const auto ps = fresh.values(PARAMS, k), gs = fresh.values(GRADS, k);
        const bool codes = c.moment == HR_U8;
        const auto ms = codes ? decoded(fresh, MOMENTS, ABSMAXS, k) : fresh.values(MOMENTS, k);
        std::vector<float> wanted_ms;
        const auto new_ps = run.values(PARAMS, k), new_ms = run.values(MOMENTS, k);
        for (size_t i = 0; i < ps.size(); i++) {
            float p = float(ps[i]), g = rounded(gs[i] * double(factor));
            float m = ms.empty() ? 0 : float(ms[i]);
            if (c.rule == HR_LION) {
                const float a = rounded(double(float(h.beta1)) * m),
                            b = rounded(double(float(1 - h.beta1)) * g), u = a + b;
                const float kept = rounded(double(float(1 - lr * h.weight_decay)) * p);
                p = kept - (u > 0 ? float(lr) : u < 0 ? -float(lr) : 0);
                m = rounded(double(rounded(double(float(h.beta2)) * m)) +
                            rounded(double(float(1 - h.beta2)) * g));
            } else {
                g = c.weight_decay != 0 ? fused(float(h.weight_decay), p, g) : g;
                m = t == 1
                        ? g
                        : fused(float(1 - h.dampening), g, rounded(double(float(h.momentum)) * m));
                const float direction = ms.empty()   ? g
                                        : c.nesterov ? fused(float(h.momentum), m, g)
                                                     : m;
                p = fused(float(-lr), direction, p);
            }
            const auto stored = [&](float x, MomentumList list) {
                uint8_t bytes[8];
                encode(x, bytes, run.tensors[list].dtype[k]);
                return decode(bytes, run.tensors[list].dtype[k]);
            };
            ASSERT_EQ(new_ps[i], stored(p, PARAMS)) << "params[" << k << "], element " << i;
            wanted_ms.push_back(m);
            if (!ms.empty() && !codes) {
                ASSERT_EQ(new_ms[i], stored(m, MOMENTS)) << "moments[" << k << "], element " << i;
            }
        }
        if (codes)
            expect_codes(run, MOMENTS, ABSMAXS, k, wanted_ms);
    }
}

// ---- Bits ----------------------------------------------------------------------------------------

std::vector<MomentumCase> bit_cases()
{
    std::vector<MomentumCase> all;
    const std::vector<int64_t> odd = {1, 3, 7, 255, 256, 257, 4097, 0, 64, 33};
    const auto add = [&](MomentumCase c, auto change) {
        change(c);
        all.push_back(c);
    };
    using Case = MomentumCase;
    for (const Case &rule : every_rule()) {
        for (int flags = 0; flags < 4; flags++)
            add(rule, [&](Case &c) {
                c.all_types = c.special = true;
                c.numel.assign(27, 67);
                c.weight_decay = flags & 1 ? 0 : 0.1;
                c.skip_nonfinite = flags & 2;
            });
        for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16})
            for (size_t shift = 0; shift < 4; shift++)
                add(rule, [&](Case &c) {
                    c.numel = odd;
                    c.param = c.grad = type;
                    c.moment = rule.moment == HR_U8 ? HR_U8 : type;
                    c.shift = shift;
                    c.special = shift % 2;
                    c.block_size = 64 << shift;
                });
        // Every list alone at an odd address.
        for (const MomentumList list : {PARAMS, MOMENTS, GRADS})
            for (const hr_dtype type : {HR_F32, HR_BF16})
                add(rule, [&](Case &c) {
                    c.numel = {257, 512};
                    c.param = c.grad = type;
                    c.moment = rule.moment == HR_U8 ? HR_U8 : type;
                    c.shift = type == HR_F32 ? 2 : 4;
                    c.shifted = 1u << list;
                });
        for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
            for (const hr_dtype type : {HR_BF16, HR_F16})
                for (int flags = 0; flags < 4; flags++)
                    if (type == HR_BF16 || mode < HR_WEIGHTS_REMAINDER16)
                        add(rule, [&](Case &c) {
                            c.numel = odd;
                            c.param = c.grad = type;
                            c.moment = rule.moment == HR_U8 ? HR_U8 : flags & 1 ? type : HR_F32;
                            c.block_size = flags & 1 ? 512 : 256;
                            c.special = flags == 2;
                            c.shift = flags == 3;
                            c.skip_nonfinite = flags == 2;
                            c.steps = flags == 1 ? std::optional(HR_F64) : std::nullopt;
                            c.weights = WeightsData::Ask{hr_weights_mode(mode), c.special,
                                                         flags == 0, c.shift};
                        });
        for (const hr_dtype scalar : {HR_F32, HR_F64})
            add(rule, [&](Case &c) {
                c.numel = odd;
                c.steps = c.lr_on_device = scalar;
                c.grad_scale = 3.0f;
                c.clip_coef = 0.7f;
                c.step = 1;
            });
        // Larger than a chunk of any kernel, and than the least that is worth a second thread.
        add(rule, [](Case &c) { c.numel = {100003, 1, 40000}; });
    }
    return all;
}
} // namespace

LISTS_SUITE(Momentum);
SCALARS_SUITE(Momentum);
BAD_INPUTS_SUITE(Momentum);
BITS_SUITE(Momentum, MomentumRun, bit_cases());

TEST_P(MomentumBadInputs, Weights)
{
    MomentumCase c = Momentum::everything();
    c.param = HR_BF16;
    c.weights = every_part();
    EXPECT_EQ(MomentumRun(*backend, c).call(), HR_OK) << hr_last_error();
    expect_all_refused(*backend, c, bad_weights<MomentumRun>(Momentum::tensors<PARAMS>));
}

TEST_P(MomentumBadInputs, CodesAndTheirScales)
{
    using Run = MomentumRun;
    MomentumCase c = Momentum::everything();
    c.moment = HR_U8;
    EXPECT_EQ(Run(*backend, c).call(), HR_OK) << hr_last_error();
    using Rule = ListRule<Run>;
    const Rule absmaxs = {"absmaxs", Momentum::tensors<ABSMAXS>, {HR_F32}, Rule::MEASURED, true, 2};
    const Rule codes = {"moments", Momentum::tensors<MOMENTS>, {HR_U8}};
    expect_all_refused(*backend, c, bad_lists<Run>({absmaxs, codes}));
    for (const int size : {0, 32, 100, 1024, -64})
        expect_all_refused(*backend, c,
                           BadInputs<Run>{{"block_size is " + std::to_string(size) + ", wanted 64",
                                           [=](Run &r) { r.config.block_size = size; }}});
    expect_all_refused(
        *backend, c,
        BadInputs<Run>{{"absmaxs is given, but SGD without momentum has none", [](Run &r) {
                            r.config.momentum = 0;
                            r.tensors[MOMENTS].argument = nullptr;
                        }}});
}

// Values in host memory are looked at too; on a device they could not be without waiting for it.
TEST(MomentumBadInputsOnTheCpu, Values)
{
    MomentumCase c = Momentum::everything();
    c.grad_scale = 0.0f;
    MomentumRun scaled(cpu_backend(), c);
    expect_refused(scaled, {"\\*grad_scale is .*, wanted a finite number > 0", [](auto &) {}});
    c = Momentum::everything();
    c.step = -1;
    MomentumRun counted(cpu_backend(), c);
    expect_refused(counted, {"steps\\[0\\] holds -2", [](auto &) {}});
}

using MomentumValues = OnBackend;
ON_EVERY_BACKEND(MomentumValues);

TEST_P(MomentumValues, EveryTypeRuleAndOption)
{
    for (MomentumCase c : every_rule())
        for (int flags = 0; flags < 4; flags++) {
            c.numel.assign(27, 65);
            c.all_types = true;
            c.weight_decay = flags & 1 ? 0 : 0.1;
            c.dampening = flags & 2 && !c.nesterov ? 0.3 : 0;
            expect_rule(*backend, c);
        }
}

TEST_P(MomentumValues, WholeTilesOfTheCommonTypes)
{
    for (MomentumCase c : every_rule())
        for (const hr_dtype type : {HR_F32, HR_BF16, HR_F16}) {
            c.numel = {2063, 0, 512};
            c.param = c.grad = type;
            c.moment = c.moment == HR_U8 ? HR_U8 : type;
            expect_rule(*backend, c);
        }
}

TEST_P(MomentumValues, BlocksOfEverySize)
{
    for (MomentumCase c : every_rule())
        for (c.block_size = 64; c.moment == HR_U8 && c.block_size <= 512; c.block_size *= 2) {
            c.numel = {1, 63, 64, 65, 511, 512, 513, 2063, 40001};
            expect_rule(*backend, c);
        }
}

TEST_P(MomentumValues, EveryWayToGiveStepAndScalars)
{
    for (MomentumCase c : every_rule()) {
        c.numel = {9, 33, 0, 17};
        for_every_way_to_give_scalars(c, [&](const MomentumCase &e) { expect_rule(*backend, e); });
    }
}

TEST_P(MomentumValues, TheFirstStepDoesNotDamp)
{
    MomentumCase c;
    c.numel = {257};
    c.dampening = 0.75;
    for_steps(c, {1, 2, 10, (int64_t(1) << 32) + 1},
              [&](const MomentumCase &each) { expect_rule(*backend, each); });
}

// A NaN is never lost, and a gradient of zero moves nothing.
TEST_P(MomentumValues, NanZeroAndInfinity)
{
    for (MomentumCase c : every_rule())
        for (const double value : {double(NAN), double(INFINITY), 0.0}) {
            c.numel = {17};
            c.weight_decay = 0;
            const MomentumRun clean(*backend, c), before(*backend, c);
            c.spoiled = GRADS;
            c.spoil = value;
            const MomentumRun run(*backend, c);
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            std::vector<double> got = run.values(PARAMS, 0), wanted = clean.values(PARAMS, 0);
            const double moved = std::fabs(got[0] - before.values(PARAMS, 0)[0]);
            if (std::isnan(value)) {
                EXPECT_TRUE(std::isnan(got[0]));
            } else if (c.rule == HR_LION && value != 0) {
                EXPECT_NEAR(moved, 1e-2, 1e-6);
            } else if (value != 0) {
                EXPECT_TRUE(std::isinf(got[0]));
            } else if (c.momentum == 0) {
                EXPECT_EQ(moved, 0);
            }
            got[0] = wanted[0] = 0;
            EXPECT_EQ(got, wanted);
            if (c.moment == HR_U8 && value != 0) {
                EXPECT_TRUE(std::isnan(run.values(ABSMAXS, 0)[0])); // and so its block
            }
        }
}

TEST_P(MomentumValues, ElementsOfGradientsThatAreNotFiniteMayBeLeftAlone)
{
    for (MomentumCase c : every_rule())
        for (const double value : {double(NAN), -double(INFINITY)}) {
            c.numel = {17, 3};
            const MomentumRun clean(*backend, c), before(*backend, c);
            c.skip_nonfinite = true;
            c.spoiled = GRADS;
            c.spoil = value;
            const MomentumRun run(*backend, c);
            ASSERT_EQ(clean.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
            for (const MomentumList l : {PARAMS, MOMENTS}) {
                std::vector<double> wanted = clean.values(l, 0);
                if (l == MOMENTS && c.moment == HR_U8) // whose scale the element is part of
                    continue;
                if (!wanted.empty())
                    wanted[0] = before.values(l, 0)[0];
                EXPECT_EQ(run.values(l, 0), wanted) << momentum_list_names[l];
            }
        }
}
