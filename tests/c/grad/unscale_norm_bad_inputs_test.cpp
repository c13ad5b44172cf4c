// Every argument that hr_unscale_norm() refuses: the status, the words, and that no byte changed.
#include <cmath>

#include "tests/c/harness/refused.h"
#include "tests/c/grad/unscale_norm_run.h"

using UnscaleNormBadInputs = OnBackend;
ON_EVERY_BACKEND(UnscaleNormBadInputs);

namespace
{
using Bad = BadInput<NormRun>;

// Everything given, so that everything can be spoiled.
NormCase good()
{
    NormCase c;
    c.numel = {5, 0, 300};
    c.write = true;
    c.grad_scale = 2.0f;
    c.clip_coef = 0.5f;
    return c;
}

void expect_all_refused(Backend &backend, const std::vector<Bad> &all)
{
    for (const Bad &bad : all) {
        NormRun run(backend, good());
        expect_refused(run, bad);
    }
}
} // namespace

TEST_P(UnscaleNormBadInputs, TheCallIsGoodBefore)
{
    expect_exact(*backend, good());
}

TEST_P(UnscaleNormBadInputs, List)
{
    expect_all_refused(*backend, bad_lists(&NormRun::grads, "grads", "f32, bf16 or f16", true));
    expect_all_refused(*backend,
                       {{"grads is NULL", [](NormRun &r) { r.grads.argument = nullptr; }}});
}

TEST_P(UnscaleNormBadInputs, Config)
{
    std::vector<Bad> all = {
        {"config is NULL", [](NormRun &r) { r.config_argument = nullptr; }},
        {"config->size is 0, wanted", [](NormRun &r) { r.config.size = 0; }},
        {"config->size is 999, wanted", [](NormRun &r) { r.config.size = 999; }},
        {"grad_scale is at .* not a multiple of 4",
         [](NormRun &r) { r.config.grad_scale = moved(r.config.grad_scale, 1); }},
        {"clip_coef is at .* not a multiple of 4",
         [](NormRun &r) { r.config.clip_coef = moved(r.config.clip_coef, 2); }},
        {"exec is NULL", [](NormRun &r) { r.exec_argument = nullptr; }},
        {"exec->device is -2", [](NormRun &r) { r.exec.device = -2; }},
    };
    for (const double p : {0.0, -1.0, -double(INFINITY), double(NAN)})
        all.push_back({"[^a-z]p is .*, wanted > 0", [=](NormRun &r) { r.config.p = p; }});
    for (const double max_norm : {-1.0, -double(INFINITY), double(NAN)})
        all.push_back(
            {"max_norm is .*, wanted >= 0", [=](NormRun &r) { r.config.max_norm = max_norm; }});
    expect_all_refused(*backend, all);
}

TEST_P(UnscaleNormBadInputs, ResultAndWorkspace)
{
    expect_all_refused(
        *backend,
        {
            {"result->norm is at .* multiple of 4",
             [](NormRun &r) { r.result.norm = moved(r.result.norm, 1); }},
            {"result->norms is at .* multiple of 4",
             [](NormRun &r) { r.result.norms = moved(r.result.norms, 2); }},
            {"result->found_inf is at .* multiple of 4",
             [](NormRun &r) { r.result.found_inf = moved(r.result.found_inf, 3); }},
            {"result->culprit is at .* multiple of 8",
             [](NormRun &r) { r.result.culprit = moved(r.result.culprit, 4); }},
            {"result->clip_coef is at .* multiple of 4",
             [](NormRun &r) { r.result.clip_coef = moved(r.result.clip_coef, 1); }},
            {"workspace is .*, wanted", [](NormRun &r) { r.workspace = nullptr; }},
            {"workspace is at .*, wanted a multiple of 8",
             [](NormRun &r) { r.workspace = moved(static_cast<char *>(r.workspace), 4); }},
            {"workspace_bytes is .*, wanted", [](NormRun &r) { r.workspace_bytes--; }},
            {"workspace_bytes is 0, wanted", [](NormRun &r) { r.workspace_bytes = 0; }},
            {"result is NULL and config->write is 0",
             [](NormRun &r) {
                 r.result_argument = nullptr;
                 r.config.write = 0;
             }},
        });
}

TEST(UnscaleNormBadInputsOnTheCpu, Values)
{
    NormCase c = good();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        NormRun run(cpu_backend(), c);
        expect_refused(run, {"\\*grad_scale is .*, wanted a finite number > 0", [](NormRun &) {}});
    }
}

TEST(UnscaleNormBadInputsOnTheCpu, ADeviceThatDoesNotExist)
{
    NormRun run(cpu_backend(), good());
    expect_no_such_device(run);
}

TEST(UnscaleNormWorkspaceBadInputs, AreRefused)
{
    const int64_t good = 5, negative = -1, huge = INT64_MAX;
    const hr_tensor_list lists[] = {{1, nullptr, &good, nullptr},
                                    {-1, nullptr, &good, nullptr},
                                    {1, nullptr, nullptr, nullptr},
                                    {1, nullptr, &negative, nullptr},
                                    {1, nullptr, &huge, nullptr}};
    const char *const messages[] = {"", "grads->count is -1", "grads->numel is NULL",
                                    "grads\\[0\\] has numel -1", "grads has more than 2\\^59"};
    size_t bytes = 77;
    EXPECT_EQ(hr_unscale_norm_workspace(nullptr, &lists[0]), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "bytes is NULL"));
    EXPECT_EQ(hr_unscale_norm_workspace(&bytes, nullptr), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "grads is NULL"));
    for (int i = 1; i < 5; i++) {
        EXPECT_EQ(hr_unscale_norm_workspace(&bytes, &lists[i]), HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), messages[i]));
    }
    EXPECT_EQ(bytes, 77u);
}
