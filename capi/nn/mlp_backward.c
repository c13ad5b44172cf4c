/* mlp_backward.c: hr_mlp_backward: evaluates what was not kept, and adds the gradients of each tile. */
#include "capi/check/rows.h"
#include "capi/nn/mlp_call.h"
#include "kernels/core/columns.h"

typedef struct mlp_backward {
    mlp_call call;
    hr_rows dx, dy; /* dx: with HR_MLP_X in wanted */
    hr_mlp_params grads;
    uint32_t wanted, kept;
} mlp_backward;

/* The gradient of a matrix and of its bias, either of which may not be wanted: [outputs, inputs].
 * `sum`, `bias_sum`: where in the workspace sums over tiles are, or HR_NO_PART. */
typedef struct matrix_grad {
    hr_rows grad;
    void *bias_grad;
    size_t sum, bias_sum;
    int64_t outputs, inputs;
} matrix_grad;

/* Sums of their own, beside no product: their bits do not depend on whether the matrix has a
 * gradient, and a library of products may have none that gives them. */
static hr_status add_bias(const mlp_call *call, const matrix_grad *m, const hr_rows *output_grads,
                          int64_t first, int64_t rows)
{
    const int is_last = first + rows == call->sizes.tokens;
    const column_sums sums = {.x = *output_grads,
                              .dtype = call->config.dtype,
                              .out_dtype = call->config.dtype,
                              .rows = rows,
                              .cols = m->outputs,
                              .factor = 1.0,
                              .sums = (double *)mlp_at(call, m->bias_sum),
                              .out = is_last ? m->bias_grad : NULL,
                              .is_first = first == 0};
    HR_ON_DEVICE(call->exec, sum_columns, &sums);
    return HR_OK;
}

/* Adds what a tile contributes, from the gradient of the outputs and from the inputs. */
static hr_status add_tile(const mlp_call *call, const matrix_grad *m, const hr_rows *output_grads,
                          const hr_rows *inputs, int64_t first, int64_t rows)
{
    if (m->bias_grad)
        HR_RUN(add_bias(call, m, output_grads, first, rows));
    if (!m->grad.data)
        return HR_OK;
    hr_gemm_config config = mlp_gemm_config(&call->config);
    config.transpose_a = 1;
    config.beta = first > 0;
    if (call->sizes.tiles > 1)
        config.out_dtype = HR_F32;
    const hr_rows sum = {mlp_at(call, m->sum), m->inputs};
    const mlp_factor factor = {*inputs, NULL};
    return mlp_product(call, m->sum == HR_NO_PART ? &m->grad : &sum, output_grads, &factor, NULL,
                       m->outputs, m->inputs, rows, &config);
}

/* Rounds sums to the type of the gradients. */
static hr_status store_rows(const mlp_call *call, const hr_rows *to, float *from, int64_t rows,
                            int64_t cols)
{
    enum { AT_A_TIME = 64 };
    void *data[AT_A_TIME], *values[AT_A_TIME];
    int64_t numel[AT_A_TIME];
    hr_dtype dtype[AT_A_TIME], f32[AT_A_TIME];
    const hr_weights nearest = HR_WEIGHTS_INIT;
    if (to->stride == cols)
        cols *= rows, rows = 1;
    for (int64_t i = 0; i < rows; i += AT_A_TIME) {
        const int64_t count = rows - i < AT_A_TIME ? rows - i : AT_A_TIME;
        for (int64_t k = 0; k < count; k++) {
            data[k] = mlp_rows_from(call, to, i + k).data;
            values[k] = from + (i + k) * cols;
            numel[k] = cols;
            dtype[k] = call->config.dtype;
            f32[k] = HR_F32;
        }
        const hr_tensor_list params = {count, data, numel, dtype};
        const hr_tensor_list sums = {count, values, numel, f32};
        HR_RUN(hr_split_weights(&params, &sums, &nearest, call->exec));
    }
    return HR_OK;
}

static hr_status store_sums(const mlp_call *call, const matrix_grad *m)
{
    if (m->grad.data && m->sum != HR_NO_PART)
        HR_RUN(store_rows(call, &m->grad, (float *)mlp_at(call, m->sum), m->outputs, m->inputs));
    return HR_OK;
}

static size_t past(size_t place, int64_t values, size_t element)
{
    return place == HR_NO_PART ? HR_NO_PART : place + (size_t)values * element;
}

static matrix_grad gate_up_grad(const mlp_backward *b, const gate_up_part *part)
{
    const mlp_layout *const at = &b->call.layout;
    const int64_t hidden = b->call.sizes.hidden;
    return (matrix_grad){.grad = part->grad,
                         .bias_grad = part->bias_grad,
                         .sum = past(at->gate_up_sum, part->first * hidden, sizeof(float)),
                         .bias_sum = past(at->gate_up_bias_sum, part->first, sizeof(double)),
                         .outputs = part->width,
                         .inputs = hidden};
}

static matrix_grad down_grad(const mlp_backward *b)
{
    return (matrix_grad){.grad = b->grads.down,
                         .bias_grad = b->grads.down_bias,
                         .sum = b->call.layout.down_sum,
                         .bias_sum = b->call.layout.down_bias_sum,
                         .outputs = b->call.sizes.hidden,
                         .inputs = b->call.sizes.features};
}

/* Evaluates the rows of normed and of gate and up again where they are needed and were not kept. */
static hr_status evaluate_again(const mlp_backward *b, const hr_rows *normed,
                                const hr_rows *gate_up, int64_t first, int64_t rows)
{
    const mlp_call *const call = &b->call;
    const uint32_t again = mlp_evaluated(b->wanted, b->kept) & ~b->kept;
    const hr_norm_config norm = mlp_norm_config(&call->config);
    if (again & MLP_NORMED) {
        const hr_rows x = mlp_rows_from(call, &call->x, first);
        HR_RUN(hr_norm_backward(NULL, NULL, NULL, normed, NULL, NULL, &x, call->params.norm_weight,
                                call->params.norm_bias, mlp_from_row(call->saved.mean, first),
                                mlp_from_row(call->saved.rstd, first), rows, call->sizes.hidden,
                                &norm, NULL, 0, call->exec));
    }
    return again & MLP_GATE_UP ? mlp_gate_up(call, gate_up, normed, rows) : HR_OK;
}

static hr_status backward_tile(const mlp_backward *b, int64_t first, int64_t rows)
{
    const mlp_call *const call = &b->call;
    const mlp_sizes *const s = &call->sizes;
    const mlp_layout *const at = &call->layout;
    const hr_mlp_saved *const saved = &call->saved;
    const int through = (b->wanted & MLP_THROUGH) != 0;
    const hr_rows dy = mlp_rows_from(call, &b->dy, first);
    const hr_rows normed = mlp_tile_rows(call, saved->normed, at->normed, s->hidden, first);
    const hr_rows gate_up = mlp_tile_rows(call, saved->gate_up, at->gate_up, s->width, first);
    const hr_rows activated = mlp_tile_rows(call, saved->activated, at->inner, s->features, first);
    const hr_rows inner = mlp_tile_rows(call, NULL, at->inner, s->features, first);
    const hr_rows gate_up_grads = mlp_tile_rows(call, NULL, at->gate_up_grad, s->width, first);
    HR_RUN(evaluate_again(b, &normed, &gate_up, first, rows));
    const int is_activated_again = (b->wanted & HR_MLP_DOWN) && !saved->activated;
    if (through) {
        const hr_gemm_config config = mlp_gemm_config(&call->config);
        const hr_glu_config glu = mlp_glu_config(call);
        const hr_rows up = mlp_columns_from(call, &gate_up, s->features);
        const hr_rows dup = mlp_columns_from(call, &gate_up_grads, s->features);
        const int gated = call->config.gated;
        const mlp_factor down = {call->params.down, call->config.down};
        HR_RUN(mlp_product(call, &inner, &dy, &down, NULL, rows, s->features, s->hidden, &config));
        HR_RUN(hr_glu_backward(&gate_up_grads, gated ? &dup : NULL,
                               is_activated_again ? &inner : NULL, &inner, &gate_up,
                               gated ? &up : NULL, rows, s->features, &glu, call->exec));
    } else if (is_activated_again) {
        HR_RUN(mlp_activate(call, &inner, &gate_up, rows));
    }
    const matrix_grad down = down_grad(b);
    HR_RUN(add_tile(call, &down, &dy, &activated, first, rows));
    gate_up_part parts[2];
    const int count = through ? mlp_parts(call, &b->grads, parts) : 0;
    hr_gemm_config config = mlp_gemm_config(&call->config);
    for (int i = 0; i < count; i++) {
        const hr_rows grads = mlp_columns_from(call, &gate_up_grads, parts[i].first);
        const matrix_grad m = gate_up_grad(b, &parts[i]);
        HR_RUN(add_tile(call, &m, &grads, &normed, first, rows));
        if (b->wanted & HR_MLP_X) {
            const hr_rows dx =
                mlp_rows_from(call, &b->dx, first); /* of normed, until the norm ran */
            config.beta = i;
            HR_RUN(mlp_product(call, &dx, &grads, &parts[i].matrix, NULL, rows, s->hidden,
                               parts[i].width, &config));
        }
    }
    return HR_OK;
}

static hr_status backward(const mlp_backward *b)
{
    const mlp_call *const call = &b->call;
    const mlp_sizes *const s = &call->sizes;
    for (int64_t i = 0; i < s->tiles; i++) {
        const int64_t first = i * s->tile, left = s->tokens - first;
        HR_RUN(backward_tile(b, first, left < s->tile ? left : s->tile));
    }
    const matrix_grad down = down_grad(b);
    HR_RUN(store_sums(call, &down));
    gate_up_part parts[2];
    const int count = mlp_parts(call, &b->grads, parts);
    for (int i = 0; i < count; i++) {
        const matrix_grad m = gate_up_grad(b, &parts[i]);
        HR_RUN(store_sums(call, &m));
    }
    if (!(b->wanted & HR_MLP_X))
        return HR_OK;
    const mlp_layout *const at = &call->layout;
    const hr_norm_config norm = mlp_norm_config(&call->config);
    return hr_norm_backward(&b->dx, b->grads.norm_weight, b->grads.norm_bias, NULL, &b->dx,
                            call->config.residual ? &b->dy : NULL, &call->x,
                            call->params.norm_weight, call->params.norm_bias, call->saved.mean,
                            call->saved.rstd, s->tokens, s->hidden, &norm, mlp_at(call, at->norm),
                            at->norm_bytes, call->exec);
}

static uint32_t wanted_by(const hr_rows *dx, const hr_mlp_params *g)
{
    return (dx ? HR_MLP_X : 0) | (g->norm_weight ? HR_MLP_NORM_WEIGHT : 0) |
           (g->norm_bias ? HR_MLP_NORM_BIAS : 0) |
           (g->gate_up.data || g->up.data ? HR_MLP_GATE_UP : 0) |
           (g->gate_up_bias || g->up_bias ? HR_MLP_GATE_UP_BIAS : 0) |
           (g->down.data ? HR_MLP_DOWN : 0) | (g->down_bias ? HR_MLP_DOWN_BIAS : 0);
}

hr_status hr_mlp_backward(const hr_rows *dx, const hr_mlp_params *grads, const hr_rows *dy,
                          const hr_rows *x, const hr_mlp_params *params, const hr_mlp_saved *saved,
                          int64_t tokens, int64_t hidden, int64_t features,
                          const hr_mlp_config *config, void *workspace, size_t workspace_bytes,
                          const hr_exec *exec)
{
    mlp_backward b = {.call = {.function = "hr_mlp_backward"}};
    const char *const function = b.call.function;
    HR_TRY(mlp_check_call(&b.call, x, params, saved, tokens, hidden, features, config, exec));
    const hr_dtype dtype = b.call.config.dtype;
    HR_TRY(mlp_check_params(&b.call, grads, 1));
    HR_REQUIRE(dy, "%s: dy is NULL", function);
    HR_TRY(hr_check_rows(function, "dy", dy, tokens, hidden, dtype));
    HR_TRY(hr_check_rows(function, "dx", dx, tokens, hidden, dtype));
    b.dy = *dy;
    if (dx)
        b.dx = *dx;
    b.grads = *grads;
    b.wanted = wanted_by(dx, grads);
    b.kept = mlp_kept_in(&b.call);
    HR_REQUIRE(b.wanted, "%s: dx and all of grads are NULL, so there is nothing to do", function);
    HR_REQUIRE(dx || !(grads->norm_weight || grads->norm_bias),
               "%s: dx is NULL, but the gradients of the norm need it", function);
    if (mlp_reads_x(b.wanted, b.kept)) {
        HR_REQUIRE(x, "%s: x is NULL", function);
        HR_REQUIRE(b.call.saved.rstd || tokens == 0, "%s: saved->rstd is NULL", function);
        HR_REQUIRE(b.call.saved.mean || tokens == 0 || b.call.config.norm == HR_NORM_RMS,
                   "%s: saved->mean is NULL, wanted that of hr_mlp_forward with HR_NORM_LAYER",
                   function);
    }
    HR_RUN(
        mlp_backward_layout(&b.call.layout, &b.call.sizes, b.wanted, b.kept, &b.call.config, exec));
    HR_TRY(mlp_check_workspace(&b.call, workspace, workspace_bytes));
    return backward(&b);
}
