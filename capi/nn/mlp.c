/* mlp.c: hr_mlp_query and hr_mlp_forward, a tile of tokens after another. */
#include <inttypes.h>

#include "capi/check/rows.h"
#include "capi/nn/mlp_call.h"
#include "kernels/core/copy.h"
#include "kernels/nn/gemm.h"

hr_status hr_mlp_query(hr_mlp_needs *needs, int64_t tokens, int64_t hidden, int64_t features,
                       hr_mlp_save save, uint32_t wanted, const hr_mlp_config *config,
                       const hr_exec *exec)
{
    static const char function[] = "hr_mlp_query";
    hr_mlp_config own = HR_MLP_CONFIG_INIT;
    hr_matrix matrices[3];
    hr_mlp_params unread = {0};
    HR_REQUIRE(needs, "%s: needs is NULL", function);
    HR_TRY(hr_check_vector(function, "needs", needs, HR_F64));
    HR_TRY(mlp_check_sizes(function, tokens, hidden, features));
    HR_TRY(mlp_check_config(function, &own, config));
    HR_TRY(mlp_check_matrices(function, &own, matrices, &unread, hidden, features));
    HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(save >= HR_MLP_SAVE_ALL && save <= HR_MLP_SAVE_INPUT,
               "%s: save is %d, wanted 0, 1 or 2", function, (int)save);
    HR_REQUIRE(!(wanted & ~(uint32_t)MLP_ANY), "%s: wanted is %" PRIu32 ", wanted at most %d",
               function, wanted, (int)MLP_ANY);
    const mlp_sizes s = mlp_sizes_of(tokens, hidden, features, &own);
    const uint32_t kept = mlp_kept(save, wanted);
    mlp_layout forward, backward;
    HR_RUN(mlp_forward_layout(&forward, &s, kept, &own, exec));
    HR_RUN(mlp_backward_layout(&backward, &s, wanted, kept, &own, exec));
    const size_t rows = (size_t)tokens;
    *needs = (hr_mlp_needs){
        .mean = kept & MLP_STATISTICS && own.norm == HR_NORM_LAYER ? rows * sizeof(float) : 0,
        .rstd = kept & MLP_STATISTICS ? rows * sizeof(float) : 0,
        .normed = kept & MLP_NORMED ? rows * (size_t)hidden * s.element : 0,
        .gate_up = kept & MLP_GATE_UP ? rows * (size_t)s.width * s.element : 0,
        .activated = kept & MLP_ACTIVATED ? rows * (size_t)features * s.element : 0,
        .forward_workspace = forward.bytes,
        .backward_workspace = backward.bytes,
        .tile_tokens = s.tile,
        .reads_x = mlp_reads_x(wanted, kept)};
    return HR_OK;
}

static hr_status forward_tile(const mlp_call *call, const hr_rows *y, int64_t first, int64_t rows)
{
    const mlp_sizes *const s = &call->sizes;
    const hr_mlp_saved *const saved = &call->saved;
    const hr_rows x = mlp_rows_from(call, &call->x, first), to = mlp_rows_from(call, y, first);
    const hr_rows normed =
        mlp_tile_rows(call, saved->normed, call->layout.normed, s->hidden, first);
    const hr_rows gate_up =
        mlp_tile_rows(call, saved->gate_up, call->layout.gate_up, s->width, first);
    const hr_rows activated =
        mlp_tile_rows(call, saved->activated, call->layout.inner, s->features, first);
    const hr_norm_config norm = mlp_norm_config(&call->config);
    HR_RUN(hr_norm_forward(&normed, NULL, mlp_from_row(saved->mean, first),
                           mlp_from_row(saved->rstd, first), &x, NULL, call->params.norm_weight,
                           call->params.norm_bias, rows, s->hidden, &norm, call->exec));
    HR_RUN(mlp_gate_up(call, &gate_up, &normed, rows));
    HR_RUN(mlp_activate(call, &activated, &gate_up, rows));
    hr_gemm_config config = mlp_gemm_config(&call->config);
    config.transpose_b = 1;
    const void *bias = call->params.down_bias;
    if (call->config.residual) {
        config.beta = 1;
        config.addend = x;
    }
    /* Hosts lend products that add to a matrix, or that add a bias, but none that does both. */
    if (call->config.residual && bias && call->exec->device == HR_CPU) {
        HR_RUN(add_to_rows_host(&to, &x, bias, rows, s->hidden, call->config.dtype));
        config.addend = to;
        bias = NULL;
    }
    const mlp_factor down = {call->params.down, call->config.down};
    return mlp_product(call, &to, &activated, &down, bias, rows, s->hidden, s->features, &config);
}

static hr_status forward(const mlp_call *call, const hr_rows *y)
{
    const mlp_sizes *const s = &call->sizes;
    for (int64_t first = 0; first < s->tokens; first += s->tile) {
        const int64_t left = s->tokens - first;
        HR_RUN(forward_tile(call, y, first, left < s->tile ? left : s->tile));
    }
    return HR_OK;
}

hr_status hr_mlp_forward(const hr_rows *y, const hr_mlp_saved *saved, const hr_rows *x,
                         const hr_mlp_params *params, int64_t tokens, int64_t hidden,
                         int64_t features, const hr_mlp_config *config, void *workspace,
                         size_t workspace_bytes, const hr_exec *exec)
{
    mlp_call call = {.function = "hr_mlp_forward"};
    HR_REQUIRE(x, "%s: x is NULL", call.function);
    HR_REQUIRE(y, "%s: y is NULL", call.function);
    HR_TRY(mlp_check_call(&call, x, params, saved, tokens, hidden, features, config, exec));
    HR_TRY(hr_check_rows(call.function, "y", y, tokens, hidden, call.config.dtype));
    const uint32_t kept = mlp_kept_in(&call);
    const int in_place = y->data == x->data && tokens > 0;
    HR_REQUIRE(
        !in_place || (!kept && y->stride == x->stride),
        "%s: y is x, which must have the same stride and be needed no more, so that saved is "
        "empty",
        call.function);
    HR_REQUIRE(in_place || tokens == 0 || !gemm_overlap(y, x, tokens, hidden, call.config.dtype),
               "%s: y overlaps x, wanted y apart from x, or y that is x", call.function);
    HR_RUN(mlp_forward_layout(&call.layout, &call.sizes, kept, &call.config, exec));
    HR_TRY(mlp_check_workspace(&call, workspace, workspace_bytes));
    return forward(&call, y);
}
