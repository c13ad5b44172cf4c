/* experts_plan.c: checks the arguments of experts, and says what lies where in the workspace. */
#include <inttypes.h>
#include <math.h>

#include "capi/check/matrix.h"
#include "capi/check/rows.h"
#include "capi/nn/experts_call.h"

#define TILE_ROWS 512

#define MOST_ROWS    (INT64_C(1) << 31) /* less, for numbers of rows have 32 bits */
#define MOST_EXPERTS (INT64_C(1) << 30)
#define MOST         (INT64_C(1) << 56) /* elements of a matrix */

static hr_status check_sizes(const char *function, const hr_experts_sizes *s)
{
    HR_REQUIRE(s, "%s: sizes is NULL", function);
    HR_REQUIRE(s->tokens >= 0, "%s: sizes->tokens is %" PRId64 ", wanted 0 or more", function,
               s->tokens);
    HR_REQUIRE(s->slots >= 1, "%s: sizes->slots is %" PRId64 ", wanted 1 or more", function,
               s->slots);
    HR_REQUIRE(s->tokens == 0 || s->slots <= (MOST_ROWS - 1) / s->tokens,
               "%s: sizes->tokens is %" PRId64 " and sizes->slots %" PRId64
               ", wanted fewer than 2^31 rows",
               function, s->tokens, s->slots);
    HR_REQUIRE(s->experts >= 1 && s->experts < MOST_EXPERTS,
               "%s: sizes->experts is %" PRId64 ", wanted from 1 to less than 2^30", function,
               s->experts);
    HR_REQUIRE(s->hidden >= 1, "%s: sizes->hidden is %" PRId64 ", wanted 1 or more", function,
               s->hidden);
    HR_REQUIRE(s->features >= 1, "%s: sizes->features is %" PRId64 ", wanted 1 or more", function,
               s->features);
    const int64_t longest = s->tokens * s->slots > s->experts ? s->tokens * s->slots : s->experts;
    HR_REQUIRE(s->hidden <= MOST / s->features / 2 && s->features <= MOST / longest &&
                   s->hidden <= MOST / longest && s->hidden * s->features <= MOST / s->experts,
               "%s: sizes->hidden is %" PRId64 " and sizes->features %" PRId64
               ", wanted at most 2^56 elements of rows, and of a stack",
               function, s->hidden, s->features);
    return HR_OK;
}

static hr_status check_config(const char *function, hr_experts_config *own,
                              const hr_experts_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_experts_config, reserved) + sizeof own->reserved,
                          "HR_EXPERTS_CONFIG_INIT"));
    HR_REQUIRE(own->activation == HR_SILU || own->activation == HR_GELU_TANH ||
                   own->activation == HR_RELU_SQUARED || own->activation == HR_SWIGLU_ALPHA,
               "%s: config->activation is %d, wanted HR_SILU (0), HR_GELU_TANH (2), "
               "HR_RELU_SQUARED (4) or HR_SWIGLU_ALPHA (5)",
               function, (int)own->activation);
    HR_TRY(hr_check_float(function, "config->dtype", own->dtype));
    HR_REQUIRE(own->weight_dtype == HR_F32 || own->weight_dtype == own->dtype,
               "%s: config->weight_dtype is %s, wanted f32 or config->dtype (%s)", function,
               hr_dtype_name(own->weight_dtype), hr_dtype_name(own->dtype));
    const struct {
        const char *name;
        int32_t value;
    } flags[] = {{"gated", own->gated},
                 {"transposed", own->transposed},
                 {"interleaved", own->interleaved},
                 {"allow_tf32", own->allow_tf32},
                 {"allow_reduced_precision_reduction", own->allow_reduced_precision_reduction},
                 {"deterministic", own->deterministic}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        HR_TRY(hr_check_flag(function, flags[i].name, flags[i].value));
    HR_REQUIRE(!own->interleaved || own->gated,
               "%s: config->interleaved is 1, wanted 0 without config->gated", function);
    HR_REQUIRE((float)own->alpha > 0.0f && isfinite((float)own->alpha),
               "%s: config->alpha is %g, wanted a finite binary32 above 0", function, own->alpha);
    HR_REQUIRE((own->limit == 0.0 || (float)own->limit > 0.0f) && isfinite((float)own->limit),
               "%s: config->limit is %g, wanted a finite binary32 above 0, or 0 for none", function,
               own->limit);
    HR_REQUIRE(own->tile_rows >= 0, "%s: config->tile_rows is %" PRId64 ", wanted 0 or more",
               function, own->tile_rows);
    HR_REQUIRE(own->reserved == 0, "%s: config->reserved is %" PRId32 ", wanted 0", function,
               own->reserved);
    return HR_OK;
}

static hr_status check_stack(const experts_call *call, const char *name, hr_matrix *own,
                             int64_t pitch, int64_t outputs, int64_t inputs)
{
    const char *const function = call->function;
    const hr_matrix given = *own;
    HR_TRY(hr_check_matrix(function, own, &given, 0));
    const int is_dense = own->format == HR_DENSE;
    HR_REQUIRE(own->dtype == call->config.dtype || own->dtype == HR_F32,
               "%s: params->%s is %s, wanted %s or f32", function, name, hr_dtype_name(own->dtype),
               hr_dtype_name(call->config.dtype));
    const int64_t rows =
        (call->config.transposed ? inputs : outputs) * (is_dense ? 1 : call->sizes.experts);
    const int64_t cols = call->config.transposed ? outputs : inputs;
    HR_REQUIRE(own->rows == rows && own->cols == cols,
               "%s: params->%s is [%" PRId64 ", %" PRId64 "], wanted [%" PRId64 ", %" PRId64 "]",
               function, name, own->rows, own->cols, rows, cols);
    const int64_t least = (rows - 1) * own->stride + cols;
    HR_REQUIRE(call->sizes.experts == 1 || !is_dense ||
                   (pitch >= least && pitch <= 8 * (MOST / call->sizes.experts)),
               "%s: params->%s_pitch is %" PRId64 ", wanted %" PRId64
               " or more, and at most 2^59 elements in all",
               function, name, pitch, least);
    return HR_OK;
}

static hr_status check_adapter(const experts_call *call, const char *name,
                               hr_experts_adapter *adapter, int64_t outputs, int64_t inputs)
{
    const char *const function = call->function;
    const int64_t longer = outputs > inputs ? outputs : inputs;
    const int64_t most = call->rows > call->sizes.experts ? call->rows : call->sizes.experts;
    HR_REQUIRE(adapter->rank >= 0 && adapter->rank <= MOST / most / longer,
               "%s: params->%s_adapter.rank is %" PRId64
               ", wanted 0 or more, and at most 2^56 elements in all",
               function, name, adapter->rank);
    if (adapter->rank == 0)
        *adapter = (hr_experts_adapter){.dtype = HR_F32};
    HR_REQUIRE(isfinite((float)adapter->scale),
               "%s: params->%s_adapter.scale is %g, wanted a finite binary32", function, name,
               adapter->scale);
    HR_REQUIRE(adapter->dtype == call->config.dtype || adapter->dtype == HR_F32,
               "%s: params->%s_adapter is %s, wanted %s or f32", function, name,
               hr_dtype_name(adapter->dtype), hr_dtype_name(call->config.dtype));
    return HR_OK;
}

/* Where an adapter lies, which a query does without. */
static hr_status check_factor(const experts_call *call, const char *name, const void *factor,
                              const hr_experts_adapter *adapter)
{
    HR_REQUIRE(factor || adapter->rank == 0, "%s: %s is NULL", call->function, name);
    return hr_check_vector(call->function, name, factor, adapter->dtype);
}

hr_status experts_begin(experts_call *call, const hr_experts_sizes *sizes,
                        const hr_experts_params *params, const hr_experts_config *config,
                        const hr_exec *exec)
{
    const char *const function = call->function;
    call->config = (hr_experts_config)HR_EXPERTS_CONFIG_INIT;
    HR_TRY(check_sizes(function, sizes));
    HR_TRY(check_config(function, &call->config, config));
    HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(params, "%s: params is NULL", function);
    call->sizes = *sizes;
    call->params = *params;
    call->exec = exec;
    call->rows = sizes->tokens * sizes->slots;
    call->width = call->config.gated ? 2 * sizes->features : sizes->features;
    call->element = hr_dtype_size(call->config.dtype);
    const int64_t tile = call->config.tile_rows > 0 ? call->config.tile_rows : TILE_ROWS;
    call->tile = tile < call->rows ? tile : call->rows > 0 ? call->rows : 1;
    HR_TRY(check_stack(call, "gate_up", &call->params.gate_up, params->gate_up_pitch, call->width,
                       sizes->hidden));
    HR_TRY(check_stack(call, "down", &call->params.down, params->down_pitch, sizes->hidden,
                       sizes->features));
    HR_TRY(
        check_adapter(call, "gate_up", &call->params.gate_up_adapter, call->width, sizes->hidden));
    HR_TRY(check_adapter(call, "down", &call->params.down_adapter, sizes->hidden, sizes->features));
    int captured = 0;
    HR_ON_DEVICE(exec, experts_capture, &captured);
    if (!HR_CHECK_PASSES(!captured))
        return hr_fail(HR_UNSUPPORTED,
                       "%s: exec->stream is being captured, but a graph would repeat the products "
                       "for the routing of its capture: leave experts out of CUDA graphs",
                       function);
    return HR_OK;
}

hr_status experts_check_call(experts_call *call, const hr_rows *x, const void *weight,
                             const int32_t *order, const int32_t *offsets_host,
                             const hr_experts_saved *saved)
{
    const char *const function = call->function;
    const hr_experts_sizes *const s = &call->sizes;
    const hr_dtype dtype = call->config.dtype;
    HR_TRY(hr_check_rows(function, "x", x, s->tokens, s->hidden, dtype));
    HR_REQUIRE(weight || call->rows == 0, "%s: weight is NULL", function);
    HR_TRY(hr_check_vector(function, "weight", weight, call->config.weight_dtype));
    HR_REQUIRE(order || call->rows == 0, "%s: order is NULL", function);
    HR_TRY(hr_check_vector(function, "order", order, HR_F32));
    HR_REQUIRE(offsets_host, "%s: offsets_host is NULL", function);
    HR_TRY(hr_check_vector(function, "offsets_host", offsets_host, HR_F32));
    HR_REQUIRE(offsets_host[0] == 0, "%s: offsets_host[0] is %" PRId32 ", wanted 0", function,
               offsets_host[0]);
    for (int64_t e = 0; e < s->experts; e++)
        HR_REQUIRE(offsets_host[e + 1] >= offsets_host[e] && offsets_host[e + 1] <= call->rows,
                   "%s: offsets_host[%" PRId64 "] is %" PRId32 ", wanted %" PRId32 " to %" PRId64,
                   function, e + 1, offsets_host[e + 1], offsets_host[e], call->rows);
    HR_TRY(hr_check_vector(function, "params->gate_up_bias", call->params.gate_up_bias, dtype));
    HR_TRY(hr_check_vector(function, "params->down_bias", call->params.down_bias, dtype));
    const hr_experts_adapter *const first = &call->params.gate_up_adapter;
    const hr_experts_adapter *const second = &call->params.down_adapter;
    HR_TRY(check_factor(call, "params->gate_up_adapter.a", first->a, first));
    HR_TRY(check_factor(call, "params->gate_up_adapter.b", first->b, first));
    HR_TRY(check_factor(call, "params->down_adapter.a", second->a, second));
    HR_TRY(check_factor(call, "params->down_adapter.b", second->b, second));
    if (saved)
        call->saved = *saved;
    HR_TRY(hr_check_vector(function, "saved->gate_up", call->saved.gate_up, dtype));
    HR_TRY(hr_check_vector(function, "saved->activated", call->saved.activated, dtype));
    call->x = hr_rows_or_none(x);
    call->weight = weight;
    call->order = order;
    call->offsets = offsets_host;
    return HR_OK;
}

hr_status experts_check_wanted(const experts_call *call, uint32_t wanted)
{
    const hr_experts_params *const p = &call->params;
    const struct {
        const char *name;
        uint32_t own, adapters;
        hr_format format;
        int64_t rank;
    } all[] = {{"gate_up", HR_EXPERTS_GATE_UP, HR_EXPERTS_GATE_UP_A | HR_EXPERTS_GATE_UP_B,
                p->gate_up.format, p->gate_up_adapter.rank},
               {"down", HR_EXPERTS_DOWN, HR_EXPERTS_DOWN_A | HR_EXPERTS_DOWN_B, p->down.format,
                p->down_adapter.rank}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        HR_REQUIRE(!(wanted & all[i].own) || all[i].format == HR_DENSE,
                   "%s: a gradient of %s is wanted, but stacks of few bits have none",
                   call->function, all[i].name);
        HR_REQUIRE(!(wanted & all[i].adapters) || all[i].rank > 0,
                   "%s: a gradient of the adapter of %s is wanted, but its rank is 0",
                   call->function, all[i].name);
    }
    return HR_OK;
}

hr_status experts_check_workspace(experts_call *call, void *workspace, size_t bytes)
{
    HR_REQUIRE(bytes >= call->layout.bytes, "%s: workspace_bytes is %zu, wanted %zu",
               call->function, bytes, call->layout.bytes);
    HR_REQUIRE(workspace && (uintptr_t)workspace % 16 == 0,
               "%s: workspace is at %p, wanted a multiple of 16 bytes", call->function, workspace);
    const size_t past = (uintptr_t)workspace % HR_PART_ALIGNMENT;
    call->workspace = (char *)workspace + (past ? HR_PART_ALIGNMENT - past : 0);
    return HR_OK;
}

/* ---- Where things lie ------------------------------------------------------------------------ */

int experts_reads_x(uint32_t wanted, int keeps_gate_up)
{
    return (wanted & (HR_EXPERTS_GATE_UP | HR_EXPERTS_GATE_UP_A | HR_EXPERTS_GATE_UP_B)) ||
           ((wanted & EXPERTS_INNER) && !keeps_gate_up);
}

/* The sums of gradients that are not binary32, where an expert may have several tiles. */
static void take_sums(experts_call *call, experts_parts *parts, uint32_t wanted, uint32_t own,
                      uint32_t a, uint32_t b, const hr_matrix *stack,
                      const hr_experts_adapter *adapter, int64_t outputs, int64_t inputs)
{
    size_t *const bytes = &call->layout.bytes;
    const uint32_t summed = call->rows > call->tile ? wanted : 0;
    const int is_wide = adapter->dtype == HR_F32;
    parts->sum = hr_take_part(bytes, (summed & own) && stack->dtype != HR_F32, outputs, inputs,
                              sizeof(float));
    parts->a_sum =
        hr_take_part(bytes, (summed & a) && !is_wide, adapter->rank, inputs, sizeof(float));
    parts->b_sum =
        hr_take_part(bytes, (summed & b) && !is_wide, outputs, adapter->rank, sizeof(float));
}

/* Matrices that are rounded or decoded, and what adapters make on the way. */
static void take_matrices(experts_call *call, experts_parts *parts, const hr_matrix *stack,
                          const hr_experts_adapter *adapter, int64_t outputs, int64_t inputs)
{
    size_t *const bytes = &call->layout.bytes;
    const hr_dtype dtype = call->config.dtype;
    const int adapts = adapter->rank > 0, rounds = adapts && adapter->dtype != dtype;
    parts->matrix = hr_take_part(bytes, stack->dtype != dtype || stack->format != HR_DENSE, outputs,
                                 inputs, call->element);
    parts->a = hr_take_part(bytes, rounds, adapter->rank, inputs, call->element);
    parts->b = hr_take_part(bytes, rounds, outputs, adapter->rank, call->element);
    parts->t = hr_take_part(bytes, adapts, call->tile, adapter->rank, call->element);
    parts->u = hr_take_part(bytes, adapts, call->tile, adapter->rank, call->element);
}

/* What both passes have: matrices in another dtype, sums of tokens, and scratch memory of products. */
static hr_status finish(experts_call *call, int sums)
{
    experts_layout *const layout = &call->layout;
    const hr_experts_sizes *const s = &call->sizes;
    const hr_experts_params *const p = &call->params;
    take_matrices(call, &layout->of_gate_up, &p->gate_up, &p->gate_up_adapter, call->width,
                  s->hidden);
    take_matrices(call, &layout->of_down, &p->down, &p->down_adapter, s->hidden, s->features);
    layout->out = hr_take_part(&layout->bytes, sums, call->tile, s->hidden, sizeof(float));
    layout->sums = hr_take_part(&layout->bytes, sums && call->config.dtype != HR_F32, s->tokens,
                                s->hidden, sizeof(float));
    const hr_gemm_config config = experts_gemm_config(call);
    const hr_status status = hr_gemm_workspace(&layout->product_bytes, call->tile, call->width,
                                               s->hidden, &config, call->exec);
    layout->product = hr_take_part(&layout->bytes, layout->product_bytes > 0, 1,
                                   (int64_t)layout->product_bytes, 1);
    layout->bytes += HR_PART_ALIGNMENT;
    return status;
}

static const experts_layout nothing = {.x = HR_NO_PART,
                                       .dy = HR_NO_PART,
                                       .gate_up = HR_NO_PART,
                                       .gate_up_grads = HR_NO_PART,
                                       .inner = HR_NO_PART,
                                       .q = HR_NO_PART,
                                       .bias_sum = HR_NO_PART};

hr_status experts_plan_forward(experts_call *call, int keeps_gate_up, int keeps_activated)
{
    const hr_experts_sizes *const s = &call->sizes;
    experts_layout *const layout = &call->layout;
    *layout = nothing;
    layout->x = hr_take_part(&layout->bytes, 1, call->tile, s->hidden, call->element);
    layout->gate_up =
        hr_take_part(&layout->bytes, !keeps_gate_up, call->tile, call->width, call->element);
    layout->inner =
        hr_take_part(&layout->bytes, !keeps_activated, call->tile, s->features, call->element);
    return finish(call, 1);
}

hr_status experts_plan_backward(experts_call *call, uint32_t wanted, int keeps_gate_up)
{
    const hr_experts_sizes *const s = &call->sizes;
    const hr_experts_params *const p = &call->params;
    experts_layout *const layout = &call->layout;
    *layout = nothing;
    const int inner = (wanted & EXPERTS_INNER) != 0, several = call->rows > call->tile;
    layout->dy = hr_take_part(&layout->bytes, inner, call->tile, s->hidden, call->element);
    layout->x = hr_take_part(&layout->bytes, experts_reads_x(wanted, keeps_gate_up), call->tile,
                             s->hidden, call->element);
    layout->gate_up_grads =
        hr_take_part(&layout->bytes, inner, call->tile, call->width, call->element);
    layout->gate_up = keeps_gate_up ? HR_NO_PART : layout->gate_up_grads;
    layout->q = hr_take_part(&layout->bytes, inner, call->tile, s->features, sizeof(float));
    const uint32_t weighted = HR_EXPERTS_DOWN | HR_EXPERTS_DOWN_A | HR_EXPERTS_DOWN_B;
    layout->inner = hr_take_part(&layout->bytes, (wanted & weighted) != 0, call->tile, s->features,
                                 call->element);
    take_sums(call, &layout->of_gate_up, wanted, HR_EXPERTS_GATE_UP, HR_EXPERTS_GATE_UP_A,
              HR_EXPERTS_GATE_UP_B, &p->gate_up, &p->gate_up_adapter, call->width, s->hidden);
    take_sums(call, &layout->of_down, wanted, HR_EXPERTS_DOWN, HR_EXPERTS_DOWN_A, HR_EXPERTS_DOWN_B,
              &p->down, &p->down_adapter, s->hidden, s->features);
    layout->bias_sum = hr_take_part(&layout->bytes, several && (wanted & HR_EXPERTS_GATE_UP_BIAS),
                                    1, call->width, sizeof(double));
    return finish(call, wanted & HR_EXPERTS_X);
}
