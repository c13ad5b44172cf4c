// What linear layers of matrices of few bits refuse.
#include <cmath>

#include "tests/c/harness/refused.h"
#include "tests/c/nn/linear_run.h"

using LinearRefused = OnBackend;
ON_EVERY_BACKEND(LinearRefused);

TEST_P(LinearRefused, BadInputs)
{
    using R = LinearRun;
    const BadInputs<R> bad = {
        {": m is -1, wanted 0 or more", [](R &r) { r.m = -1; }},
        {": m is .*, wanted 0 or more, and at most 2\\^59", [](R &r) { r.m = INT64_MAX / 64; }},
        {": matrix is NULL", [](R &r) { r.matrix_argument = nullptr; }},
        {": matrix->size is 8, wanted", [](R &r) { r.matrix.size = 8; }},
        {": matrix->data is NULL", [](R &r) { r.matrix.data = nullptr; }},
        {": config->size is 7, wanted", [](R &r) { r.config.size = 7; }},
        {": config->allow_tf32 is 2", [](R &r) { r.config.allow_tf32 = 2; }},
        {": config->allow_reduced_precision_reduction is -1",
         [](R &r) { r.config.allow_reduced_precision_reduction = -1; }},
        {": config->deterministic is 2", [](R &r) { r.config.deterministic = 2; }},
        {": config->reserved is 1, wanted 0", [](R &r) { r.config.reserved = 1; }},
        {"^hr_linear_.*ward: config->addend->stride is 2, wanted cols",
         [](R &r) {
             r.config.addend = {r.out_rows.data, 2};
         }},
        {": [yx] is NULL|: d[yx] is NULL", [](R &r) { r.out_argument = nullptr; }},
        {": [yx] is NULL|: d[yx] is NULL", [](R &r) { r.in_argument = nullptr; }},
        {"->data is NULL", [](R &r) { r.out_rows.data = nullptr; }},
        {"->stride is 3, wanted cols", [](R &r) { r.in_rows.stride = 3; }},
        {"->data is at .* not a multiple of 4",
         [](R &r) { r.out_rows.data = moved(r.out_rows.data, 2); }},
        {": workspace_bytes is .*, wanted .* or more",
         [](R &r) { r.workspace_bytes = r.needs.least - 1; }},
        {": workspace is at .*, wanted a multiple of (64|256) bytes",
         [](R &r) { r.workspace_argument = moved(r.workspace_argument, 32); }},
        {": workspace is at", [](R &r) { r.workspace_argument = nullptr; }},
        {": exec is NULL", [](R &r) { r.exec_argument = nullptr; }},
        {": exec->device is -2", [](R &r) { r.exec.device = -2; }},
    };
    for (const bool backward : {false, true}) {
        LinearCase c;
        c.backward = backward, c.space = Space::LEAST;
        expect_all_refused<R>(*backend, c, bad);
        LinearRun run(*backend, c);
        expect_no_such_device(run);
    }
    LinearCase c;
    c.bias = true;
    expect_all_refused<R>(*backend, c, {{": bias is at .* not a multiple of 4", [](R &r) {
                                             r.bias_argument = moved(r.bias_argument, 2);
                                         }}});
    LinearCase few; // which need no product, whose checks would be the same
    few.m = 1;
    expect_all_refused<R>(
        *backend, few,
        {{": exec is NULL", [](R &r) { r.exec_argument = nullptr; }},
         {": config->allow_tf32 is 2", [](R &r) { r.config.allow_tf32 = 2; }},
         {": config->allow_reduced_precision_reduction is -1",
          [](R &r) { r.config.allow_reduced_precision_reduction = -1; }},
         {": config->deterministic is 2", [](R &r) { r.config.deterministic = 2; }},
         {": config->reserved is 1, wanted 0", [](R &r) { r.config.reserved = 1; }}});
}

TEST_P(LinearRefused, BadInputsOfTheQuery)
{
    const LinearCase c;
    LinearRun run(*backend, c);
    hr_linear_needs needs = {1, 2, 3};
    const auto query = [&](hr_linear_needs *to, int64_t m, int32_t backward) {
        return hr_linear_query(to, m, run.matrix_argument, backward, run.config_argument,
                               run.exec_argument);
    };
    EXPECT_EQ(query(nullptr, 1, 0), HR_INVALID_ARGUMENT);
    EXPECT_EQ(query(&needs, -1, 0), HR_INVALID_ARGUMENT);
    EXPECT_EQ(query(&needs, 1, 2), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "backward is 2"));
    run.config.size = 3;
    EXPECT_EQ(query(&needs, 1, 0), HR_INVALID_ARGUMENT);
    run.config_argument = nullptr;
    EXPECT_EQ(query(&needs, 1, 0), HR_OK);
    needs = {1, 2, 3};
    run.matrix.format = hr_format(7);
    EXPECT_EQ(query(&needs, 1, 0), HR_INVALID_ARGUMENT);
    run.matrix_argument = nullptr;
    EXPECT_EQ(query(&needs, 1, 0), HR_INVALID_ARGUMENT);
    run.exec_argument = nullptr;
    EXPECT_EQ(query(&needs, 1, 0), HR_INVALID_ARGUMENT);
    EXPECT_EQ(needs.best, 1u);
    EXPECT_EQ(needs.least, 2u);
    EXPECT_EQ(needs.whole, 3u);
}
