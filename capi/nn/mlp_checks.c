/* mlp_checks.c: checks the arguments of the MLP block. */
#include <inttypes.h>
#include <math.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "capi/nn/mlp_call.h"

hr_status mlp_check_config(const char *function, hr_mlp_config *own, const hr_mlp_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_mlp_config, reserved) + sizeof own->reserved,
                          "HR_MLP_CONFIG_INIT"));
    if (config->size < sizeof *own)
        own->gate_up = own->up = own->down = NULL; /* of an older header, and not half an address */
    HR_REQUIRE(own->norm == HR_NORM_RMS || own->norm == HR_NORM_LAYER,
               "%s: config->norm is %d, wanted HR_NORM_RMS (0) or HR_NORM_LAYER (1)", function,
               (int)own->norm);
    HR_REQUIRE(own->casting >= HR_NORM_ONCE && own->casting <= HR_NORM_NARROW,
               "%s: config->casting is %d, wanted 0, 1 or 2", function, (int)own->casting);
    HR_REQUIRE(own->casting == HR_NORM_ONCE || own->norm == HR_NORM_RMS,
               "%s: config->casting is %d, wanted HR_NORM_ONCE (0) with HR_NORM_LAYER", function,
               (int)own->casting);
    HR_REQUIRE(own->activation >= HR_SILU && own->activation <= HR_RELU_SQUARED,
               "%s: config->activation is %d, wanted 0 to %d", function, (int)own->activation,
               (int)HR_RELU_SQUARED);
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_TRY(hr_check_float(function, "config->norm_dtype", own->norm_dtype));
    const struct {
        const char *name;
        int32_t value;
    } flags[] = {{"gated", own->gated},
                 {"residual", own->residual},
                 {"allow_tf32", own->allow_tf32},
                 {"allow_reduced_precision_reduction", own->allow_reduced_precision_reduction},
                 {"deterministic", own->deterministic}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        HR_TRY(hr_check_flag(function, flags[i].name, flags[i].value));
    HR_REQUIRE(own->eps >= 0 && isfinite((float)own->eps),
               "%s: config->eps is %g, wanted a finite binary32 of 0 or more", function, own->eps);
    HR_REQUIRE(isfinite((float)own->offset), "%s: config->offset is %g, wanted a finite binary32",
               function, own->offset);
    HR_REQUIRE(own->reserved == 0, "%s: config->reserved is %" PRId32 ", wanted 0", function,
               own->reserved);
    HR_REQUIRE(own->tile_tokens >= 0, "%s: config->tile_tokens is %" PRId64 ", wanted 0 or more",
               function, own->tile_tokens);
    return HR_OK;
}

hr_status mlp_check_sizes(const char *function, int64_t tokens, int64_t hidden, int64_t features)
{
    HR_REQUIRE(tokens >= 0, "%s: tokens is %" PRId64 ", wanted 0 or more", function, tokens);
    HR_REQUIRE(hidden >= 1, "%s: hidden is %" PRId64 ", wanted 1 or more", function, hidden);
    HR_REQUIRE(features >= 1, "%s: features is %" PRId64 ", wanted 1 or more", function, features);
    const int64_t most = INT64_C(1) << 56;
    HR_REQUIRE(hidden <= most / features && tokens < most && features <= most / (tokens + 1) &&
                   hidden <= most / (tokens + 1),
               "%s: tokens is %" PRId64 ", hidden %" PRId64 " and features %" PRId64
               ", wanted at most 2^56 elements of a matrix",
               function, tokens, hidden, features);
    return HR_OK;
}

hr_status mlp_check_matrices(const char *function, hr_mlp_config *config, hr_matrix own[3],
                             hr_mlp_params *params, int64_t hidden, int64_t features)
{
    HR_REQUIRE(!config->gate_up || !params->up.data,
               "%s: params->up is given, wanted config->up with config->gate_up", function);
    HR_REQUIRE(!config->up || config->gate_up,
               "%s: config->up is given, wanted config->gate_up with it", function);
    const int64_t width = config->gated && !config->up ? 2 * features : features;
    const struct {
        const char *name;
        const hr_matrix **given;
        hr_rows *rows;
        int64_t outputs, inputs;
    } matrices[] = {{"gate_up", &config->gate_up, &params->gate_up, width, hidden},
                    {"up", &config->up, &params->up, features, hidden},
                    {"down", &config->down, &params->down, hidden, features}};
    for (int i = 0; i < 3; i++) {
        if (!*matrices[i].given)
            continue;
        const char *const name = matrices[i].name;
        HR_REQUIRE(!matrices[i].rows->data, "%s: params->%s is given, wanted NULL with config->%s",
                   function, name, name);
        HR_TRY(hr_check_matrix(function, &own[i], *matrices[i].given, 0));
        HR_REQUIRE(own[i].dtype == config->dtype && own[i].rows == matrices[i].outputs &&
                       own[i].cols == matrices[i].inputs,
                   "%s: config->%s is %s [%" PRId64 ", %" PRId64 "], wanted %s [%" PRId64
                   ", %" PRId64 "]",
                   function, name, hr_dtype_name(own[i].dtype), own[i].rows, own[i].cols,
                   hr_dtype_name(config->dtype), matrices[i].outputs, matrices[i].inputs);
        *matrices[i].given = own[i].format == HR_DENSE ? NULL : &own[i];
        if (own[i].format == HR_DENSE)
            *matrices[i].rows = (hr_rows){own[i].data, own[i].stride};
    }
    return HR_OK;
}

hr_status mlp_check_params(const mlp_call *call, const hr_mlp_params *p, int are_grads)
{
    const char *const function = call->function, *const name = are_grads ? "grads" : "params";
    const hr_mlp_config *const c = &call->config;
    const mlp_sizes *const s = &call->sizes;
    const int is_apart = mlp_is_apart(call);
    HR_REQUIRE(p, "%s: %s is NULL", function, name);
    HR_REQUIRE(!p->norm_bias || c->norm == HR_NORM_LAYER,
               "%s: %s->norm_bias is given, but only HR_NORM_LAYER has one", function, name);
    HR_REQUIRE(!is_apart || c->gated, "%s: params->up is given, but config->gated is 0", function);
    HR_REQUIRE((!p->up.data && !p->up_bias) || is_apart,
               "%s: %s->%s is given, but params->up is not", function, name,
               p->up.data ? "up" : "up_bias");
    const struct {
        const char *names[2];
        const hr_rows *matrix;
        const hr_matrix *few_bits;
        int64_t rows, cols;
        int optional;
    } matrices[] = {
        {{"params->gate_up", "grads->gate_up"},
         &p->gate_up,
         c->gate_up,
         is_apart ? s->features : s->width,
         s->hidden,
         are_grads},
        {{"params->up", "grads->up"}, &p->up, c->up, s->features, s->hidden, 1},
        {{"params->down", "grads->down"}, &p->down, c->down, s->hidden, s->features, are_grads}};
    for (int i = 0; i < 3; i++) {
        HR_REQUIRE(!are_grads || !matrices[i].few_bits || !matrices[i].matrix->data,
                   "%s: %s is given, wanted NULL: a matrix of few bits has no gradient", function,
                   matrices[i].names[1]);
        if (matrices[i].matrix->data || !(matrices[i].optional || matrices[i].few_bits))
            HR_TRY(hr_check_rows(function, matrices[i].names[are_grads], matrices[i].matrix,
                                 matrices[i].rows, matrices[i].cols, c->dtype));
    }
    const struct {
        const char *names[2];
        const void *vector;
        hr_dtype dtype;
    } vectors[] = {{{"params->norm_weight", "grads->norm_weight"}, p->norm_weight, c->norm_dtype},
                   {{"params->norm_bias", "grads->norm_bias"}, p->norm_bias, c->norm_dtype},
                   {{"params->gate_up_bias", "grads->gate_up_bias"}, p->gate_up_bias, c->dtype},
                   {{"params->up_bias", "grads->up_bias"}, p->up_bias, c->dtype},
                   {{"params->down_bias", "grads->down_bias"}, p->down_bias, c->dtype}};
    for (int i = 0; i < 5; i++)
        HR_TRY(hr_check_vector(function, vectors[i].names[are_grads], vectors[i].vector,
                               vectors[i].dtype));
    return HR_OK;
}

static hr_status check_saved(const mlp_call *call)
{
    const hr_mlp_saved *const saved = &call->saved;
    const hr_dtype dtype = call->config.dtype;
    HR_REQUIRE(!saved->mean || call->config.norm == HR_NORM_LAYER,
               "%s: saved->mean is given, but only HR_NORM_LAYER has one", call->function);
    const struct {
        const char *name;
        const void *vector;
        hr_dtype dtype;
    } vectors[] = {{"saved->mean", saved->mean, HR_F32},
                   {"saved->rstd", saved->rstd, HR_F32},
                   {"saved->normed", saved->normed, dtype},
                   {"saved->gate_up", saved->gate_up, dtype},
                   {"saved->activated", saved->activated, dtype}};
    for (int i = 0; i < 5; i++)
        HR_TRY(
            hr_check_vector(call->function, vectors[i].name, vectors[i].vector, vectors[i].dtype));
    return HR_OK;
}

hr_status mlp_check_workspace(mlp_call *call, void *workspace, size_t bytes)
{
    HR_REQUIRE(bytes >= call->layout.bytes, "%s: workspace_bytes is %zu, wanted %zu",
               call->function, bytes, call->layout.bytes);
    HR_REQUIRE(workspace && (uintptr_t)workspace % 16 == 0,
               "%s: workspace is at %p, wanted a multiple of 16 bytes", call->function, workspace);
    const size_t past = (uintptr_t)workspace % HR_PART_ALIGNMENT;
    call->workspace = (char *)workspace + (past ? HR_PART_ALIGNMENT - past : 0);
    return HR_OK;
}

hr_status mlp_check_call(mlp_call *call, const hr_rows *x, const hr_mlp_params *params,
                         const hr_mlp_saved *saved, int64_t tokens, int64_t hidden,
                         int64_t features, const hr_mlp_config *config, const hr_exec *exec)
{
    call->config = (hr_mlp_config)HR_MLP_CONFIG_INIT;
    HR_TRY(mlp_check_sizes(call->function, tokens, hidden, features));
    HR_TRY(mlp_check_config(call->function, &call->config, config));
    HR_TRY(hr_check_exec(call->function, exec));
    call->sizes = mlp_sizes_of(tokens, hidden, features, &call->config);
    call->exec = exec;
    HR_TRY(hr_check_rows(call->function, "x", x, tokens, hidden, call->config.dtype));
    if (x)
        call->x = *x;
    HR_REQUIRE(params, "%s: params is NULL", call->function);
    call->params = *params;
    if (saved)
        call->saved = *saved;
    HR_TRY(mlp_check_matrices(call->function, &call->config, call->matrices, &call->params, hidden,
                              features));
    HR_TRY(mlp_check_params(call, &call->params, 0));
    HR_TRY(check_saved(call));
    return HR_OK;
}
