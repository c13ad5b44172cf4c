// Every argument that hr_adafactor() refuses: the status, the words, and that no byte changed.
#include <cmath>

#include "tests/c/optim/adafactor_run.h"
#include "tests/c/optim/step_suites.h"

using AdafactorBadInputs = OnBackend;
ON_EVERY_BACKEND(AdafactorBadInputs);

namespace
{
using Rule = ListRule<AdafactorRun>;
using Bad = BadInput<AdafactorRun>;

// Everything given, so that everything can be spoiled.
AdafactorCase good()
{
    AdafactorCase c;
    c.shapes = {vector(5), matrix(0, 3), matrix(20, 15)};
    c.momentum = true;
    c.lr_on_device = HR_F32;
    c.config.step.lr = 0.5;
    c.config.relative_step = 0;
    c.grad_scale = 2.0f;
    c.found_inf = 0.0f;
    c.clip_coef = 0.5f;
    return c;
}

void expect_all_refused(Backend &backend, const std::vector<Bad> &all)
{
    expect_all_refused(backend, good(), all);
}

// What is refused of a list of variances.
std::vector<Bad> bad_variances(Tensors AdafactorRun::*list, const std::string &name, size_t k)
{
    return {
        {name + " is NULL, but params", [=](AdafactorRun &r) { (r.*list).argument = nullptr; }},
        {name + "->count is 2, wanted 3", [=](AdafactorRun &r) { (r.*list).list.count = 2; }},
        {name + "\\[.\\] has numel 77, wanted", [=](AdafactorRun &r) { (r.*list).numel[k] = 77; }},
        {name + "\\[.\\] has dtype bf16 .*, wanted f32",
         [=](AdafactorRun &r) { (r.*list).dtype[k] = HR_BF16; }},
        {name + "\\[.\\] is NULL", [=](AdafactorRun &r) { (r.*list).data[k] = nullptr; }},
        {name + "\\[.\\] is at .* not a multiple of 4",
         [=](AdafactorRun &r) { (r.*list).data[k] = moved((r.*list).data[k], 1); }},
    };
}
} // namespace

TEST_P(AdafactorBadInputs, TheCallIsGoodBefore)
{
    expect_exact(*backend, good());
}

TEST_P(AdafactorBadInputs, Lists)
{
    const std::vector<Rule> rules = {{"params", &AdafactorRun::params, float_types(), Rule::ALONE},
                                     {"grads", &AdafactorRun::grads, float_types()}};
    expect_all_refused(*backend, bad_lists(rules));
    expect_all_refused(*backend, bad_variances(&AdafactorRun::row_vars, "row_vars", 2));
    expect_all_refused(*backend, bad_variances(&AdafactorRun::col_vars, "col_vars", 2));
    expect_all_refused(*backend, bad_variances(&AdafactorRun::variances, "variances", 0));
    expect_all_refused(
        *backend,
        {{"exp_avgs\\[2\\] has dtype f16", [](AdafactorRun &r) { r.exp_avgs.dtype[2] = HR_F16; }},
         {"exp_avgs\\[2\\] has numel 5", [](AdafactorRun &r) { r.exp_avgs.numel[2] = 5; }},
         {"rms_values\\[1\\] has numel 2", [](AdafactorRun &r) { r.rms_values.numel[1] = 2; }},
         {"rms_values\\[1\\] is NULL", [](AdafactorRun &r) { r.rms_values.data[1] = nullptr; }},
         {"steps\\[1\\] has numel 2", [](AdafactorRun &r) { r.steps.numel[1] = 2; }},
         {"steps\\[1\\] has dtype bf16", [](AdafactorRun &r) { r.steps.dtype[1] = HR_BF16; }}});
}

TEST_P(AdafactorBadInputs, Shapes)
{
    const auto spoiled = [](const char *words, int64_t hr_adafactor_shape::*member, int64_t value) {
        return Bad{words, [=](AdafactorRun &r) { r.shapes[2].*member = value; }};
    };
    using Shape = hr_adafactor_shape;
    expect_all_refused(*backend,
                       {{"shapes is NULL", [](AdafactorRun &r) { r.shapes_argument = nullptr; }},
                        spoiled("shapes\\[2\\] is \\[2, 20, 15\\], but params", &Shape::batch, 2),
                        spoiled("shapes\\[2\\] is \\[-1, 20, 15\\]", &Shape::batch, -1),
                        spoiled("shapes\\[2\\] is \\[1, -20, 15\\]", &Shape::rows, -20),
                        spoiled("shapes\\[2\\] is \\[1, 20, 92", &Shape::cols, INT64_MAX),
                        spoiled("shapes\\[2\\] has factored 2", &Shape::factored, 2),
                        spoiled("shapes\\[2\\] has factored 0", &Shape::factored, 0),
                        spoiled("shapes\\[2\\] is larger", &Shape::whole_rows, 19),
                        spoiled("shapes\\[2\\] is larger", &Shape::whole_cols, -1),
                        spoiled("shapes\\[2\\] is larger", &Shape::whole_numel, 299)});
}

TEST_P(AdafactorBadInputs, Config)
{
    std::vector<Bad> all = {
        {"semantics is 2", [](AdafactorRun &r) { r.config.semantics = hr_adafactor_semantics(2); }},
        {"warmup_init needs relative_step", [](AdafactorRun &r) { r.config.warmup_init = 1; }},
        {"phases is 0", [](AdafactorRun &r) { r.config.phases = 0; }},
        {"phases is 16", [](AdafactorRun &r) { r.config.phases = 16; }},
        {"config->step.skip_nonfinite is 1, wanted 0",
         [](AdafactorRun &r) { r.config.step.skip_nonfinite = 1; }},
        {"weights->size is 0",
         [](AdafactorRun &r) {
             static hr_weights weights = HR_WEIGHTS_INIT;
             weights.size = 0;
             r.config.step.weights = &weights;
         }},
        {"weights->mode is 7",
         [](AdafactorRun &r) {
             static hr_weights weights = HR_WEIGHTS_INIT;
             weights.mode = hr_weights_mode(7);
             r.config.step.weights = &weights;
         }},
        {"workspace is at .*, wanted", [](AdafactorRun &r) { r.workspace = nullptr; }},
        {"workspace is at .*, wanted a multiple of 8",
         [](AdafactorRun &r) { r.workspace = moved(static_cast<char *>(r.workspace), 4); }},
        {"workspace_bytes is .*, wanted", [](AdafactorRun &r) { r.workspace_bytes--; }},
    };
    const auto add = [&](const char *name, double hr_adafactor_config::*member,
                         const std::vector<double> &values) {
        for (const double value : values)
            all.push_back({std::string(name) + " is ", [=](AdafactorRun &r) {
                               r.config.step.lr_ptr = nullptr;
                               r.config.step.lr = 0;
                               r.config.*member = value;
                           }});
    };
    add("beta2_decay", &hr_adafactor_config::beta2_decay, {0.1, -INFINITY, NAN});
    add("eps1", &hr_adafactor_config::eps1, {-1, INFINITY, NAN});
    add("eps2", &hr_adafactor_config::eps2, {-1, INFINITY, NAN});
    add("clip_threshold", &hr_adafactor_config::clip_threshold, {0, -1, NAN});
    add("weight_decay", &hr_adafactor_config::weight_decay, {-1, INFINITY, NAN});
    add("beta1", &hr_adafactor_config::beta1, {1, -0.1, NAN});
    expect_all_refused(*backend, all);
    expect_all_refused(
        *backend,
        bad_step<AdafactorRun>([](AdafactorRun &r) -> hr_step_config & { return r.config.step; },
                               [](AdafactorRun &r) -> Tensors & { return r.steps; }));
    expect_all_refused(*backend, bad_config_or_exec<AdafactorRun>());
}

TEST(AdafactorBadInputsOnTheCpu, Values)
{
    const auto refused = [](const AdafactorCase &c, const char *words) {
        AdafactorRun run(cpu_backend(), c);
        expect_refused(run, {words, [](AdafactorRun &) {}});
    };
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        AdafactorCase c = good();
        c.grad_scale = scale;
        refused(c, "\\*grad_scale is .*, wanted a finite number > 0");
    }
    for (const double lr : {-1.0, double(NAN)}) {
        AdafactorCase c = good();
        c.config.step.lr = lr;
        refused(c, "\\*lr_ptr is .*, wanted a finite number >= 0");
    }
}

TEST(AdafactorBadInputsOnTheCpu, ADeviceThatDoesNotExist)
{
    AdafactorRun run(cpu_backend(), good());
    expect_no_such_device(run);
}

TEST(AdafactorWorkspaceBadInputs, AreRefused)
{
    size_t bytes = 77;
    const hr_adafactor_shape negative = matrix(-1, 2), huge = matrix(INT64_MAX, 2);
    const hr_adafactor_shape good = matrix(2, 2);
    EXPECT_EQ(hr_adafactor_workspace(moved(&bytes, 4), &good, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_adafactor_workspace(nullptr, &good, 1), HR_INVALID_ARGUMENT);
    const hr_adafactor_shape two[] = {matrix(INT64_MAX / 32, 1), matrix(INT64_MAX / 32, 1)};
    EXPECT_EQ(hr_adafactor_workspace(&bytes, two, 2), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "shapes has more than 2\\^59 elements"));
    EXPECT_EQ(hr_adafactor_workspace(&bytes, nullptr, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_adafactor_workspace(&bytes, &huge, -1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_adafactor_workspace(&bytes, &negative, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_adafactor_workspace(&bytes, &huge, 1), HR_INVALID_ARGUMENT);
    EXPECT_EQ(bytes, 77u);
}
