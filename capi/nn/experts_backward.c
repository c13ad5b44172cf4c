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

/* Adds the rows of a tile to the gradient [m, n] of a matrix of an expert: scale left^T right. With
 * several tiles 16 bits are added up in `sum`. */
static hr_status add_grad(const experts_backward *b, const experts_part *part, void *stack,
                          hr_dtype dtype, size_t sum, const void *left, int64_t m,
                          const void *right, int64_t n, double scale)
{
    const experts_call *const call = &b->call;
    if (!stack)
        return HR_OK;
    const hr_rows lefts = {(void *)left, m}, rights = {(void *)right, n};
    const size_t bytes = (size_t)(m * n) * hr_dtype_size(dtype);
    const hr_rows grad = {(char *)stack + (size_t)part->expert * bytes, n};
    const int is_summed = sum != HR_NO_PART && !(part->is_first && part->is_last);
    const hr_rows to = {is_summed ? experts_place(call, sum) : grad.data, n};
    hr_gemm_config config = experts_gemm_config(call);
    config.out_dtype = is_summed ? HR_F32 : dtype;
    config.transpose_a = 1;
    config.alpha = scale;
    config.beta = !part->is_first;
    HR_RUN(hr_gemm(&to, &lefts, &rights, NULL, m, n, part->count, &config,
                   experts_place(call, call->layout.product), call->layout.product_bytes,
                   call->exec));
    return is_summed && part->is_last ? experts_round(call, &grad, dtype, &to, m, n) : HR_OK;
}

/* The gradient of a matrix of a stack, which lies the other way round where stacks are transposed. */
static hr_status add_matrix_grad(const experts_backward *b, const experts_part *part, void *stack,
                                 const hr_matrix *like, size_t sum, const experts_matrix *matrix,
                                 const void *outputs, const void *inputs)
{
    return b->call.config.transposed ? add_grad(b, part, stack, like->dtype, sum, inputs,
                                                matrix->inputs, outputs, matrix->outputs, 1.0)
                                     : add_grad(b, part, stack, like->dtype, sum, outputs,
                                                matrix->outputs, inputs, matrix->inputs, 1.0);
}

/* Those of A and B, from t and u, and the rows that these were made of. */
static hr_status add_adapter_grads(const experts_backward *b, const experts_part *part, void *da,
                                   void *db, hr_dtype dtype, const experts_parts *parts,
                                   const experts_matrix *matrix, const void *outputs,
                                   const void *inputs)
{
    const void *const t = experts_place(&b->call, matrix->t);
    const void *const u = experts_place(&b->call, matrix->u);
    HR_RUN(add_grad(b, part, da, dtype, parts->a_sum, u, matrix->rank, inputs, matrix->inputs,
                    matrix->scale));
    return add_grad(b, part, db, dtype, parts->b_sum, outputs, matrix->outputs, t, matrix->rank,
                    matrix->scale);
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
    HR_RUN(add_matrix_grad(b, part, b->grads.down, &call->params.down, at->of_down.sum, down, dy,
                           unit.weighted));
    HR_RUN(add_matrix_grad(b, part, b->grads.gate_up, &call->params.gate_up, at->of_gate_up.sum,
                           gate_up, unit.grads, x));
    if (b->grads.gate_up_bias)
        HR_RUN(add_gate_up_bias(b, part, unit.grads));
    if (b->grads.down_b)
        HR_RUN(experts_narrow(call, unit.weighted, down, part->count, 0));
    HR_RUN(add_adapter_grads(b, part, b->grads.down_a, b->grads.down_b,
                             call->params.down_adapter.dtype, &at->of_down, down, dy,
                             unit.weighted));
    if (b->dx) {
        HR_RUN(experts_times(call, experts_place(call, at->out), HR_F32, unit.grads, gate_up, NULL,
                             part->count, 1));
        HR_RUN(experts_add(call, b->dx, &tile, NULL, NULL));
    } else if (b->grads.gate_up_a) {
        HR_RUN(experts_narrow(call, unit.grads, gate_up, part->count, 1));
    }
    if (b->grads.gate_up_b && call->saved.gate_up) /* else the first product has left t */
        HR_RUN(experts_narrow(call, x, gate_up, part->count, 0));
    return add_adapter_grads(b, part, b->grads.gate_up_a, b->grads.gate_up_b,
                             call->params.gate_up_adapter.dtype, &at->of_gate_up, gate_up,
                             unit.grads, x);
}

/* Gradients of 0 for an expert without rows. */
static hr_status write_zeros(const experts_backward *b, int64_t expert)
{
    const experts_call *const call = &b->call;
    const hr_experts_sizes *const s = &call->sizes;
    const hr_experts_params *const p = &call->params;
    const hr_experts_adapter *const first = &p->gate_up_adapter, *const second = &p->down_adapter;
    const size_t of_first = hr_dtype_size(first->dtype), of_second = hr_dtype_size(second->dtype);
    const struct {
        void *stack;
        int64_t numel;
        size_t element;
    } all[] = {{b->grads.gate_up, call->width * s->hidden, hr_dtype_size(p->gate_up.dtype)},
               {b->grads.down, s->hidden * s->features, hr_dtype_size(p->down.dtype)},
               {b->grads.gate_up_bias, call->width, call->element},
               {b->grads.gate_up_a, first->rank * s->hidden, of_first},
               {b->grads.gate_up_b, first->rank * call->width, of_first},
               {b->grads.down_a, second->rank * s->features, of_second},
               {b->grads.down_b, second->rank * s->hidden, of_second}};
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
    const hr_experts_params *const p = &b->call.params;
    const hr_experts_grads *const g = &b->grads;
    const struct {
        const char *name;
        const void *grad;
        hr_dtype dtype;
        uint32_t bit;
    } all[] = {{"grads->gate_up", g->gate_up, p->gate_up.dtype, HR_EXPERTS_GATE_UP},
               {"grads->down", g->down, p->down.dtype, HR_EXPERTS_DOWN},
               {"grads->gate_up_bias", g->gate_up_bias, dtype, HR_EXPERTS_GATE_UP_BIAS},
               {"grads->down_bias", g->down_bias, dtype, HR_EXPERTS_DOWN_BIAS},
               {"grads->gate_up_a", g->gate_up_a, p->gate_up_adapter.dtype, HR_EXPERTS_GATE_UP_A},
               {"grads->gate_up_b", g->gate_up_b, p->gate_up_adapter.dtype, HR_EXPERTS_GATE_UP_B},
               {"grads->down_a", g->down_a, p->down_adapter.dtype, HR_EXPERTS_DOWN_A},
               {"grads->down_b", g->down_b, p->down_adapter.dtype, HR_EXPERTS_DOWN_B}};
    b->wanted = (b->dx ? HR_EXPERTS_X : 0) | (b->dweight ? HR_EXPERTS_WEIGHT : 0);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        HR_TRY(hr_check_vector(function, all[i].name, all[i].grad, all[i].dtype));
        b->wanted |= all[i].grad ? all[i].bit : 0;
    }
    HR_REQUIRE(b->wanted, "%s: dx, dweight and all of grads are NULL, so there is nothing to do",
               function);
    return experts_check_wanted(&b->call, b->wanted);
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
