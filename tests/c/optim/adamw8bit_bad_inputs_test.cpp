// Every argument that hr_adamw8bit() refuses: the status, the words, and that no byte changed.
#include <cmath>

#include "tests/c/optim/adamw8bit_run.h"
#include "tests/c/harness/refused.h"

using Adamw8bitBadInputs = OnBackend;
ON_EVERY_BACKEND(Adamw8bitBadInputs);

namespace
{
using Call = Adamw8bitRun;
using Bad = BadInput<Call>;

// Everything given, so that everything can be spoiled.
Adamw8bitCase good()
{
    Adamw8bitCase c;
    c.numel = {5, 0, 300};
    c.steps = HR_F64;
    c.stochastic = true;
    c.grad_scale = 2.0f;
    c.found_inf = 0.0f;
    c.clip_coef = 0.5f;
    return c;
}

void expect_all_refused(Backend &backend, const Adamw8bitCase &c, const std::vector<Bad> &all)
{
    for (const Bad &bad : all) {
        Call run(backend, c);
        expect_refused(run, bad);
    }
}

// What every list is refused for. The last of its three tensors has `numel` elements.
std::vector<Bad> bad_list(Tensors Call::*list, const std::string &name, const std::string &types,
                          int64_t numel)
{
    const std::string one_less = std::to_string(numel - 1), wanted = std::to_string(numel);
    std::vector<Bad> all = {
        {name + "->data is NULL", [=](Call &r) { (r.*list).list.data = nullptr; }},
        {name + "->numel is NULL", [=](Call &r) { (r.*list).list.numel = nullptr; }},
        {name + "->dtype is NULL", [=](Call &r) { (r.*list).list.dtype = nullptr; }},
        {name + "->count is -1", [=](Call &r) { (r.*list).list.count = -1; }},
        {list == &Call::params ? "count is 3, wanted 2" : name + "->count is 2, wanted 3",
         [=](Call &r) { (r.*list).list.count = 2; }},
        {name + "\\[0\\] has numel -4", [=](Call &r) { (r.*list).numel[0] = -4; }},
        {(list == &Call::params ? "exp_avgs\\[2\\] has numel 300, wanted 299"
                                : name + "\\[2\\] has numel " + one_less + ", wanted " + wanted),
         [=](Call &r) { (r.*list).numel[2]--; }},
        {name + "\\[2\\] is NULL", [=](Call &r) { (r.*list).data[2] = nullptr; }},
    };
    if (types != "u8")
        all.push_back({name + "\\[2\\] is at .* not a multiple of [248] bytes",
                       [=](Call &r) { (r.*list).data[2] = moved((r.*list).data[2], 1); }});
    const std::vector<int> others = {int(types == "u8" ? HR_F32 : HR_U8), int(HR_I8), int(HR_I16),
                                     7, -1};
    for (const int type : others)
        all.push_back(
            {name + "\\[2\\] has dtype .*\\(" + std::to_string(type) + "\\), wanted " + types + "$",
             [=](Call &r) { (r.*list).dtype[2] = hr_dtype(type); }});
    return all;
}
} // namespace

TEST_P(Adamw8bitBadInputs, TheCallIsGoodBefore)
{
    const Call run(*backend, good());
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST_P(Adamw8bitBadInputs, Lists)
{
    const struct {
        Tensors Call::*list;
        const char *name, *types;
        int64_t numel;
    } lists[] = {
        {&Call::params, "params", "f32, bf16 or f16", 300},
        {&Call::exp_avgs, "exp_avgs", "u8", 300},
        {&Call::exp_avg_absmaxs, "exp_avg_absmaxs", "f32", 2},
        {&Call::exp_avg_sqs, "exp_avg_sqs", "u8", 300},
        {&Call::exp_avg_sq_absmaxs, "exp_avg_sq_absmaxs", "f32", 2},
        {&Call::steps, "steps", "f32 or f64", 1},
        {&Call::grads, "grads", "f32, bf16 or f16", 300},
    };
    for (const auto &l : lists) {
        std::vector<Bad> all = bad_list(l.list, l.name, l.types, l.numel);
        if (l.list != &Call::steps)
            all.push_back({std::string(l.name) + " is NULL",
                           [=](Call &r) { (r.*(l.list)).argument = nullptr; }});
        for (const hr_dtype type : {HR_BF16, HR_F16, HR_F64})
            if (std::string(l.types) == "f32")
                all.push_back({std::string(l.name) + "\\[2\\] has dtype .*, wanted f32$",
                               [=](Call &r) { (r.*(l.list)).dtype[2] = type; }});
        expect_all_refused(*backend, good(), all);
    }
    // A scale too many, and the number that blocks of another size would need.
    expect_all_refused(
        *backend, good(),
        {{"exp_avg_absmaxs\\[0\\] has numel 2, wanted 1",
          [](Call &r) { r.exp_avg_absmaxs.numel[0] = 2; }},
         {"exp_avg_sq_absmaxs\\[1\\] has numel 1, wanted 0",
          [](Call &r) { r.exp_avg_sq_absmaxs.numel[1] = 1; }},
         {"exp_avg_absmaxs\\[2\\] has numel 2, wanted 5, one per 64 elements",
          [](Call &r) { r.config.block_size = 64; }},
         {"params has more than 2\\^59 elements", [](Call &r) { r.params.numel[2] = INT64_MAX; }}});
}

TEST_P(Adamw8bitBadInputs, Config)
{
    std::vector<Bad> all = {
        {"config is NULL", [](Call &r) { r.config_argument = nullptr; }},
        {"config->size is 0, wanted", [](Call &r) { r.config.size = 0; }},
        {"config->size is .*, wanted", [](Call &r) { r.config.size = sizeof(hr_adamw_config); }},
        {"config->adamw.size is 999, wanted", [](Call &r) { r.config.adamw.size = 999; }},
        {"config->adamw.step.t is 0, wanted 1",
         [](Call &r) {
             r.steps.argument = nullptr;
             r.config.adamw.step.t = 0;
         }},
        {"amsgrad is 1, wanted 0", [](Call &r) { r.config.adamw.amsgrad = 1; }},
        {"lr_ptr has dtype bf16", [](Call &r) { r.config.adamw.step.lr_dtype = HR_BF16; }},
        {"lr_ptr is at .* not a multiple of 4",
         [](Call &r) { r.config.adamw.step.lr_ptr = moved(r.config.adamw.step.clip_coef, 1); }},
        {"grad_scale is at .* not a multiple of 4",
         [](Call &r) {
             r.config.adamw.step.grad_scale = moved(r.config.adamw.step.grad_scale, 1);
         }},
        {"found_inf is at .* not a multiple of 4",
         [](Call &r) { r.config.adamw.step.found_inf = moved(r.config.adamw.step.found_inf, 2); }},
        {"clip_coef is at .* not a multiple of 4",
         [](Call &r) { r.config.adamw.step.clip_coef = moved(r.config.adamw.step.clip_coef, 3); }},
        {"exec is NULL", [](Call &r) { r.exec_argument = nullptr; }},
        {"exec->device is -2", [](Call &r) { r.exec.device = -2; }},
    };
    for (const int32_t size : {0, -256, 1, 32, 96, 255, 1024, INT32_MIN})
        all.push_back({"block_size is " + std::to_string(size) + ", wanted 64, 128, 256 or 512",
                       [=](Call &r) { r.config.block_size = size; }});
    const struct {
        const char *message;
        double hr_adamw_config::*member;
        std::vector<double> values;
    } numbers[] = {
        {"beta1 is .*, wanted \\[0, 1\\)", &hr_adamw_config::beta1, {-0.1, 1, NAN, INFINITY}},
        {"beta2 is .*, wanted \\[0, 1\\)", &hr_adamw_config::beta2, {-0.1, 1, NAN, INFINITY}},
        {"eps is .*, wanted a finite number >= 0", &hr_adamw_config::eps, {-1e-8, NAN, INFINITY}},
        {"weight_decay is .*, wanted a finite",
         &hr_adamw_config::weight_decay,
         {-1, NAN, INFINITY}},
    };
    for (const double lr : {-1e-3, double(NAN), double(INFINITY)})
        all.push_back({"lr is .*, wanted a finite number >= 0",
                       [=](Call &r) { r.config.adamw.step.lr = lr; }});
    for (const auto &number : numbers)
        for (const double value : number.values)
            all.push_back(
                {number.message, [=](Call &r) { r.config.adamw.*number.member = value; }});
    expect_all_refused(*backend, good(), all);
}

TEST_P(Adamw8bitBadInputs, WhatBnbExactExcludes)
{
    Adamw8bitCase c = good();
    c.stochastic = false;
    c.bnb_exact = true;
    const Call run(*backend, c);
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    expect_all_refused(
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
    Adamw8bitCase c = good();
    c.param = {HR_BF16};
    c.weights = WeightsData::Ask{HR_WEIGHTS_REMAINDER8_STOCHASTIC, true, true};
    const Call run(*backend, c);
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    expect_all_refused(
        *backend, c,
        {{"weights->size is 0, wanted", [](Call &r) { r.weights->weights.size = 0; }},
         {"weights->mode is 7", [](Call &r) { r.weights->weights.mode = hr_weights_mode(7); }},
         {"weights->residuals is NULL", [](Call &r) { r.weights->weights.residuals = nullptr; }},
         {"residuals\\[2\\] is NULL", [](Call &r) { r.weights->data[2] = nullptr; }},
         {"weights->seeds is NULL", [](Call &r) { r.weights->weights.seeds = nullptr; }},
         {"params\\[2\\] has dtype f16, which HR_WEIGHTS_REMAINDER8_STOCHASTIC does not take",
          [](Call &r) { r.params.dtype[2] = HR_F16; }},
         {"places\\[1\\] is \\{8, 0, 1000\\}", [](Call &r) { r.weights->places[1].run = 0; }}});
}

// Values in host memory are looked at too; on a device they could not be without waiting for it.
TEST(Adamw8bitBadInputsOnTheCpu, Values)
{
    Adamw8bitCase c = good();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        expect_all_refused(cpu_backend(), c,
                           {{"\\*grad_scale is .*, wanted a finite number > 0", [](Call &) {}}});
    }
    c = good();
    c.lr_on_device = HR_F64;
    c.lr = -2;
    expect_all_refused(cpu_backend(), c, {{"\\*lr_ptr is -2", [](Call &) {}}});
    c = good();
    c.step = -1;
    expect_all_refused(cpu_backend(), c, {{"steps\\[0\\] holds -2", [](Call &) {}}});
}

TEST(Adamw8bitBadInputsOnTheCpu, ADeviceThatDoesNotExist)
{
    Call run(cpu_backend(), good());
    expect_no_such_device(run);
}

TEST(DynamicMap, NeedsSomewhereToWrite)
{
    EXPECT_EQ(hr_dynamic_map(nullptr, 1), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_dynamic_map: values is NULL"));
}
