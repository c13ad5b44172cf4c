// step_suites.h: what is asked of every optimizer's op: the scalars of its step, and what it refuses
// of them and of the storage of its weights. Beside what suites.h asks of the description of an op:
//
//     static hr_step_config &step(Run &);
//     static const Tensors &steps(const Run &);    // the counters
//     static Case all_scalars();                   // everything on the device, in 4 tensors
//     static std::vector<Case> skipped();          // which found_inf has to leave alone
//     static std::vector<Case> counted();          // whose counters may be on the device
//
// SCALARS_SUITE(Op) makes the tests.
#pragma once

#include <cmath>

#include "tests/c/harness/suites.h"
#include "tests/c/weights/weights_data.h"

// ---- Refused -------------------------------------------------------------------------------------

template <class Run> using StepOf = std::function<hr_step_config &(Run &)>;

// With every scalar on the device, and counters in `steps`.
template <class Run> BadInputs<Run> bad_step(StepOf<Run> step, Tensors &(*steps)(Run &))
{
    BadInputs<Run> all = {
        {"step.reserved\\[3\\] is 7, wanted 0", [=](Run &r) { step(r).reserved[3] = 7; }},
        {"lr_ptr has dtype bf16", [=](Run &r) { step(r).lr_dtype = HR_BF16; }},
        {"lr_ptr is at .* not a multiple of 8",
         [=](Run &r) {
             step(r).lr_ptr = moved(step(r).clip_coef, 4);
             step(r).lr_dtype = HR_F64;
         }},
        {"lr_ptr is at .* not a multiple of 4",
         [=](Run &r) {
             step(r).lr_ptr = moved(step(r).clip_coef, 1);
             step(r).lr_dtype = HR_F32;
         }},
        {"grad_scale is at .* not a multiple of 4",
         [=](Run &r) { step(r).grad_scale = moved(step(r).grad_scale, 1); }},
        {"found_inf is at .* not a multiple of 4",
         [=](Run &r) { step(r).found_inf = moved(step(r).found_inf, 2); }},
        {"clip_coef is at .* not a multiple of 4",
         [=](Run &r) { step(r).clip_coef = moved(step(r).clip_coef, 3); }},
    };
    for (const int64_t t : {0, -3})
        all.push_back({"step.t is " + std::to_string(t) + ", wanted 1", [=](Run &r) {
                           steps(r).argument = nullptr;
                           step(r).t = t;
                       }});
    for (const double lr : {-1e-3, double(NAN), double(INFINITY)})
        all.push_back({"lr is .*, wanted a finite number >= 0", [=](Run &r) {
                           step(r).lr_ptr = nullptr;
                           step(r).lr = lr;
                       }});
    return all;
}

template <class Run> BadInputs<Run> bad_adam(hr_adamw_config &(*config)(Run &))
{
    const auto bad = [=](const char *message, double hr_adamw_config::*member,
                         const std::vector<double> &values) {
        return bad_numbers<Run>(
            message, [=](Run &r) -> double & { return config(r).*member; }, values);
    };
    using Config = hr_adamw_config;
    return joined<Run>({
        bad("beta1 is .*, wanted \\[0, 1\\)", &Config::beta1, {-0.1, 1, NAN, INFINITY}),
        bad("beta2 is .*, wanted \\[0, 1\\)", &Config::beta2, {-0.1, 1, NAN, INFINITY}),
        bad("eps is .*, wanted a finite number >= 0", &Config::eps, {-1e-8, NAN, INFINITY}),
        bad("weight_decay is .*, wanted a finite", &Config::weight_decay, {-1, NAN, INFINITY}),
    });
}

// Of a run whose weights have everything that a mode can ask for.
inline WeightsData::Ask every_part()
{
    return {HR_WEIGHTS_REMAINDER8_STOCHASTIC, true, true};
}

template <class Run> BadInputs<Run> bad_weights(Tensors &(*params)(Run &))
{
    BadInputs<Run> all = {
        {"weights->size is 0, wanted", [](Run &r) { r.weights->weights.size = 0; }},
        {"weights->size is 999, wanted", [](Run &r) { r.weights->weights.size = 999; }},
        {"weights->residuals is NULL, but HR_WEIGHTS_REMAINDER8_STOCHASTIC needs them",
         [](Run &r) { r.weights->weights.residuals = nullptr; }},
        {"weights->residuals is given, but HR_WEIGHTS_STOCHASTIC has none",
         [](Run &r) { r.weights->weights.mode = HR_WEIGHTS_STOCHASTIC; }},
        {"residuals\\[0\\] has dtype i8, but HR_WEIGHTS_REMAINDER16 needs i16",
         [](Run &r) { r.weights->weights.mode = HR_WEIGHTS_REMAINDER16; }},
        {"residuals\\[2\\] has dtype u8", [](Run &r) { r.weights->dtype[2] = HR_U8; }},
        {"residuals\\[2\\] is NULL", [](Run &r) { r.weights->data[2] = nullptr; }},
        {"residuals->count is 2, wanted 3", [](Run &r) { r.weights->residuals.count = 2; }},
        {"weights->seeds is NULL, but HR_WEIGHTS_REMAINDER8_STOCHASTIC needs them",
         [](Run &r) { r.weights->weights.seeds = nullptr; }},
        {"weights->seeds is given, but HR_WEIGHTS_REMAINDER8 has no use",
         [](Run &r) { r.weights->weights.mode = HR_WEIGHTS_REMAINDER8; }},
        {"params\\[2\\] has dtype f16, which HR_WEIGHTS_REMAINDER8_STOCHASTIC does not take",
         [=](Run &r) { params(r).dtype[2] = HR_F16; }},
        {"params\\[0\\] has dtype f32, which", [=](Run &r) { params(r).dtype[0] = HR_F32; }},
        {"places\\[1\\] is \\{-1, 37, 1000\\}", [](Run &r) { r.weights->places[1].offset = -1; }},
        {"places\\[1\\] is \\{8, 0, 1000\\}", [](Run &r) { r.weights->places[1].run = 0; }},
        {"places\\[1\\] is \\{8, 37, -5\\}", [](Run &r) { r.weights->places[1].stride = -5; }},
        {"places\\[0\\] is \\{-1, 37, 1000\\}", [](Run &r) { r.weights->places[0].offset = -1; }},
        {"places\\[0\\] reaches past", [](Run &r) { r.weights->places[0].offset = INT64_MAX / 4; }},
        {"places\\[0\\] reaches past", [](Run &r) { r.weights->places[0].run = INT64_MAX / 4; }},
        {"places\\[2\\] reaches past", // by the least; there are 300 / 37 = 8 runs
         [](Run &r) { r.weights->places[2].stride = INT64_MAX / 4 / 8; }},
        {"weights->stalled is at .* not a multiple of 8",
         [](Run &r) { r.weights->weights.stalled = moved(r.weights->weights.stalled, 4); }},
    };
    const char *const names[] = {
        "HR_WEIGHTS_NEAREST has none",           "HR_WEIGHTS_STOCHASTIC has none",
        "HR_WEIGHTS_KAHAN needs them",           "HR_WEIGHTS_MASTER needs them",
        "HR_WEIGHTS_REMAINDER16 needs them",     "HR_WEIGHTS_REMAINDER8 needs them",
        "HR_WEIGHTS_REMAINDER8_STOCHASTIC needs"};
    for (int mode = HR_WEIGHTS_NEAREST; mode <= HR_WEIGHTS_REMAINDER8_STOCHASTIC; mode++)
        all.push_back({std::string("weights->residuals is .*, but ") + names[mode], [=](Run &r) {
                           r.weights->weights.mode = hr_weights_mode(mode);
                           if (mode >= HR_WEIGHTS_KAHAN)
                               r.weights->weights.residuals = nullptr;
                       }});
    for (const int mode : {-1, 7, 1000})
        all.push_back({"weights->mode is " + std::to_string(mode),
                       [=](Run &r) { r.weights->weights.mode = hr_weights_mode(mode); }});
    return all;
}

// ---- Scalars -------------------------------------------------------------------------------------

// The bytes of all lists but the counters.
template <class Op> std::vector<uint8_t> stepped(typename Op::Run &run)
{
    std::vector<const std::vector<Buffer> *> buffers;
    for (const Tensors *list : run.lists())
        if (list != &Op::steps(run))
            buffers.push_back(&list->buffers);
    return image_of(buffers);
}

template <class Op> void found_inf_keeps_every_byte(Backend &backend)
{
    for (typename Op::Case c : Op::skipped())
        for (const float found : {1.0f, -1.0f, 1e-45f, INFINITY, NAN, 0.0f, -0.0f}) {
            c.found_inf = found;
            const typename Op::Run run(backend, c);
            const std::vector<uint8_t> before = run.image();
            EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(run.image() == before, found != 0) << found;
            EXPECT_EQ(Op::steps(run).values(1)[0], found != 0 ? 3 : 4);
        }
}

template <class Op> void absent_factors_are_one(Backend &backend)
{
    typename Op::Case with = Op::all_scalars(), without = with;
    with.grad_scale = with.clip_coef = 1.0f;
    with.found_inf = 0.0f;
    without.grad_scale = without.clip_coef = std::nullopt;
    typename Op::Run a(backend, with), b(backend, without);
    ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
    ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(stepped<Op>(a), stepped<Op>(b));
}

// Every parameter has a counter of its own, an empty one too.
template <class Op> void counters_match_the_step_of_the_config(Backend &backend)
{
    for (const hr_dtype counter : {HR_F32, HR_F64})
        for (typename Op::Case on_host : Op::counted()) {
            on_host.numel = {600, 0};
            typename Op::Case on_device = on_host;
            on_device.steps = counter;
            typename Op::Run a(backend, on_device), b(backend, on_host);
            ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
            ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
            EXPECT_EQ(stepped<Op>(a), stepped<Op>(b));
            EXPECT_EQ(Op::steps(a).values(0)[0], double(on_host.step));
            EXPECT_EQ(Op::steps(a).values(1)[0], double(on_host.step) + 1);
        }
}

template <class Op> void an_f32_counter_stays_at_its_last_integer(Backend &backend)
{
    typename Op::Case c;
    c.steps = HR_F32;
    c.step = (1 << 24) + 1;
    const typename Op::Run run(backend, c);
    ASSERT_EQ(run.call(), HR_OK) << hr_last_error();
    EXPECT_EQ(Op::steps(run).values(0)[0], 1 << 24);
}

template <class Op> void many_steps_in_a_row(Backend &backend, int count)
{
    typename Op::Case on_device, on_host;
    on_device.step = on_host.step = 1;
    on_device.steps = HR_F64;
    typename Op::Run a(backend, on_device), b(cpu_backend(), on_host);
    for (int step = 1; step <= count; step++) {
        Op::step(b).t = step;
        ASSERT_EQ(a.call(), HR_OK) << hr_last_error();
        ASSERT_EQ(b.call(), HR_OK) << hr_last_error();
    }
    EXPECT_EQ(stepped<Op>(a), stepped<Op>(b));
    EXPECT_EQ(Op::steps(a).values(0)[0], count);
}

// Calls check(case) with every way to give the step, the learning rate and the other scalars.
template <class Case, class Check> void for_every_way_to_give_scalars(Case c, Check check)
{
    for (const std::optional<hr_dtype> steps : {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}})
        for (const std::optional<hr_dtype> lr : {std::optional<hr_dtype>(), {HR_F32}, {HR_F64}})
            for (int scalars = 0; scalars < 8; scalars++) {
                using Scalar = std::optional<float>;
                c.steps = steps;
                c.lr_on_device = lr;
                c.grad_scale = scalars & 1 ? Scalar(1024.0f / 3) : std::nullopt;
                c.clip_coef = scalars & 2 ? Scalar(0.3f) : std::nullopt;
                c.found_inf = scalars & 4 ? Scalar(0.0f) : std::nullopt;
                check(c);
            }
}

// Calls check(case) with each step, counted in the config and on the device.
template <class Case, class Check>
void for_steps(Case c, const std::vector<int64_t> &steps, Check check)
{
    for (const int64_t step : steps)
        for (const std::optional<hr_dtype> counter : {std::optional<hr_dtype>(), {HR_F64}}) {
            c.step = step;
            c.steps = counter;
            check(c);
        }
}

#define SCALARS_SUITE(Op)                                       \
    using Op##Scalars = OnBackend;                              \
    ON_EVERY_BACKEND(Op##Scalars);                              \
    TEST_P(Op##Scalars, FoundInfKeepsEveryByte)                 \
    {                                                           \
        found_inf_keeps_every_byte<Op>(*backend);               \
    }                                                           \
    TEST_P(Op##Scalars, AbsentFactorsAreOne)                    \
    {                                                           \
        absent_factors_are_one<Op>(*backend);                   \
    }                                                           \
    TEST_P(Op##Scalars, CountersMatchTheStepOfTheConfig)        \
    {                                                           \
        counters_match_the_step_of_the_config<Op>(*backend);    \
    }                                                           \
    TEST_P(Op##Scalars, AnF32CounterStaysAtItsLastInteger)      \
    {                                                           \
        an_f32_counter_stays_at_its_last_integer<Op>(*backend); \
    }                                                           \
    TEST_P(Op##Scalars, ManyStepsInARow)                        \
    {                                                           \
        many_steps_in_a_row<Op>(*backend, Op::kSteps);          \
    }                                                           \
    static_assert(true, "takes the semicolon")
