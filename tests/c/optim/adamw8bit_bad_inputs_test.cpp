// Every argument that hr_adamw8bit() refuses: the status, the words, and that no byte changed.
#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/optim/step_suites.h"

namespace
{
using Call = Adamw8bitRun;

struct Adamw8bit {
    using Case = Adamw8bitCase;
    using Run = Adamw8bitRun;

    static Tensors &steps(Run &r)
    {
        return r.steps;
    }
    static Tensors &params(Run &r)
    {
        return r.params;
    }
    static hr_adamw_config &adamw(Run &r)
    {
        return r.config.adamw;
    }
    static void expect(Backend &backend, const Case &c)
    {
        const Run run(backend, c);
        EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    }

    // Everything given, so that everything can be spoiled.
    static Case everything()
    {
        Case c;
        c.numel = {5, 0, 300};
        c.steps = HR_F64;
        c.stochastic = true;
        c.grad_scale = 2.0f;
        c.found_inf = 0.0f;
        c.clip_coef = 0.5f;
        return c;
    }

    static std::vector<ListRule<Run>> rules()
    {
        using Rule = ListRule<Run>;
        return {
            {"params", &Run::params, float_types(), Rule::LEADS},
            {"exp_avgs", &Run::exp_avgs, {HR_U8}},
            {"exp_avg_absmaxs", &Run::exp_avg_absmaxs, {HR_F32}, Rule::MEASURED, false, 2},
            {"exp_avg_sqs", &Run::exp_avg_sqs, {HR_U8}},
            {"exp_avg_sq_absmaxs", &Run::exp_avg_sq_absmaxs, {HR_F32}, Rule::MEASURED, false, 2},
            {"steps", &Run::steps, {HR_F32, HR_F64}, Rule::MEASURED, true, 1},
            {"grads", &Run::grads, float_types()},
        };
    }

    static BadInputs<Run> refused()
    {
        BadInputs<Run> all = {
            // A scale too many, and the number that blocks of another size would need.
            {"exp_avg_absmaxs\\[0\\] has numel 2, wanted 1",
             [](Run &r) { r.exp_avg_absmaxs.numel[0] = 2; }},
            {"exp_avg_sq_absmaxs\\[1\\] has numel 1, wanted 0",
             [](Run &r) { r.exp_avg_sq_absmaxs.numel[1] = 1; }},
            {"exp_avg_absmaxs\\[2\\] has numel 2, wanted 5, one per 64 elements",
             [](Run &r) { r.config.block_size = 64; }},
            {"config->size is .*, wanted", [](Run &r) { r.config.size = sizeof(hr_adamw_config); }},
            {"config->adamw.size is 999, wanted", [](Run &r) { r.config.adamw.size = 999; }},
            {"amsgrad is 1, wanted 0", [](Run &r) { r.config.adamw.amsgrad = 1; }},
        };
        for (const int32_t size : {0, -256, 1, 32, 96, 255, 1024, INT32_MIN})
            all.push_back({"block_size is " + std::to_string(size) + ", wanted 64, 128, 256 or 512",
                           [=](Run &r) { r.config.block_size = size; }});
        return joined<Run>(
            {all,
             bad_step<Run>([](Run &r) -> hr_step_config & { return r.config.adamw.step; }, steps),
             bad_adam<Run>(adamw)});
    }
};
} // namespace

BAD_INPUTS_SUITE(Adamw8bit);

TEST_P(Adamw8bitBadInputs, WhatBnbExactExcludes)
{
    Adamw8bitCase c = Adamw8bit::everything();
    c.stochastic = false;
    c.bnb_exact = true;
    Adamw8bit::expect(*backend, c);
    expect_all_refused<Call>(
        *backend, c,
        {{"bnb_exact needs decoupled", [](Call &r) { r.config.adamw.decoupled = 0; }},
         {"block_size is 128, but bnb_exact needs 256", [](Call &r) { r.config.block_size = 128; }},
         {"bnb_exact excludes skip_nonfinite",
          [](Call &r) { r.config.adamw.step.skip_nonfinite = 1; }},
         {"bnb_exact excludes seeds", [](Call &r) { r.config.seeds = r.seeds.data(); }},
         {"bnb_exact excludes weights", [](Call &r) {
              static const hr_weights weights = HR_WEIGHTS_INIT;
              r.config.adamw.step.weights = &weights;
          }}});
}

TEST_P(Adamw8bitBadInputs, Weights)
{
    Adamw8bitCase c = Adamw8bit::everything();
    c.param = {HR_BF16};
    c.weights = every_part();
    Adamw8bit::expect(*backend, c);
    expect_all_refused(*backend, c, bad_weights<Call>(Adamw8bit::params));
}

// Values in host memory are looked at too; on a device they could not be without waiting for it.
TEST(Adamw8bitBadInputsOnTheCpu, Values)
{
    const auto refused = [](const Adamw8bitCase &c, const char *words) {
        Call run(cpu_backend(), c);
        expect_refused(run, {words, [](Call &) {}});
    };
    Adamw8bitCase c = Adamw8bit::everything();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        refused(c, "\\*grad_scale is .*, wanted a finite number > 0");
    }
    c = Adamw8bit::everything();
    c.lr_on_device = HR_F64;
    c.lr = -2;
    refused(c, "\\*lr_ptr is -2");
    c = Adamw8bit::everything();
    c.step = -1;
    refused(c, "steps\\[0\\] holds -2");
}

TEST(DynamicMap, NeedsSomewhereToWrite)
{
    EXPECT_EQ(hr_dynamic_map(nullptr, 1), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_dynamic_map: values is NULL"));
}
