// What matrix products refuse: arguments, factors that overlap the result, workspaces.
#include <cmath>

#include "tests/c/harness/refused.h"
#include "tests/c/nn/gemm_run.h"

using GemmRefused = OnBackend;
ON_EVERY_BACKEND(GemmRefused);

TEST_P(GemmRefused, BadInputs)
{
    using R = GemmRun;
    const BadInputs<R> bad = {
        {"m is -1, wanted 0 or more", [](R &r) { r.m = -1; }},
        {"n is -1, wanted 0 or more", [](R &r) { r.n = -1; }},
        {"k is -1, wanted 0 or more", [](R &r) { r.k = -1; }},
        {"wanted at most 2\\^59 elements", [](R &r) { r.m = INT64_MAX / 4; }},
        {"wanted at most 2\\^59 elements", [](R &r) { r.n = INT64_MAX / 4; }},
        {"wanted at most 2\\^59 elements", [](R &r) { r.k = INT64_MAX / 4; }},
        {"config->dtype is f64", [](R &r) { r.config.dtype = HR_F64; }},
        {"config->out_dtype is u8", [](R &r) { r.config.out_dtype = HR_U8; }},
        {"config->out_dtype is bf16, wanted f32 or", [](R &r) { r.config.out_dtype = HR_BF16; }},
        {"config->transpose_a is 2", [](R &r) { r.config.transpose_a = 2; }},
        {"config->transpose_b is -1", [](R &r) { r.config.transpose_b = -1; }},
        {"config->allow_tf32 is 2", [](R &r) { r.config.allow_tf32 = 2; }},
        {"config->allow_reduced_precision_reduction is 2",
         [](R &r) { r.config.allow_reduced_precision_reduction = 2; }},
        {"config->deterministic is 2", [](R &r) { r.config.deterministic = 2; }},
        {"config->alpha is nan", [](R &r) { r.config.alpha = NAN; }},
        {"config->alpha is 1e\\+300", [](R &r) { r.config.alpha = 1e300; }},
        {"config->beta is inf", [](R &r) { r.config.beta = INFINITY; }},
        {"config->batch is -1", [](R &r) { r.config.batch = -1; }},
        {"config->epilogue is 5", [](R &r) { r.config.epilogue = hr_gemm_epilogue(5); }},
        {"config->addend->stride is 4",
         [](R &r) {
             r.config.addend = {r.c_rows.data, 4};
         }},
        {"config->addend overlaps c",
         [](R &r) {
             r.config.addend = {moved(r.c_rows.data, 4), r.c_rows.stride};
         }},
        {"config->addend overlaps c",
         [](R &r) {
             r.config.addend = {r.c_rows.data, r.c_rows.stride + 1};
         }},
        {"config->batch is 2, wanted 1 with an epilogue",
         [](R &r) { r.config.epilogue = HR_GEMM_GELU, r.config.batch = 2; }},
        {"c is NULL", [](R &r) { r.c_argument = nullptr; }},
        {"a is NULL", [](R &r) { r.a_argument = nullptr; }},
        {"b is NULL", [](R &r) { r.b_argument = nullptr; }},
        {"bias is at .* not a multiple of 4",
         [](R &r) { r.bias_argument = moved(r.bias_argument, 2); }},
        {"bias is given, wanted NULL with config->epilogue 2",
         [](R &r) { r.config.epilogue = HR_GEMM_DGELU; }},
        {"config->aux is given", [](R &r) { r.config.aux = r.c_rows; }},
        {"config->aux->data is NULL",
         [](R &r) {
             r.config.epilogue = HR_GEMM_DGELU, r.bias_argument = nullptr;
             r.config.aux.stride = 5;
         }},
        {"config->aux->stride is 4",
         [](R &r) {
             r.config.epilogue = HR_GEMM_GELU;
             r.config.aux = {r.c_rows.data, 4};
         }},
        {"config->bias_gradient is given", [](R &r) { r.config.bias_gradient = r.bias_argument; }},
        {"config->bias_gradient is NULL, which config->epilogue 3 writes",
         [](R &r) { r.config.epilogue = HR_GEMM_BGRADA, r.bias_argument = nullptr; }},
        {"config->bias_gradient is at",
         [](R &r) {
             r.config.epilogue = HR_GEMM_BGRADB;
             r.config.bias_gradient = moved(r.bias_argument, 1);
             r.bias_argument = nullptr;
         }},
        {"m, n or config->alpha is 0",
         [](R &r) {
             r.config.epilogue = HR_GEMM_BGRADB, r.config.alpha = 0;
             r.config.bias_gradient = r.bias_argument, r.bias_argument = nullptr;
         }},
        {"c->stride is 4", [](R &r) { r.c_rows.stride = 4; }},
        {"c->data is NULL", [](R &r) { r.c_rows.data = nullptr; }},
        {"config->batch_stride_c is 4, wanted n",
         [](R &r) { r.config.batch = 2, r.config.batch_stride_c = 4; }},
        {"config->batch_stride_c is 6, with which the matrices of the batch overlap",
         [](R &r) { r.config.batch = 2, r.config.batch_stride_c = 6; }},
        {"a->stride is 6, wanted cols \\(7\\)", [](R &r) { r.a_rows.stride = 6; }},
        {"b->data is at", [](R &r) { r.b_rows.data = moved(r.b_rows.data, 2); }},
        {"config->batch_stride_a is -1",
         [](R &r) { r.config.batch = 2, r.config.batch_stride_a = -1; }},
        {"config->batch_stride_b is .*, wanted 0 or more, and at most 2\\^59",
         [](R &r) { r.config.batch = 2, r.config.batch_stride_b = INT64_MAX / 2; }},
        {"a overlaps c", [](R &r) { r.a_rows.data = r.c_rows.data; }},
        {"b overlaps c", [](R &r) { r.b_rows.data = moved(r.c_rows.data, 4); }},
    };
    GemmCase c;
    c.bias = true;
    expect_all_refused<R>(*backend, c, bad);
    expect_all_refused<R>(*backend, c, bad_config_or_exec<R>());
    GemmRun run(*backend, c);
    expect_no_such_device(run);
    if (backend != &cpu_backend())
        expect_all_refused<R>(
            *backend, c,
            {{"workspace is at .*, wanted a multiple of 256",
              [](R &r) { r.workspace_argument = moved(r.workspace_argument, 8); }},
             {"workspace is at", [](R &r) { r.workspace_argument = nullptr; }}});
}

// In a wide matrix, columns beside each other do not overlap, and columns in common do.
TEST_P(GemmRefused, BadInputsThatOverlapInColumns)
{
    GemmCase c;
    c.m = 4, c.n = 3, c.k = 2, c.gap = 9; // C has the rows of a matrix with 12 columns
    for (const int first : {0, 2, 3, 5, 11}) {
        GemmRun run(*backend, c);
        run.a_rows = {moved(run.c_rows.data, size_t(first) * 4), 12};
        const bool overlaps = first < 3 || first == 11;
        run.m = 3;
        EXPECT_EQ(run.call(), overlaps ? HR_INVALID_ARGUMENT : HR_OK) << first;
    }
}

TEST_P(GemmRefused, BadInputsOfTheWorkspace)
{
    const hr_exec exec = backend->exec();
    hr_gemm_config config = HR_GEMM_CONFIG_INIT, newer = config;
    newer.size += 4;
    size_t bytes = 77;
    EXPECT_EQ(hr_gemm_workspace(nullptr, 1, 1, 1, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_gemm_workspace(moved(&bytes, 4), 1, 1, 1, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_gemm_workspace(&bytes, -1, 1, 1, &config, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_gemm_workspace(&bytes, 1, 1, 1, nullptr, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_gemm_workspace(&bytes, 1, 1, 1, &newer, &exec), HR_INVALID_ARGUMENT);
    EXPECT_EQ(hr_gemm_workspace(&bytes, 1, 1, 1, &config, nullptr), HR_INVALID_ARGUMENT);
    hr_exec nowhere = exec;
    nowhere.device = 1000;
    EXPECT_NE(hr_gemm_workspace(&bytes, 1, 1, 1, &config, &nowhere), HR_OK);
    EXPECT_TRUE(matches(hr_last_error(), "exec->device is 1000"));
    EXPECT_EQ(bytes, 77u);
}
