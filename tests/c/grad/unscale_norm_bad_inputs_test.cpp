// Every argument that hr_unscale_norm() refuses: the status, the words, and that no byte changed.
#include <cmath>

#include "tests/c/grad/unscale_norm_run.h"
#include "tests/c/harness/suites.h"

namespace
{
struct UnscaleNorm {
    using Case = NormCase;
    using Run = NormRun;

    static void expect(Backend &backend, const Case &c)
    {
        expect_exact(backend, c);
    }

    // Everything given, so that everything can be spoiled.
    static Case everything()
    {
        Case c;
        c.numel = {5, 0, 300};
        c.write = true;
        c.grad_scale = 2.0f;
        c.clip_coef = 0.5f;
        return c;
    }

    static std::vector<ListRule<Run>> rules()
    {
        return {{"grads", &Run::grads, float_types(), ListRule<Run>::ALONE}};
    }

    static BadInputs<Run> refused()
    {
        const BadInputs<Run> all = {
            {"grad_scale is at .* not a multiple of 4",
             [](Run &r) { r.config.grad_scale = moved(r.config.grad_scale, 1); }},
            {"clip_coef is at .* not a multiple of 4",
             [](Run &r) { r.config.clip_coef = moved(r.config.clip_coef, 2); }},
            {"result->norm is at .* multiple of 4",
             [](Run &r) { r.result.norm = moved(r.result.norm, 1); }},
            {"result->norms is at .* multiple of 4",
             [](Run &r) { r.result.norms = moved(r.result.norms, 2); }},
            {"result->found_inf is at .* multiple of 4",
             [](Run &r) { r.result.found_inf = moved(r.result.found_inf, 3); }},
            {"result->culprit is at .* multiple of 8",
             [](Run &r) { r.result.culprit = moved(r.result.culprit, 4); }},
            {"result->clip_coef is at .* multiple of 4",
             [](Run &r) { r.result.clip_coef = moved(r.result.clip_coef, 1); }},
            {"workspace is .*, wanted", [](Run &r) { r.workspace = nullptr; }},
            {"workspace is at .*, wanted a multiple of 8",
             [](Run &r) { r.workspace = moved(static_cast<char *>(r.workspace), 4); }},
            {"workspace_bytes is .*, wanted", [](Run &r) { r.workspace_bytes--; }},
            {"workspace_bytes is 0, wanted", [](Run &r) { r.workspace_bytes = 0; }},
            {"result is NULL and config->write is 0",
             [](Run &r) {
                 r.result_argument = nullptr;
                 r.config.write = 0;
             }},
        };
        return joined<Run>({
            all,
            bad_numbers<Run>("[^a-z]p is .*, wanted > 0",
                             [](Run &r) -> double & { return r.config.p; },
                             {0.0, -1.0, -INFINITY, NAN}),
            bad_numbers<Run>("max_norm is .*, wanted >= 0",
                             [](Run &r) -> double & { return r.config.max_norm; },
                             {-1.0, -INFINITY, NAN}),
        });
    }
};
} // namespace

BAD_INPUTS_SUITE(UnscaleNorm);

TEST(UnscaleNormBadInputsOnTheCpu, Values)
{
    NormCase c = UnscaleNorm::everything();
    for (const float scale : {0.0f, -1.0f, float(NAN), float(INFINITY)}) {
        c.grad_scale = scale;
        NormRun run(cpu_backend(), c);
        expect_refused(run, {"\\*grad_scale is .*, wanted a finite number > 0", [](NormRun &) {}});
    }
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
    EXPECT_EQ(hr_unscale_norm_workspace(moved(&bytes, 4), &lists[0]), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "bytes is at"));
    EXPECT_EQ(hr_unscale_norm_workspace(&bytes, nullptr), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "grads is NULL"));
    for (int i = 1; i < 5; i++) {
        EXPECT_EQ(hr_unscale_norm_workspace(&bytes, &lists[i]), HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), messages[i]));
    }
    EXPECT_EQ(bytes, 77u);
}
