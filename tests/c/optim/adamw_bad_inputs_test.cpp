// Every argument that hr_adamw() refuses: the status, the words, and that no byte changed.
#include <cmath>
#include <functional>
#include <string>

#include "tests/c/optim/adamw_run.h"
#include "tests/c/harness/matches.h"

namespace
{
struct BadInput {
    std::string message; // a pattern: which argument, what was got
    std::function<void(AdamwRun &)> spoil;
};

// A good call with everything given, so that everything can be spoiled.
AdamwCase good()
{
    AdamwCase c;
    c.numel = {5, 0, 300};
    c.amsgrad = true;
    c.steps = HR_F64;
    c.grad_scale = 2.0f;
    c.found_inf = 0.0f;
    c.clip_coef = 0.5f;
    return c;
}

template <class T> T *moved(T *pointer, size_t bytes)
{
    return reinterpret_cast<T *>(reinterpret_cast<uintptr_t>(pointer) + bytes);
}

std::vector<BadInput> bad_lists()
{
    std::vector<BadInput> all;
    for (int i = 0; i < LISTS; i++) {
        const std::string name = adamw_list_names[i];
        const auto add = [&](const std::string &message, std::function<void(AdamwRun &)> spoil) {
            all.push_back({message, std::move(spoil)});
        };
        if (i == MAX_EXP_AVG_SQS)
            add("amsgrad is 1.*max_exp_avg_sqs is NULL",
                [=](AdamwRun &r) { r.list_arguments[i] = nullptr; });
        else if (i != STEPS)
            add(name + " is NULL", [=](AdamwRun &r) { r.list_arguments[i] = nullptr; });
        add(name + "->data is NULL", [=](AdamwRun &r) { r.lists[i].data = nullptr; });
        add(name + "->numel is NULL", [=](AdamwRun &r) { r.lists[i].numel = nullptr; });
        add(name + "->dtype is NULL", [=](AdamwRun &r) { r.lists[i].dtype = nullptr; });
        add(name + "->count is -1", [=](AdamwRun &r) { r.lists[i].count = -1; });
        add(i == PARAMS ? "count is 3, wanted 2" : name + "->count is 2, wanted 3",
            [=](AdamwRun &r) { r.lists[i].count = 2; });
        add(name + "\\[2\\] is NULL", [=](AdamwRun &r) { r.data[i][2] = nullptr; });
        add(name + "\\[2\\] is at .* not a multiple of [248] bytes",
            [=](AdamwRun &r) { r.data[i][2] = moved(r.data[i][2], 1); });
        add(name + "\\[0\\] has numel -4", [=](AdamwRun &r) { r.numel[i][0] = -4; });
        add(i == PARAMS  ? "\\[2\\] has numel 300, wanted 299"
            : i == STEPS ? "steps\\[2\\] has numel 299, wanted 1"
                         : name + "\\[2\\] has numel 299, wanted 300",
            [=](AdamwRun &r) { r.numel[i][2] = 299; });
        for (const int type :
             {int(HR_U8), int(HR_I16), 7, -1, i == STEPS ? int(HR_BF16) : int(HR_F64)})
            add(name + "\\[2\\] has dtype .*\\(" + std::to_string(type) + "\\), wanted f32",
                [=](AdamwRun &r) { r.dtype[i][2] = hr_dtype(type); });
        if (i == EXP_AVG_SQS || i == MAX_EXP_AVG_SQS)
            add(name + "\\[2\\] has another dtype", [=](AdamwRun &r) { r.dtype[i][2] = HR_BF16; });
    }
    all.push_back(
        {"amsgrad is 0, but max_exp_avg_sqs is given", [](AdamwRun &r) { r.config.amsgrad = 0; }});
    all.push_back(
        {"params has more than 2\\^59 elements", [](AdamwRun &r) {
             for (const AdamwList l : {PARAMS, EXP_AVGS, EXP_AVG_SQS, MAX_EXP_AVG_SQS, GRADS})
                 r.numel[l][2] = INT64_MAX;
         }});
    return all;
}

std::vector<BadInput> bad_configs()
{
    std::vector<BadInput> all = {
        {"config is NULL", [](AdamwRun &r) { r.config_argument = nullptr; }},
        {"config->size is 0, wanted", [](AdamwRun &r) { r.config.size = 0; }},
        {"config->size is 999, wanted", [](AdamwRun &r) { r.config.size = 999; }},
        {"config->step.t is 0, wanted 1",
         [](AdamwRun &r) {
             r.list_arguments[STEPS] = nullptr;
             r.config.step.t = 0;
         }},
        {"config->step.t is -3, wanted 1",
         [](AdamwRun &r) {
             r.list_arguments[STEPS] = nullptr;
             r.config.step.t = -3;
         }},
        {"config->step.reserved\\[3\\] is 7, wanted 0",
         [](AdamwRun &r) { r.config.step.reserved[3] = 7; }},
        {"lr_ptr has dtype bf16", [](AdamwRun &r) { r.config.step.lr_dtype = HR_BF16; }},
        {"lr_ptr is at .* not a multiple of 8",
         [](AdamwRun &r) {
             r.config.step.lr_ptr = moved(r.config.step.clip_coef, 4);
             r.config.step.lr_dtype = HR_F64;
         }},
        {"grad_scale is at .* not a multiple of 4",
         [](AdamwRun &r) { r.config.step.grad_scale = moved(r.config.step.grad_scale, 1); }},
        {"found_inf is at .* not a multiple of 4",
         [](AdamwRun &r) { r.config.step.found_inf = moved(r.config.step.found_inf, 2); }},
        {"clip_coef is at .* not a multiple of 4",
         [](AdamwRun &r) { r.config.step.clip_coef = moved(r.config.step.clip_coef, 3); }},
        {"exec is NULL", [](AdamwRun &r) { r.exec_argument = nullptr; }},
        {"exec->device is -2", [](AdamwRun &r) { r.exec.device = -2; }},
    };
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
        all.push_back(
            {"lr is .*, wanted a finite number >= 0", [=](AdamwRun &r) { r.config.step.lr = lr; }});
    for (const auto &number : numbers)
        for (const double value : number.values)
            all.push_back({number.message, [=](AdamwRun &r) { r.config.*number.member = value; }});
    return all;
}

// With weights that have everything a mode can ask for.
AdamwCase good_weights()
{
    AdamwCase c = good();
    c.param = HR_BF16;
    c.weights = WeightsData::Ask{HR_WEIGHTS_REMAINDER8_STOCHASTIC, true, true};
    return c;
}

std::vector<BadInput> bad_weights()
{
    std::vector<BadInput> all = {
        {"weights->size is 0, wanted", [](AdamwRun &r) { r.weights->weights.size = 0; }},
        {"weights->size is 999, wanted", [](AdamwRun &r) { r.weights->weights.size = 999; }},
        {"weights->residuals is NULL, but HR_WEIGHTS_REMAINDER8_STOCHASTIC needs them",
         [](AdamwRun &r) { r.weights->weights.residuals = nullptr; }},
        {"weights->residuals is given, but HR_WEIGHTS_STOCHASTIC has none",
         [](AdamwRun &r) { r.weights->weights.mode = HR_WEIGHTS_STOCHASTIC; }},
        {"residuals\\[0\\] has dtype i8, but HR_WEIGHTS_REMAINDER16 needs i16",
         [](AdamwRun &r) { r.weights->weights.mode = HR_WEIGHTS_REMAINDER16; }},
        {"residuals\\[2\\] has dtype u8", [](AdamwRun &r) { r.weights->dtype[2] = HR_U8; }},
        {"residuals\\[2\\] is NULL", [](AdamwRun &r) { r.weights->data[2] = nullptr; }},
        {"residuals->count is 2, wanted 3", [](AdamwRun &r) { r.weights->residuals.count = 2; }},
        {"weights->seeds is NULL, but HR_WEIGHTS_REMAINDER8_STOCHASTIC needs them",
         [](AdamwRun &r) { r.weights->weights.seeds = nullptr; }},
        {"weights->seeds is given, but HR_WEIGHTS_REMAINDER8 has no use",
         [](AdamwRun &r) { r.weights->weights.mode = HR_WEIGHTS_REMAINDER8; }},
        {"params\\[2\\] has dtype f16, which HR_WEIGHTS_REMAINDER8_STOCHASTIC does not take",
         [](AdamwRun &r) { r.dtype[PARAMS][2] = HR_F16; }},
        {"params\\[0\\] has dtype f32, which", [](AdamwRun &r) { r.dtype[PARAMS][0] = HR_F32; }},
        {"places\\[1\\] is \\{-1, 37, 1000\\}",
         [](AdamwRun &r) { r.weights->places[1].offset = -1; }},
        {"places\\[1\\] is \\{8, 0, 1000\\}", [](AdamwRun &r) { r.weights->places[1].run = 0; }},
        {"places\\[1\\] is \\{8, 37, -5\\}", [](AdamwRun &r) { r.weights->places[1].stride = -5; }},
        {"places\\[0\\] is \\{-1, 37, 1000\\}",
         [](AdamwRun &r) { r.weights->places[0].offset = -1; }},
        {"places\\[0\\] reaches past",
         [](AdamwRun &r) { r.weights->places[0].offset = INT64_MAX / 4; }},
        {"places\\[0\\] reaches past",
         [](AdamwRun &r) { r.weights->places[0].run = INT64_MAX / 4; }},
        {"places\\[2\\] reaches past", // by the least; there are 300 / 37 = 8 runs
         [](AdamwRun &r) { r.weights->places[2].stride = INT64_MAX / 4 / 8; }},
        {"weights->stalled is at .* not a multiple of 8",
         [](AdamwRun &r) { r.weights->weights.stalled = moved(r.weights->weights.stalled, 4); }},
    };
    const char *const names[] = {
        "HR_WEIGHTS_NEAREST has none",           "HR_WEIGHTS_STOCHASTIC has none",
        "HR_WEIGHTS_KAHAN needs them",           "HR_WEIGHTS_MASTER needs them",
        "HR_WEIGHTS_REMAINDER16 needs them",     "HR_WEIGHTS_REMAINDER8 needs them",
        "HR_WEIGHTS_REMAINDER8_STOCHASTIC needs"};
    for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        all.push_back(
            {std::string("weights->residuals is .*, but ") + names[mode], [=](AdamwRun &r) {
                 r.weights->weights.mode = hr_weights_mode(mode);
                 if (mode >= HR_WEIGHTS_KAHAN)
                     r.weights->weights.residuals = nullptr;
             }});
    for (const int mode : {-1, 7, 1000})
        all.push_back({"weights->mode is " + std::to_string(mode),
                       [=](AdamwRun &r) { r.weights->weights.mode = hr_weights_mode(mode); }});
    return all;
}

void expect_refused(Backend &backend, const AdamwCase &c, const BadInput &bad)
{
    SCOPED_TRACE("expecting " + bad.message);
    AdamwRun run(backend, c);
    const std::vector<uint8_t> before = run.image();
    bad.spoil(run);
    EXPECT_EQ(run.call(), HR_INVALID_ARGUMENT) << hr_last_error();
    EXPECT_TRUE(matches(hr_last_error(), bad.message));
    EXPECT_EQ(run.image(), before);
    EXPECT_TRUE(run.whole());
}
} // namespace

using AdamwBadInputs = OnBackend;
ON_EVERY_BACKEND(AdamwBadInputs);

TEST_P(AdamwBadInputs, TheCallIsGoodBefore)
{
    AdamwRun run(*backend, good());
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST_P(AdamwBadInputs, Lists)
{
    for (const BadInput &bad : bad_lists())
        expect_refused(*backend, good(), bad);
}

TEST_P(AdamwBadInputs, Config)
{
    for (const BadInput &bad : bad_configs())
        expect_refused(*backend, good(), bad);
}

TEST_P(AdamwBadInputs, Weights)
{
    AdamwRun run(*backend, good_weights());
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
    for (const BadInput &bad : bad_weights())
        expect_refused(*backend, good_weights(), bad);
}

// Values in host memory are looked at too; on a device they could not be without waiting for it.
TEST(AdamwBadInputsOnTheCpu, Values)
{
    AdamwCase c = good();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        expect_refused(cpu_backend(), c,
                       {"\\*grad_scale is .*, wanted a finite number > 0", [](AdamwRun &) {}});
    }
    c = good();
    c.step = -1;
    expect_refused(cpu_backend(), c, {"steps\\[0\\] holds -2", [](AdamwRun &) {}});
}

TEST(AdamwBadInputsOnTheCpu, ADeviceThatDoesNotExist)
{
    AdamwRun run(cpu_backend(), good());
    const std::vector<uint8_t> before = run.image();
    run.exec.device = 1000;
    const hr_status got = run.call();
    EXPECT_TRUE(got == HR_NO_DEVICE || got == HR_UNSUPPORTED) << got;
    EXPECT_TRUE(matches(hr_last_error(), "exec->device is 1000"));
    EXPECT_EQ(run.image(), before);
}
