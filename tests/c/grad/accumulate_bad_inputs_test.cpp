// Every argument that hr_accumulate() refuses: the status, the words, and that no byte changed.
#include <cmath>

#include "tests/c/grad/accumulate_run.h"
#include "tests/c/harness/refused.h"

using AccumulateBadInputs = OnBackend;
ON_EVERY_BACKEND(AccumulateBadInputs);

namespace
{
using Bad = BadInput<AccumulateRun>;

// Everything given, so that everything can be spoiled.
AccumulateCase good()
{
    AccumulateCase c;
    c.numel = {5, 0, 300};
    c.compensated = c.zero_grads = true;
    c.factor_on_device = 0.5f;
    return c;
}

void expect_all_refused(Backend &backend, const std::vector<Bad> &all)
{
    for (const Bad &bad : all) {
        AccumulateRun run(backend, good());
        expect_refused(run, bad);
    }
}
} // namespace

TEST_P(AccumulateBadInputs, TheCallIsGoodBefore)
{
    const AccumulateRun run(*backend, good());
    EXPECT_EQ(run.call(), HR_OK) << hr_last_error();
}

TEST_P(AccumulateBadInputs, Lists)
{
    using Run = AccumulateRun;
    expect_all_refused(*backend, bad_lists(&Run::grads, "grads", "f32, bf16 or f16", true));
    expect_all_refused(*backend, bad_lists(&Run::sums, "sums", "f32", false));
    expect_all_refused(*backend, bad_lists(&Run::losts, "losts", "f32", false));
    for (const hr_dtype type : {HR_BF16, HR_F16})
        expect_all_refused(
            *backend, {{"sums\\[0\\] has dtype b?f16", [=](Run &r) { r.sums.dtype[0] = type; }},
                       {"losts\\[0\\] has dtype b?f16", [=](Run &r) { r.losts.dtype[0] = type; }}});
    expect_all_refused(*backend, {{"grads is NULL", [](Run &r) { r.grads.argument = nullptr; }},
                                  {"sums is NULL", [](Run &r) { r.sums.argument = nullptr; }}});
}

TEST_P(AccumulateBadInputs, Config)
{
    using Run = AccumulateRun;
    std::vector<Bad> all = {
        {"config is NULL", [](Run &r) { r.config_argument = nullptr; }},
        {"config->size is 0, wanted", [](Run &r) { r.config.size = 0; }},
        {"config->size is 999, wanted", [](Run &r) { r.config.size = 999; }},
        {"factor_ptr is at .* not a multiple of 4",
         [](Run &r) { r.config.factor_ptr = moved(r.config.factor_ptr, 2); }},
        {"exec is NULL", [](Run &r) { r.exec_argument = nullptr; }},
        {"exec->device is -2", [](Run &r) { r.exec.device = -2; }},
    };
    for (const double factor : {double(NAN), double(INFINITY), 1e39, -1e300})
        all.push_back({"factor is .*, wanted a finite", [=](Run &r) {
                           r.config.factor_ptr = nullptr;
                           r.config.factor = factor;
                       }});
    expect_all_refused(*backend, all);
}

TEST(AccumulateBadInputsOnTheCpu, ADeviceThatDoesNotExist)
{
    AccumulateRun run(cpu_backend(), good());
    expect_no_such_device(run);
}
