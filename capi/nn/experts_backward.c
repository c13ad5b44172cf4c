/* experts_backward.c: hr_experts_backward: the gradients of each tile, and of each expert when its
 * last tile is done. */
#include "capi/check/rows.h"
#include "capi/nn/experts_call.h"
#include "kernels/core/columns.h"

typedef struct experts_backward {
    experts_call call;
    hr_experts_grads grads;
    void *dx, *dweight;
    hr_rows dy;
    uint32_t wanted;
} experts_backward;

/* A tile of rows of an expert. */
typedef struct experts_part {
    int64_t expert, first, count;
    int is_first, is_last; /* of the expert */
} experts_part;

/* The gradient of a matrix of an expert: outputs^T inputs, which lie the other way round where
 * matrices are transposed. With several tiles 16 bits are added up in `sum`. */
static hr_status add_matrix_grad(const experts_backward *b, const experts_part *part, void *stack,
                                 const hr_matrix *matrix, size_t sum, const void *outputs,
                                 int64_t output_count, const void *inputs, int64_t input_count)
{
    const experts_call *const call = &b->call;
    const int turned = call->config.transposed;
    const int64_t m = turned ? input_count : output_count, n = turned ? output_count : input_count;
    const hr_rows left = {(void *)(turned ? inputs : outputs), m};
    const hr_rows right = {(void *)(turned ? outputs : inputs), n};
    const size_t bytes = (size_t)(m * n) * hr_dtype_size(matrix->dtype);
    const hr_rows grad = {(char *)stack + (size_t)part->expert * bytes, n};
    const int is_summed = sum != HR_NO_PART && !(part->is_first && part->is_last);
    const hr_rows to = {is_summed ? experts_place(call, sum) : grad.data, n};
    hr_gemm_config config = experts_gemm_config(call);
    config.out_dtype = is_summed ? HR_F32 : matrix->dtype;
    config.transpose_a = 1;
    config.beta = !part->is_first;
    HR_RUN(hr_gemm(&to, &left, &right, NULL, m, n, part->count, &config,
                   experts_place(call, call->layout.product), call->layout.product_bytes,
                   call->exec));
    return is_summed && part->is_last ? experts_round(call, &grad, matrix->dtype, &to, m, n)
                                      : HR_OK;
}

static hr_status add_gate_up_bias(const experts_backward *b, const experts_part *part,
                                  const void *gate_up_grads)
{
    const experts_call *const call = &b->call;
    const size_t bytes = (size_t)call->width * call->element;
    const column_sums sums = {
        .x = {(void *)gate_up_grads, call->width},
        .dtype = call->config.dtype,
        .out_dtype = call->config.dtype,
        .rows = part->count,
        .cols = call->width,
        .factor = 1.0,
        .sums = (double *)experts_place(call, call->layout.bias_sum),
        .out = part->is_last ? (char *)b->grads.gate_up_bias + (size_t)part->expert * bytes : NULL,
        .is_first = part->is_first};
    HR_ON_DEVICE(call->exec, sum_columns, &sums);
    return HR_OK;
}

/* All rows of the expert at once, from where they lie. */
static hr_status write_down_bias(const experts_backward *b, int64_t expert)
{
    const experts_call *const call = &b->call;
    const int64_t first = call->offsets[expert], hidden = call->sizes.hidden;
    const size_t bytes = (size_t)hidden * call->element;
    const experts_bias_args args = {
        .tile = experts_tile_at(call, first, call->offsets[expert + 1] - first),
        .out = (char *)b->grads.down_bias + (size_t)expert * bytes,
        .dy = b->dy,
        .weight = call->weight,
        .dtype = call->config.dtype,
        .weight_dtype = call->config.weight_dtype,
        .cols = hidden};
    HR_ON_DEVICE(call->exec, experts_bias, &args);
    return HR_OK;
}

static hr_status backward_tile(const experts_backward *b, const experts_part *part,
                               const experts_matrix *gate_up, const experts_matrix *down)
{
    const experts_call *const call = &b->call;
    const experts_layout *const at = &call->layout;
    const hr_experts_sizes *const s = &call->sizes;
    const experts_tile tile = experts_tile_at(call, part->first, part->count);
    const void *const x = experts_place(call, at->x), *const dy = experts_place(call, at->dy);
    void *const gates =
        experts_rows(call, call->saved.gate_up, at->gate_up, part->first, call->width);
    void *const q = experts_place(call, at->q);
    if (x)
        HR_RUN(experts_gather(call, &tile, at->x, &call->x));
    if (!call->saved.gate_up)
        HR_RUN(experts_gate_up(call, gates, &tile, gate_up, part->expert));
    HR_RUN(experts_gather(call, &tile, at->dy, &b->dy));
    HR_RUN(experts_times(call, q, HR_F32, dy, down, NULL, part->count, 1));
    void *const h = call->saved.activated
                        ? experts_rows(call, call->saved.activated, 0, part->first, s->features)
                        : NULL;
    experts_activate_args unit = experts_unit_args(call, &tile, gates, h);
    const void *const biases = call->params.down_bias;
    const size_t offset = (size_t)(part->expert * s->hidden) * call->element;
    unit.q = (const float *)q;
    unit.weight = call->weight;
    unit.grads = experts_place(call, at->gate_up_grads);
    unit.weighted = experts_place(call, at->inner);
    unit.dweight = b->dweight;
    unit.dy = dy;
    unit.down_bias = biases ? (const char *)biases + offset : NULL;
    HR_ON_DEVICE(call->exec, experts_activate, &unit);
    if (b->grads.down)
        HR_RUN(add_matrix_grad(b, part, b->grads.down, &call->params.down, at->down_sum, dy,
                               s->hidden, unit.weighted, s->features));
    if (b->grads.gate_up)
        HR_RUN(add_matrix_grad(b, part, b->grads.gate_up, &call->params.gate_up, at->gate_up_sum,
                               unit.grads, call->width, x, s->hidden));
    if (b->grads.gate_up_bias)
        HR_RUN(add_gate_up_bias(b, part, unit.grads));
    if (!b->dx)
        return HR_OK;
    HR_RUN(experts_times(call, experts_place(call, at->out), HR_F32, unit.grads, gate_up, NULL,
                         part->count, 1));
    return experts_add(call, b->dx, &tile, NULL, NULL);
}

/* Gradients of 0 for an expert without rows. */
static hr_status write_zeros(const experts_backward *b, int64_t expert)
{
    const experts_call *const call = &b->call;
    const hr_experts_sizes *const s = &call->sizes;
    const struct {
        void *stack;
        int64_t numel;
        size_t element;
    } all[] = {
        {b->grads.gate_up, call->width * s->hidden, hr_dtype_size(call->params.gate_up.dtype)},
        {b->grads.down, s->hidden * s->features, hr_dtype_size(call->params.down.dtype)},
        {b->grads.gate_up_bias, call->width, call->element}};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        const size_t bytes = (size_t)all[i].numel * all[i].element;
        if (all[i].stack)
            HR_ON_DEVICE(call->exec, experts_zero, (char *)all[i].stack + (size_t)expert * bytes,
                         bytes);
    }
    return HR_OK;
}

static hr_status backward_expert(const experts_backward *b, int64_t expert)
{
    const experts_call *const call = &b->call;
    const int64_t begin = call->offsets[expert], end = call->offsets[expert + 1];
    if (b->grads.down_bias)
        HR_RUN(write_down_bias(b, expert));
    if (!(b->wanted & EXPERTS_INNER))
        return HR_OK;
    if (begin == end)
        return write_zeros(b, expert);
    experts_matrix gate_up, down;
    HR_RUN(experts_take(call, expert, &gate_up, &down));
    for (int64_t first = begin, next; first < end; first = next) {
        next = experts_tile_end(call, expert, first);
        const experts_part part = {expert, first, next - first, first == begin, next == end};
        HR_RUN(backward_tile(b, &part, &gate_up, &down));
    }
    return HR_OK;
}

static hr_status backward(const experts_backward *b)
{
    const experts_call *const call = &b->call;
    if (b->dx)
        HR_RUN(experts_begin_sums(call, b->dx));
    if (b->dweight && call->rows > 0) /* rows that are dropped keep it */
        HR_ON_DEVICE(call->exec, experts_zero, b->dweight,
                     (size_t)call->rows * hr_dtype_size(call->config.weight_dtype));
    for (int64_t e = 0; e < call->sizes.experts; e++)
        HR_RUN(backward_expert(b, e));
    return b->dx ? experts_end_sums(call, b->dx) : HR_OK;
}

static hr_status check_grads(experts_backward *b, const hr_experts_grads *grads)
{
    const char *const function = b->call.function;
    const hr_dtype dtype = b->call.config.dtype;
    if (grads)
        b->grads = *grads;
    HR_TRY(hr_check_vector(function, "dx", b->dx, dtype));
    HR_TRY(hr_check_vector(function, "dweight", b->dweight, b->call.config.weight_dtype));
    HR_TRY(hr_check_vector(function, "grads->gate_up", b->grads.gate_up,
                           b->call.params.gate_up.dtype));
    HR_TRY(hr_check_vector(function, "grads->down", b->grads.down, b->call.params.down.dtype));
    HR_TRY(hr_check_vector(function, "grads->gate_up_bias", b->grads.gate_up_bias, dtype));
    HR_TRY(hr_check_vector(function, "grads->down_bias", b->grads.down_bias, dtype));
    b->wanted = (b->dx ? HR_EXPERTS_X : 0) | (b->dweight ? HR_EXPERTS_WEIGHT : 0) |
                (b->grads.gate_up ? HR_EXPERTS_GATE_UP : 0) |
                (b->grads.down ? HR_EXPERTS_DOWN : 0) |
                (b->grads.gate_up_bias ? HR_EXPERTS_GATE_UP_BIAS : 0) |
                (b->grads.down_bias ? HR_EXPERTS_DOWN_BIAS : 0);
    HR_REQUIRE(b->wanted, "%s: dx, dweight and all of grads are NULL, so there is nothing to do",
               function);
    return HR_OK;
}

hr_status hr_experts_backward(void *dx, void *dweight, const hr_experts_grads *grads,
                              const hr_rows *dy, const hr_rows *x, const void *weight,
                              const int32_t *order, const int32_t *offsets_host,
                              const hr_experts_saved *saved, const hr_experts_params *params,
                              const hr_experts_sizes *sizes, const hr_experts_config *config,
                              void *workspace, size_t workspace_bytes, const hr_exec *exec)
{
    experts_backward b = {
        .call = {.function = "hr_experts_backward"}, .dx = dx, .dweight = dweight};
    const char *const function = b.call.function;
    HR_TRY(experts_begin(&b.call, sizes, params, config, exec));
    HR_TRY(experts_check_call(&b.call, x, weight, order, offsets_host, saved));
    HR_REQUIRE(dy, "%s: dy is NULL", function);
    HR_TRY(hr_check_rows(function, "dy", dy, sizes->tokens, sizes->hidden, b.call.config.dtype));
    b.dy = *dy;
    HR_TRY(check_grads(&b, grads));
    const int keeps_gate_up = b.call.rows == 0 || b.call.saved.gate_up;
    HR_REQUIRE(x || b.call.rows == 0 || !experts_reads_x(b.wanted, keeps_gate_up), "%s: x is NULL",
               function);
    HR_RUN(experts_plan_backward(&b.call, b.wanted, keeps_gate_up));
    HR_TRY(experts_check_workspace(&b.call, workspace, workspace_bytes));
    return backward(&b);
}
