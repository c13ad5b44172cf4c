// What linear layers with adapters refuse.
#include <cmath>
#include <limits>

#include "tests/c/harness/refused.h"
#include "tests/c/nn/lora_run.h"

using LoraRefused = OnBackend;
ON_EVERY_BACKEND(LoraRefused);

namespace
{

using R = LoraRun;

const BadInputs<R> kBad = {
    {": m is -1, wanted 0 or more", [](R &r) { r.m = -1; }},
    {": m is .*, wanted 0 or more, and at most 2\\^59", [](R &r) { r.m = INT64_MAX / 64; }},
    {": matrix is NULL", [](R &r) { r.matrix_argument = nullptr; }},
    {": matrix->size is 8, wanted", [](R &r) { r.matrix.size = 8; }},
    {": config is NULL", [](R &r) { r.config_argument = nullptr; }},
    {": config->size is 7, wanted", [](R &r) { r.config.size = 7; }},
    {": config->rank is 0, wanted 1 or more", [](R &r) { r.config.rank = 0; }},
    {": config->rank is .*, and at most 2\\^59", [](R &r) { r.config.rank = INT64_MAX / 64; }},
    {": config->scale is 1e\\+300, wanted a finite binary32", [](R &r) { r.config.scale = 1e300; }},
    {": config->dropout is -1, wanted 0 or more, and less than 1",
     [](R &r) { r.config.dropout = -1; }},
    {": config->dropout is 1, wanted", [](R &r) { r.config.dropout = 1; }},
    {": config->dropout is -?nan, wanted",
     [](R &r) { r.config.dropout = std::numeric_limits<double>::quiet_NaN(); }},
    {": config->seed is NULL, but config->dropout is 0.5", [](R &r) { r.config.seed = nullptr; }},
    {": config->seed is at .* not a multiple of 8",
     [](R &r) { r.config.seed = moved(r.config.seed, 4); }},
    {": config->adapter_dtype is f64, wanted f32 or matrix->dtype \\(bf16\\)",
     [](R &r) { r.config.adapter_dtype = HR_F64; }},
    {"^hr_lora_.*ward: config->allow_tf32 is 2", [](R &r) { r.config.allow_tf32 = 2; }},
    {"^hr_lora_.*ward: config->allow_reduced_precision_reduction is -1",
     [](R &r) { r.config.allow_reduced_precision_reduction = -1; }},
    {": config->deterministic is 2", [](R &r) { r.config.deterministic = 2; }},
    {": a is NULL", [](R &r) { r.a_argument = nullptr; }},
    {": b is NULL", [](R &r) { r.b_argument = nullptr; }},
    {": a->stride is 3, wanted cols", [](R &r) { r.a_rows.stride = 3; }},
    {": b->data is NULL", [](R &r) { r.b_rows.data = nullptr; }},
    {": x is NULL",
     [](R &r) {
         r.x_argument = nullptr;
         if (!r.shape.linear.backward)
             r.in_argument = nullptr;
     }},
    {": t is NULL", [](R &r) { r.t_argument = nullptr; }},
    {": t->data is at .* not a multiple of 2",
     [](R &r) { r.t_rows.data = moved(r.t_rows.data, 1); }},
    {": (y|dx)->data is NULL", [](R &r) { r.out_rows.data = nullptr; }},
    {": workspace_bytes is .*, wanted .* or more", [](R &r) { r.workspace_bytes--; }},
    {": workspace is at .*, wanted a multiple of (64|256) bytes",
     [](R &r) { r.workspace_argument = moved(r.workspace_argument, 32); }},
    {": workspace is at", [](R &r) { r.workspace_argument = nullptr; }},
    {"^hr_lora_.*ward: exec is NULL", [](R &r) { r.exec_argument = nullptr; }},
    {"^hr_lora_.*ward: exec->device is -2", [](R &r) { r.exec.device = -2; }},
};

LoraCase good(bool backward)
{
    LoraCase c;
    c.linear.dtype = HR_BF16, c.linear.backward = backward, c.linear.bias = !backward;
    c.dropout = 0.5;
    return c;
}

} // namespace

TEST_P(LoraRefused, BadInputs)
{
    for (const bool backward : {false, true}) {
        expect_all_refused<R>(*backend, good(backward), kBad);
        LoraRun run(*backend, good(backward));
        expect_no_such_device(run);
    }
    expect_all_refused<R>(*backend, good(false),
                          {{": y is NULL", [](R &r) { r.out_argument = nullptr; }},
                           {": x->stride is 3, wanted cols", [](R &r) { r.in_rows.stride = 3; }},
                           {": bias is at .* not a multiple of 2",
                            [](R &r) { r.bias_argument = moved(r.bias_argument, 1); }}});
    LoraCase tall = good(false); // whose t would be too large
    tall.linear.m = 100;
    expect_all_refused<R>(*backend, tall, {{": config->rank is .*, and at most 2\\^59", [](R &r) {
                                                r.config.rank = (INT64_C(1) << 59) / 90;
                                            }}});
    expect_all_refused<R>(*backend, good(true),
                          {{": dy is NULL", [](R &r) { r.in_argument = nullptr; }},
                           {": dy->stride is 3, wanted cols", [](R &r) { r.in_rows.stride = 3; }},
                           {": x->stride is 3, wanted cols", [](R &r) { r.x_rows.stride = 3; }},
                           {": da->stride is 3, wanted cols", [](R &r) { r.da_rows.stride = 3; }},
                           {": db->data is NULL", [](R &r) { r.db_rows.data = nullptr; }}});
}

TEST_P(LoraRefused, BadInputsOfTheQuery)
{
    LoraRun run(*backend, good(false));
    size_t bytes = 1;
    const auto query = [&](size_t *to, int32_t backward) {
        return hr_lora_workspace(to, run.m, run.matrix_argument, backward, run.config_argument,
                                 run.exec_argument);
    };
    EXPECT_EQ(query(nullptr, 0), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), ": bytes is NULL"));
    EXPECT_EQ(query(&bytes, 2), HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "^hr_lora_workspace: config->backward is 2"));
    run.config.rank = 0;
    EXPECT_EQ(query(&bytes, 0), HR_INVALID_ARGUMENT);
    run.config_argument = nullptr;
    EXPECT_EQ(query(&bytes, 0), HR_INVALID_ARGUMENT);
    run.matrix_argument = nullptr;
    EXPECT_EQ(query(&bytes, 0), HR_INVALID_ARGUMENT);
    run.exec_argument = nullptr;
    EXPECT_EQ(query(&bytes, 0), HR_INVALID_ARGUMENT);
    EXPECT_EQ(bytes, 1u);
}

TEST_P(LoraRefused, BadInputsOfNorms)
{
    const LoraCase c = good(false);
    const LoraRun good_run(*backend, c);
    size_t bytes = 0;
    ASSERT_EQ(hr_lora_norms_workspace(&bytes, &good_run.matrix, &good_run.config, &good_run.exec),
              HR_OK);
    const Tensors out(*backend, {c.linear.rows}, {HR_F32}, 0, garbage);
    const Buffer workspace(*backend, std::vector<uint8_t>(bytes + 256, 0x77));
    void *const at =
        reinterpret_cast<void *>((reinterpret_cast<uintptr_t>(workspace.data()) + 255) / 256 * 256);
    const std::vector<uint8_t> before = image_of({&out.buffers});
    float *const norms = static_cast<float *>(out.data[0]);
    const auto refuses = [&](const char *words, float *to, void *space, size_t size,
                             const std::function<void(R &)> &spoil) {
        R run(*backend, c);
        spoil(run);
        EXPECT_EQ(hr_lora_norms(to, run.matrix_argument, run.a_argument, run.b_argument,
                                run.config_argument, space, size, run.exec_argument),
                  HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), words));
        EXPECT_EQ(image_of({&out.buffers}), before);
    };
    const auto as_it_is = [](R &) {};
    refuses("hr_lora_norms: norms is NULL", nullptr, at, bytes, as_it_is);
    refuses("workspace_bytes is .*, wanted .* or more", norms, at, bytes - 1, as_it_is);
    refuses("workspace is at", norms, nullptr, bytes, as_it_is);
    refuses("a is NULL", norms, at, bytes, [](R &r) { r.a_argument = nullptr; });
    refuses("b->stride is 2, wanted cols", norms, at, bytes, [](R &r) { r.b_rows.stride = 2; });
    refuses("matrix is NULL", norms, at, bytes, [](R &r) { r.matrix_argument = nullptr; });
    refuses("config->rank is 0", norms, at, bytes, [](R &r) { r.config.rank = 0; });
    refuses("config->rank is .*, wanted at most 2\\^28", norms, at, bytes,
            [](R &r) { r.config.rank = INT64_C(1) << 29; });
    refuses("exec is NULL", norms, at, bytes, [](R &r) { r.exec_argument = nullptr; });
    R run(*backend, c);
    EXPECT_EQ(hr_lora_norms_workspace(nullptr, &run.matrix, &run.config, &run.exec),
              HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_lora_norms_workspace: bytes is NULL"));
    run.config.rank = INT64_C(1) << 29;
    EXPECT_EQ(hr_lora_norms_workspace(&bytes, &run.matrix, &run.config, &run.exec),
              HR_INVALID_ARGUMENT);
}
