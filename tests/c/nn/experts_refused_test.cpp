// What routing, both directions of experts and their query refuse.
#include <cmath>
#include <cstring>

#include "tests/c/harness/refused.h"
#include "tests/c/nn/experts_run.h"

using ExpertsRefused = OnBackend;
ON_EVERY_BACKEND(ExpertsRefused);

namespace
{
ExpertsCase good_case()
{
    ExpertsCase c = {.tokens = 3, .slots = 2, .biases = true, .save = HR_EXPERTS_SAVE_ALL};
    c.gate_up_rank = 2, c.down_rank = 3;
    return c;
}

// Makes a stack one of codes, whose rows the test leaves as those of one matrix.
void few(hr_matrix &matrix)
{
    matrix.format = HR_NF4;
    matrix.absmax = static_cast<float *>(matrix.data);
}

// What both directions refuse: checked once for both.
template <class Run> BadInputs<Run> bad_inputs()
{
    BadInputs<Run> all = {
        {"sizes is NULL", [](Run &r) { r.sizes_argument = nullptr; }},
        {"sizes->tokens is -1, wanted 0 or more", [](Run &r) { r.sizes.tokens = -1; }},
        {"sizes->slots is 0, wanted 1 or more", [](Run &r) { r.sizes.slots = 0; }},
        {"wanted fewer than 2\\^31 rows", [](Run &r) { r.sizes.tokens = INT64_C(1) << 30; }},
        {"sizes->experts is 0, wanted from 1", [](Run &r) { r.sizes.experts = 0; }},
        {"sizes->experts is 1073741824", [](Run &r) { r.sizes.experts = 1 << 30; }},
        {"sizes->hidden is 0, wanted 1 or more", [](Run &r) { r.sizes.hidden = 0; }},
        {"sizes->features is 0, wanted 1 or more", [](Run &r) { r.sizes.features = 0; }},
        {"wanted at most 2\\^56 elements", [](Run &r) { r.sizes.hidden = INT64_C(1) << 55; }},
        {"config->activation is 1, wanted", [](Run &r) { r.config.activation = HR_GELU; }},
        {"config->activation is 6", [](Run &r) { r.config.activation = hr_activation(6); }},
        {"config->dtype is f64", [](Run &r) { r.config.dtype = HR_F64; }},
        {"config->weight_dtype is bf16, wanted f32 or config->dtype \\(f32\\)",
         [](Run &r) { r.config.weight_dtype = HR_BF16; }},
        {"config->gated is 2", [](Run &r) { r.config.gated = 2; }},
        {"config->transposed is -1", [](Run &r) { r.config.transposed = -1; }},
        {"config->interleaved is 3", [](Run &r) { r.config.interleaved = 3; }},
        {"config->interleaved is 1, wanted 0 without config->gated",
         [](Run &r) { r.config.interleaved = 1, r.config.gated = 0; }},
        {"config->allow_tf32 is 3", [](Run &r) { r.config.allow_tf32 = 3; }},
        {"reduced_precision_reduction is 2",
         [](Run &r) { r.config.allow_reduced_precision_reduction = 2; }},
        {"config->deterministic is 2", [](Run &r) { r.config.deterministic = 2; }},
        {"config->reserved is 1, wanted 0", [](Run &r) { r.config.reserved = 1; }},
        {"config->tile_rows is -1", [](Run &r) { r.config.tile_rows = -1; }},
        {"params is NULL", [](Run &r) { r.params_argument = nullptr; }},
        {"params->gate_up is \\[9, 6\\], wanted \\[10, 6\\]",
         [](Run &r) { r.params.gate_up.rows = 9; }},
        {"params->down is \\[6, 4\\], wanted \\[6, 5\\]", [](Run &r) { r.params.down.cols = 4; }},
        {"params->down is bf16, wanted f32 or f32", [](Run &r) { r.params.down.dtype = HR_BF16; }},
        {"params->gate_up_pitch is 59, wanted 60 or more",
         [](Run &r) { r.params.gate_up_pitch = 59; }},
        {"params->down_pitch is", [](Run &r) { r.params.down_pitch = INT64_MAX; }},
        {"matrix->data is NULL", [](Run &r) { r.params.down.data = nullptr; }},
        {"params->gate_up_bias is at",
         [](Run &r) { r.params.gate_up_bias = moved(static_cast<char *>(r.stacks.data[2]), 2); }},
        {"params->down_bias is at",
         [](Run &r) { r.params.down_bias = moved(static_cast<char *>(r.stacks.data[3]), 1); }},
        {"x->stride is 5, wanted cols \\(6\\)", [](Run &r) { r.x_rows.stride = 5; }},
        {"weight is NULL", [](Run &r) { r.weight_argument = nullptr; }},
        {"weight is at", [](Run &r) { r.weight_argument = moved(r.weight.data[0], 2); }},
        {"order is NULL", [](Run &r) { r.order_argument = nullptr; }},
        {"order is at", [](Run &r) { r.order_argument = moved(r.order_argument, 1); }},
        {"offsets_host is NULL", [](Run &r) { r.ends_argument = nullptr; }},
        {"offsets_host is at", [](Run &r) { r.ends_argument = moved(r.ends_argument, 2); }},
        {"offsets_host\\[0\\] is 1, wanted 0", [](Run &r) { r.ends[0] = 1; }},
        {"offsets_host\\[4\\] is 7, wanted . to 6", [](Run &r) { r.ends[4] = 7; }},
        {"offsets_host\\[2\\] is -1, wanted", [](Run &r) { r.ends[2] = -1; }},
        {"saved->gate_up is at", [](Run &r) { r.saved.gate_up = moved(r.saved.gate_up, 2); }},
        {"saved->activated is at", [](Run &r) { r.saved.activated = moved(r.saved.activated, 1); }},
        {"workspace is at .*, wanted a multiple of 16",
         [](Run &r) { r.workspace_argument = moved(r.workspace_argument, 4); }},
        {"workspace is at", [](Run &r) { r.workspace_argument = nullptr; }},
        {"params->gate_up is \\[10, 6\\], wanted \\[40, 6\\]",
         [](Run &r) { few(r.params.gate_up); }},
        {"matrix->block_size is 48",
         [](Run &r) { few(r.params.down), r.params.down.block_size = 48; }},
        {"matrix->absmax is NULL",
         [](Run &r) { few(r.params.down), r.params.down.absmax = nullptr; }},
        {"params->gate_up_adapter.rank is -1, wanted 0 or more",
         [](Run &r) { r.params.gate_up_adapter.rank = -1; }},
        {"params->down_adapter.rank is .*, wanted 0 or more, and at most 2\\^56 elements",
         [](Run &r) { r.params.down_adapter.rank = INT64_C(1) << 52; }},
        {"params->down_adapter is bf16, wanted f32 or f32",
         [](Run &r) { r.params.down_adapter.dtype = HR_BF16; }},
        {"params->gate_up_adapter.a is NULL", [](Run &r) { r.params.gate_up_adapter.a = nullptr; }},
        {"params->down_adapter.b is NULL", [](Run &r) { r.params.down_adapter.b = nullptr; }},
        {"params->gate_up_adapter.b is at",
         [](Run &r) { r.params.gate_up_adapter.b = moved(r.stacks.data[5], 2); }},
        {"params->down_adapter.a is at",
         [](Run &r) { r.params.down_adapter.a = moved(r.stacks.data[6], 1); }},
    };
    all = joined<Run>(
        {all, bad_config_or_exec<Run>(),
         bad_numbers<Run>("config->alpha is .*, wanted a finite binary32 above 0",
                          [](Run &r) -> double & { return r.config.alpha; }, {0, -1, INFINITY}),
         bad_numbers<Run>("params->gate_up_adapter.scale is .*, wanted a finite binary32",
                          [](Run &r) -> double & { return r.params.gate_up_adapter.scale; },
                          {INFINITY, NAN, 1e300}),
         bad_numbers<Run>("config->limit is .*, wanted a finite",
                          [](Run &r) -> double & { return r.config.limit; }, {-1, NAN, 1e300})});
    // The functions that it calls refuse much of this too, in their own name.
    for (BadInput<Run> &bad : all)
        bad.message = std::string(Run::kFunction) + ".*" + bad.message;
    return all;
}

class ForwardRun : public ExpertsRun
{
  public:
    using ExpertsRun::ExpertsRun;
    static constexpr char kFunction[] = "^hr_experts_forward";
    hr_status call() const
    {
        return forward();
    }
};

class BackwardRun : public ExpertsRun
{
  public:
    using ExpertsRun::ExpertsRun;
    static constexpr char kFunction[] = "^hr_experts_backward";
    hr_status call() const
    {
        return backward();
    }
};

class RouteRun : public ExpertsRun
{
  public:
    using ExpertsRun::ExpertsRun;
    hr_status call() const
    {
        return route();
    }
};
} // namespace

TEST_P(ExpertsRefused, BadInputsOfRouting)
{
    using Run = RouteRun;
    expect_all_refused<Run>(
        *backend, good_case(),
        {{"hr_route: index_bytes is 1, wanted 2, 4 or 8", [](Run &r) { r.index_bytes = 1; }},
         {"rows is -1", [](Run &r) { r.route_rows = -1; }},
         {"rows is 2147483648", [](Run &r) { r.route_rows = INT64_C(1) << 31; }},
         {"experts is 0", [](Run &r) { r.route_experts = 0; }},
         {"exec is NULL", [](Run &r) { r.exec_argument = nullptr; }},
         {"offsets is NULL", [](Run &r) { r.offsets_argument = nullptr; }},
         {"offsets is at", [](Run &r) { r.offsets_argument = moved(r.offsets_argument, 2); }},
         {"order is NULL", [](Run &r) { r.order_argument = nullptr; }},
         {"order is at", [](Run &r) { r.order_argument = moved(r.order_argument, 3); }},
         {"index is NULL", [](Run &r) { r.index_argument = nullptr; }},
         {"index is at", [](Run &r) { r.index_argument = moved(r.index_argument, 4); }}});
}

TEST_P(ExpertsRefused, BadInputsOfForward)
{
    using Run = ForwardRun;
    expect_all_refused<Run>(*backend, good_case(), bad_inputs<Run>());
    expect_all_refused<Run>(*backend, good_case(),
                            {{"x is NULL", [](Run &r) { r.x_argument = nullptr; }},
                             {"y is NULL", [](Run &r) { r.y_argument = nullptr; }},
                             {"y is at", [](Run &r) { r.y_argument = moved(r.y_argument, 2); }},
                             {"workspace_bytes is .*, wanted", [](Run &r) { r.forward_bytes--; }}});
    Run run(*backend, good_case());
    expect_no_such_device(run);
}

TEST_P(ExpertsRefused, BadInputsOfBackward)
{
    using Run = BackwardRun;
    expect_all_refused<Run>(*backend, good_case(), bad_inputs<Run>());
    expect_all_refused<Run>(
        *backend, good_case(),
        {{"x is NULL", [](Run &r) { r.x_argument = nullptr; }},
         {"dy is NULL", [](Run &r) { r.dy_argument = nullptr; }},
         {"dy->stride is 4", [](Run &r) { r.dy_rows.stride = 4; }},
         {"dx is at", [](Run &r) { r.dx_argument = moved(r.dx_argument, 1); }},
         {"dweight is at", [](Run &r) { r.dweight_argument = moved(r.dweight_argument, 1); }},
         {"grads->gate_up is at",
          [](Run &r) { r.gradient.gate_up = moved(r.gradient.gate_up, 2); }},
         {"grads->down is at", [](Run &r) { r.gradient.down = moved(r.gradient.down, 2); }},
         {"grads->gate_up_bias is at",
          [](Run &r) { r.gradient.gate_up_bias = moved(r.gradient.gate_up_bias, 2); }},
         {"grads->down_bias is at",
          [](Run &r) { r.gradient.down_bias = moved(r.gradient.down_bias, 2); }},
         {"grads->gate_up_a is at",
          [](Run &r) { r.gradient.gate_up_a = moved(r.gradient.gate_up_a, 2); }},
         {"grads->down_b is at", [](Run &r) { r.gradient.down_b = moved(r.gradient.down_b, 1); }},
         {"a gradient of gate_up is wanted, but stacks of few bits have none",
          [](Run &r) { few(r.params.gate_up), r.params.gate_up.rows = 40; }},
         {"a gradient of the adapter of down is wanted, but its rank is 0",
          [](Run &r) { r.params.down_adapter.rank = 0; }},
         {"so there is nothing to do",
          [](Run &r) { r.gradient = {}, r.dx_argument = r.dweight_argument = nullptr; }},
         {"workspace_bytes is .*, wanted", [](Run &r) { r.backward_bytes--; }}});
}

TEST_P(ExpertsRefused, BadInputsOfACapture)
{
    if (!backend->pretend_capture(false))
        GTEST_SKIP() << "only the emulator pretends";
    ForwardRun run(*backend, good_case());
    const std::vector<uint8_t> before = run.image();
    backend->pretend_capture(true);
    const hr_status status = run.call();
    backend->pretend_capture(false);
    EXPECT_EQ(status, HR_UNSUPPORTED);
    EXPECT_TRUE(matches(hr_last_error(), "exec->stream is being captured"));
    EXPECT_EQ(run.image(), before);
}

TEST(ExpertsQuery, BadInputs)
{
    const ExpertsRun run(cpu_backend(), good_case());
    hr_experts_needs needs;
    std::memset(&needs, 0x5A, sizeof needs);
    const hr_experts_needs before = needs;
    const auto refused = [&](const char *message, hr_experts_needs *to, int save, uint32_t wanted) {
        EXPECT_EQ(hr_experts_query(to, &run.sizes, hr_experts_save(save), wanted, &run.params,
                                   &run.config, &run.exec),
                  HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), message));
        EXPECT_EQ(std::memcmp(&needs, &before, sizeof needs), 0);
    };
    refused("needs is NULL", nullptr, 0, 1);
    hr_experts_config config = run.config;
    config.gated = 2;
    EXPECT_EQ(hr_experts_query(&needs, &run.sizes, HR_EXPERTS_SAVE_ALL, 1, &run.params, &config,
                               &run.exec),
              HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_experts_query: config->gated is 2"));
    refused("needs is at .*, which is not a multiple of 8 bytes", moved(&needs, 1), 0, 1);
    refused("hr_experts_query: save is 3", &needs, 3, 1);
    refused("wanted is 1024, wanted at most 1023", &needs, 0, 1024);
    ExpertsCase c = good_case();
    c.gate_up_rank = 0, c.down_format = HR_NF4;
    const ExpertsRun other(cpu_backend(), c);
    for (const auto &[wanted, message] :
         {std::pair(HR_EXPERTS_DOWN, "a gradient of down is wanted"),
          std::pair(HR_EXPERTS_GATE_UP_B, "but its rank is 0")}) {
        EXPECT_EQ(hr_experts_query(&needs, &other.sizes, HR_EXPERTS_SAVE_ALL, uint32_t(wanted),
                                   &other.params, &other.config, &other.exec),
                  HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), message));
    }
}
