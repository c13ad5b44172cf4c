// What both directions of the MLP block refuse, and its query.
#include <cmath>
#include <cstring>

#include "tests/c/harness/refused.h"
#include "tests/c/nn/mlp_run.h"

using MlpRefused = OnBackend;
ON_EVERY_BACKEND(MlpRefused);

namespace
{
const MlpCase kAll = {
    .tokens = 2, .norm = HR_NORM_LAYER, .apart = true, .biases = true, .save = HR_MLP_SAVE_ALL};

// What both directions refuse: checked once for both.
template <class Run> BadInputs<Run> bad_inputs()
{
    const auto spoiled = [](auto member, int by) {
        return [=](Run &r) { member(r) = moved(member(r), size_t(by)); };
    };
    BadInputs<Run> all = {
        {"tokens is -1, wanted 0 or more", [](Run &r) { r.tokens = -1; }},
        {"hidden is 0, wanted 1 or more", [](Run &r) { r.hidden = 0; }},
        {"features is 0, wanted 1 or more", [](Run &r) { r.features = 0; }},
        {"wanted at most 2\\^56 elements", [](Run &r) { r.tokens = INT64_MAX / 2; }},
        {"wanted at most 2\\^56 elements", [](Run &r) { r.hidden = INT64_C(1) << 55; }},
        {"config->norm is 2", [](Run &r) { r.config.norm = hr_norm_kind(2); }},
        {"config->casting is 3, wanted 0, 1 or 2",
         [](Run &r) { r.config.casting = hr_norm_casting(3); }},
        {"config->casting is 1, wanted HR_NORM_ONCE",
         [](Run &r) { r.config.casting = HR_NORM_LLAMA; }},
        {"config->activation is 5", [](Run &r) { r.config.activation = hr_activation(5); }},
        {"config->dtype is f64", [](Run &r) { r.config.dtype = HR_F64; }},
        {"config->norm_dtype is u8", [](Run &r) { r.config.norm_dtype = HR_U8; }},
        {"config->gated is 2", [](Run &r) { r.config.gated = 2; }},
        {"config->residual is -1", [](Run &r) { r.config.residual = -1; }},
        {"config->allow_tf32 is 3", [](Run &r) { r.config.allow_tf32 = 3; }},
        {"reduced_precision_reduction is 2",
         [](Run &r) { r.config.allow_reduced_precision_reduction = 2; }},
        {"config->deterministic is 2", [](Run &r) { r.config.deterministic = 2; }},
        {"eps is -1", [](Run &r) { r.config.eps = -1; }},
        {"offset is inf", [](Run &r) { r.config.offset = INFINITY; }},
        {"config->reserved is 1, wanted 0", [](Run &r) { r.config.reserved = 1; }},
        {"tile_tokens is -1", [](Run &r) { r.config.tile_tokens = -1; }},
        {"x->stride is 5, wanted cols \\(6\\)", [](Run &r) { r.x_rows.stride = 5; }},
        {"params is NULL", [](Run &r) { r.params_argument = nullptr; }},
        {"params->norm_bias is given, but only", [](Run &r) { r.config.norm = HR_NORM_RMS; }},
        {"params->up is given, but config->gated is 0", [](Run &r) { r.config.gated = 0; }},
        {"params->up_bias is given, but params->up",
         [](Run &r) { r.params.up.data = nullptr, r.gradient.up.data = nullptr; }},
        {"params->gate_up->data is NULL", [](Run &r) { r.params.gate_up.data = nullptr; }},
        {"params->up->stride is 3", [](Run &r) { r.params.up.stride = 3; }},
        {"params->down->stride is 6", [](Run &r) { r.params.down.stride = 6; }},
        {"params->norm_weight is at",
         spoiled([](Run &r) -> void *& { return r.params.norm_weight; }, 2)},
        {"params->down_bias is at",
         spoiled([](Run &r) -> void *& { return r.params.down_bias; }, 1)},
        {"saved->normed is at", spoiled([](Run &r) -> void *& { return r.saved.normed; }, 2)},
        {"workspace is at .*, wanted a multiple of 16",
         [](Run &r) { r.workspace_argument = moved(r.workspace_argument, 4); }},
        {"workspace is at", [](Run &r) { r.workspace_argument = nullptr; }},
    };
    all = joined<Run>({all, bad_config_or_exec<Run>()});
    // The functions that it calls refuse much of this too, in their own name.
    for (BadInput<Run> &bad : all)
        bad.message = std::string(Run::kFunction) + ".*" + bad.message;
    return all;
}

// A run whose call is forward alone, and one whose call is backward alone.
class MlpForwardRun : public MlpRun
{
  public:
    using MlpRun::MlpRun;
    static constexpr char kFunction[] = "^hr_mlp_forward";
    hr_status call() const
    {
        return forward();
    }
};

class MlpBackwardRun : public MlpRun
{
  public:
    using MlpRun::MlpRun;
    static constexpr char kFunction[] = "^hr_mlp_backward";
    hr_status call() const
    {
        return backward();
    }
};
} // namespace

TEST_P(MlpRefused, BadInputsOfForward)
{
    using Run = MlpForwardRun;
    expect_all_refused<Run>(*backend, kAll, bad_inputs<Run>());
    const BadInputs<Run> own = {
        {"x is NULL", [](Run &r) { r.x_argument = nullptr; }},
        {"y is NULL", [](Run &r) { r.y_argument = nullptr; }},
        {"y->data is NULL", [](Run &r) { r.y_rows.data = nullptr; }},
        {"y is x, which must have the same stride", [](Run &r) { r.y_rows = r.x_rows; }},
        {"y overlaps x",
         [](Run &r) {
             r.y_rows = {moved(r.x_rows.data, 4), r.x_rows.stride};
         }},
        {"workspace_bytes is .*, wanted", [](Run &r) { r.forward_bytes--; }},
    };
    expect_all_refused<Run>(*backend, kAll, own);
    MlpCase rms = kAll;
    rms.norm = HR_NORM_RMS, rms.apart = false;
    const BadInputs<Run> of_rms = {
        {"saved->mean is given, but only", [](Run &r) { r.saved.mean = r.saved.rstd; }},
    };
    expect_all_refused<Run>(*backend, rms, of_rms);
    Run run(*backend, kAll);
    expect_no_such_device(run);
}

// Of both directions, and of the query.
TEST_P(MlpRefused, BadInputsOfMatrices)
{
    using Run = MlpBackwardRun;
    MlpCase apart = kAll;
    apart.format = HR_NF4;
    const auto matrix = [](Run &r, int k) -> hr_matrix & { return r.few_bits[k]->matrix; };
    BadInputs<Run> bad = {
        {"config->gate_up is f32 \\[6, 6\\], wanted f32 \\[7, 6\\]",
         [=](Run &r) { matrix(r, 0).rows = 6; }},
        {"config->up is f32 \\[7, 5\\], wanted", [=](Run &r) { matrix(r, 1).cols = 5; }},
        {"config->down is f16 \\[6, 7\\], wanted f32",
         [=](Run &r) { matrix(r, 2).dtype = HR_F16; }},
        {"matrix->block_size is 63", [=](Run &r) { matrix(r, 2).block_size = 63; }},
        {"params->gate_up is given, wanted NULL with config->gate_up",
         [](Run &r) { r.params.gate_up.data = r.weights.data[2]; }},
        {"params->down is given, wanted NULL",
         [](Run &r) { r.params.down.data = r.weights.data[4]; }},
        {"params->up is given, wanted config->up with",
         [](Run &r) { r.params.up.data = r.weights.data[3], r.config.up = nullptr; }},
        {"config->up is given, wanted config->gate_up", [](Run &r) { r.config.gate_up = nullptr; }},
        {"grads->gate_up is given, wanted NULL: a matrix of few bits",
         [](Run &r) { r.gradient.gate_up.data = r.grads.data[2]; }},
        {"grads->down is given, wanted NULL",
         [](Run &r) { r.gradient.down.data = r.grads.data[4]; }},
        {"params->up is given, but config->gated is 0", [](Run &r) { r.config.gated = 0; }},
    };
    for (BadInput<Run> &each : bad) // and not by a function that it calls
        each.message = std::string(Run::kFunction) + ": " + each.message;
    expect_all_refused<Run>(*backend, apart, bad);
    Run run(*backend, apart);
    matrix(run, 2).rows = 3;
    hr_mlp_needs needs = {};
    EXPECT_EQ(
        hr_mlp_query(&needs, 2, 6, 7, HR_MLP_SAVE_ALL, HR_MLP_X, &run.config, run.exec_argument),
        HR_INVALID_ARGUMENT);
    EXPECT_TRUE(matches(hr_last_error(), "hr_mlp_query: config->down is f32 \\[3, 7\\]"));
}

TEST_P(MlpRefused, BadInputsOfBackward)
{
    using Run = MlpBackwardRun;
    const BadInputs<Run> own = {
        {"params->gate_up->data is NULL", [](Run &r) { r.params.gate_up.data = nullptr; }},
        {"workspace is at", [](Run &r) { r.workspace_argument = nullptr; }},
        {"x is NULL", [](Run &r) { r.x_argument = nullptr; }},
        {"dy is NULL", [](Run &r) { r.dy_argument = nullptr; }},
        {"dy->stride is 4", [](Run &r) { r.dy_rows.stride = 4; }},
        {"dx->stride is 4", [](Run &r) { r.dx_rows.stride = 4; }},
        {"grads is NULL", [](Run &r) { r.gradient_argument = nullptr; }},
        {"grads->gate_up->stride is 3", [](Run &r) { r.gradient.gate_up.stride = 3; }},
        {"grads->up_bias is at", [](Run &r) { r.gradient.up_bias = moved(r.gradient.up_bias, 2); }},
        {"so there is nothing to do", [](Run &r) { r.gradient = {}, r.dx_argument = nullptr; }},
        {"dx is NULL, but the gradients of the norm", [](Run &r) { r.dx_argument = nullptr; }},
        {"saved->rstd is NULL", [](Run &r) { r.saved.rstd = nullptr; }},
        {"saved->mean is NULL, wanted", [](Run &r) { r.saved.mean = nullptr; }},
        {"workspace_bytes is .*, wanted", [](Run &r) { r.backward_bytes--; }},
    };
    expect_all_refused<Run>(*backend, kAll, own);
    MlpCase packed = kAll;
    packed.apart = false;
    const BadInputs<Run> of_packed = {
        {"grads->up is given, but params->up is not",
         [](Run &r) { r.gradient.up = r.gradient.gate_up; }},
    };
    expect_all_refused<Run>(*backend, packed, of_packed);
    Run run(*backend, kAll);
    expect_no_such_device(run);
}

TEST(MlpQuery, BadInputs)
{
    hr_mlp_config config = HR_MLP_CONFIG_INIT;
    const hr_exec exec = {HR_CPU, nullptr}, nowhere = {-2, nullptr};
    hr_mlp_needs needs;
    std::memset(&needs, 0x5A, sizeof needs);
    const hr_mlp_needs before = needs;
    const auto refused = [&](const char *message, hr_mlp_needs *to, int64_t tokens, int save,
                             uint32_t wanted, const hr_mlp_config *with, const hr_exec *on) {
        EXPECT_EQ(hr_mlp_query(to, tokens, 4, 4, hr_mlp_save(save), wanted, with, on),
                  HR_INVALID_ARGUMENT);
        EXPECT_TRUE(matches(hr_last_error(), message));
        EXPECT_EQ(std::memcmp(&needs, &before, sizeof needs), 0);
    };
    refused("needs is NULL", nullptr, 4, 0, 1, &config, &exec);
    refused("needs is at .*, which is not a multiple of 8 bytes", moved(&needs, 1), 4, 0, 1,
            &config, &exec);
    refused("tokens is -1", &needs, -1, 0, 1, &config, &exec);
    refused("config is NULL", &needs, 4, 0, 1, nullptr, &exec);
    refused("hr_mlp_query: exec->device is -2", &needs, 4, 0, 1, &config, &nowhere);
    refused("save is 3", &needs, 4, 3, 1, &config, &exec);
    refused("wanted is 128, wanted at most 127", &needs, 4, 0, 128, &config, &exec);
}
