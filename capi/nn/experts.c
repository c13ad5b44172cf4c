/* experts.c: hr_route, hr_experts_query and hr_experts_forward, and the steps that backward takes,
 * too: expert by expert, a tile of rows after another. */
#include <inttypes.h>
#include <math.h>

#include "capi/check/rows.h"
#include "capi/nn/experts_call.h"

hr_status hr_route(int32_t *offsets, int32_t *order, const void *index, int32_t index_bytes,
                   int64_t rows, int64_t experts, const hr_exec *exec)
{
    static const char function[] = "hr_route";
    HR_REQUIRE(index_bytes == 2 || index_bytes == 4 || index_bytes == 8,
               "%s: index_bytes is %" PRId32 ", wanted 2, 4 or 8", function, index_bytes);
    HR_REQUIRE(rows >= 0 && rows < INT64_C(1) << 31,
               "%s: rows is %" PRId64 ", wanted 0 or more, and less than 2^31", function, rows);
    HR_REQUIRE(experts >= 1 && experts < INT64_C(1) << 30,
               "%s: experts is %" PRId64 ", wanted 1 or more, and less than 2^30", function,
               experts);
    HR_TRY(hr_check_exec(function, exec));
    HR_REQUIRE(offsets, "%s: offsets is NULL", function);
    HR_TRY(hr_check_vector(function, "offsets", offsets, HR_F32));
    HR_REQUIRE(order || rows == 0, "%s: order is NULL", function);
    HR_TRY(hr_check_vector(function, "order", order, HR_F32));
    HR_REQUIRE(index || rows == 0, "%s: index is NULL", function);
    HR_TRY(hr_check_vector(function, "index", index,
                           index_bytes == 8   ? HR_F64
                           : index_bytes == 4 ? HR_F32
                                              : HR_I16));
    const experts_route_args args = {offsets, order, index, index_bytes, rows, experts};
    HR_ON_DEVICE(exec, experts_route, &args);
    return HR_OK;
}

hr_status hr_experts_query(hr_experts_needs *needs, const hr_experts_sizes *sizes,
                           hr_experts_save save, uint32_t wanted, const hr_experts_params *params,
                           const hr_experts_config *config, const hr_exec *exec)
{
    static const char function[] = "hr_experts_query";
    HR_REQUIRE(needs, "%s: needs is NULL", function);
    HR_TRY(hr_check_vector(function, "needs", needs, HR_F64));
    experts_call call = {.function = function};
    HR_TRY(experts_begin(&call, sizes, params, config, exec));
    HR_REQUIRE(save >= HR_EXPERTS_SAVE_ALL && save <= HR_EXPERTS_SAVE_INPUT,
               "%s: save is %d, wanted 0, 1 or 2", function, (int)save);
    HR_REQUIRE(!(wanted & ~EXPERTS_ANY), "%s: wanted is %" PRIu32 ", wanted at most %" PRIu32,
               function, wanted, EXPERTS_ANY);
    HR_TRY(experts_check_wanted(&call, wanted));
    const int inner = (wanted & EXPERTS_INNER) != 0;
    const int gate_up = inner && save != HR_EXPERTS_SAVE_INPUT;
    const int activated = inner && save == HR_EXPERTS_SAVE_ALL;
    HR_RUN(experts_plan_forward(&call, gate_up, activated));
    const size_t forward = call.layout.bytes;
    HR_RUN(experts_plan_backward(&call, wanted, gate_up));
    const size_t row = (size_t)call.rows * call.element;
    *needs = (hr_experts_needs){.gate_up = gate_up ? row * (size_t)call.width : 0,
                                .activated = activated ? row * (size_t)sizes->features : 0,
                                .forward_workspace = forward,
                                .backward_workspace = call.layout.bytes,
                                .tile_rows = call.tile,
                                .reads_x = experts_reads_x(wanted, gate_up)};
    return HR_OK;
}

/* ---- Steps ----------------------------------------------------------------------------------- */

void *experts_place(const experts_call *call, size_t place)
{
    return place == HR_NO_PART ? NULL : call->workspace + place;
}

void *experts_rows(const experts_call *call, const void *kept, size_t place, int64_t first,
                   int64_t cols)
{
    return kept ? (char *)kept + (size_t)(first * cols) * call->element
                : experts_place(call, place);
}

experts_tile experts_tile_at(const experts_call *call, int64_t first, int64_t count)
{
    return (experts_tile){call->order + first, count, call->sizes.slots};
}

int64_t experts_tile_end(const experts_call *call, int64_t expert, int64_t first)
{
    const int64_t end = call->offsets[expert + 1];
    return end - first < call->tile ? end : first + call->tile;
}

hr_gemm_config experts_gemm_config(const experts_call *call)
{
    const hr_experts_config *const own = &call->config;
    hr_gemm_config config = HR_GEMM_CONFIG_INIT;
    config.dtype = config.out_dtype = own->dtype;
    config.allow_tf32 = own->allow_tf32;
    config.allow_reduced_precision_reduction = own->allow_reduced_precision_reduction;
    config.deterministic = own->deterministic;
    return config;
}

hr_status experts_round(const experts_call *call, const hr_rows *to, hr_dtype dtype,
                        const hr_rows *from, int64_t rows, int64_t cols)
{
    enum { AT_A_TIME = 64 };
    void *data[AT_A_TIME], *values[AT_A_TIME];
    int64_t numel[AT_A_TIME];
    hr_dtype dtypes[AT_A_TIME], f32[AT_A_TIME];
    const hr_weights nearest = HR_WEIGHTS_INIT;
    const int64_t element = (int64_t)hr_dtype_size(dtype);
    if (rows <= 1 || (to->stride == cols && from->stride == cols))
        cols *= rows, rows = 1;
    for (int64_t i = 0; i < rows; i += AT_A_TIME) {
        const int64_t count = rows - i < AT_A_TIME ? rows - i : AT_A_TIME;
        for (int64_t k = 0; k < count; k++) {
            data[k] = (char *)to->data + (i + k) * to->stride * element;
            values[k] = (float *)from->data + (i + k) * from->stride;
            numel[k] = cols;
            dtypes[k] = dtype;
            f32[k] = HR_F32;
        }
        const hr_tensor_list params = {count, data, numel, dtypes};
        const hr_tensor_list sums = {count, values, numel, f32};
        HR_RUN(hr_split_weights(&params, &sums, &nearest, call->exec));
    }
    return HR_OK;
}

static hr_status take_matrix(const experts_call *call, int64_t expert, const hr_matrix *stack,
                             int64_t pitch, size_t place, hr_rows *rows)
{
    const int is_dense = stack->format == HR_DENSE;
    const int64_t bytes = is_dense ? expert * pitch * (int64_t)hr_dtype_size(stack->dtype) : 0;
    const hr_rows from = {(char *)stack->data + bytes, stack->stride};
    *rows = from;
    if (place == HR_NO_PART)
        return HR_OK;
    *rows = (hr_rows){experts_place(call, place), stack->cols};
    if (is_dense)
        return experts_round(call, rows, call->config.dtype, &from, stack->rows, stack->cols);
    hr_matrix matrix = *stack;
    matrix.dtype = call->config.dtype;
    const int64_t count = stack->rows / call->sizes.experts;
    return hr_dequantize_matrix(rows, &matrix, expert * count, count, 0, stack->cols, call->exec);
}

/* A or B of an expert: `rows` rows of `cols`. */
static hr_status take_factor(const experts_call *call, int64_t expert, const void *stack,
                             hr_dtype dtype, size_t place, hr_rows *factor, int64_t rows,
                             int64_t cols)
{
    const size_t bytes = (size_t)(expert * rows * cols) * hr_dtype_size(dtype);
    const hr_rows from = {(char *)stack + bytes, cols};
    *factor = (hr_rows){place == HR_NO_PART ? from.data : experts_place(call, place), cols};
    return place == HR_NO_PART ? HR_OK
                               : experts_round(call, factor, call->config.dtype, &from, rows, cols);
}

static hr_status take(const experts_call *call, int64_t expert, const hr_matrix *stack,
                      int64_t pitch, const hr_experts_adapter *adapter, const experts_parts *parts,
                      experts_matrix *matrix)
{
    const int64_t rank = matrix->rank = adapter->rank;
    matrix->scale = adapter->scale;
    matrix->t = parts->t, matrix->u = parts->u;
    HR_RUN(take_matrix(call, expert, stack, pitch, parts->matrix, &matrix->rows));
    if (rank == 0)
        return HR_OK;
    HR_RUN(take_factor(call, expert, adapter->a, adapter->dtype, parts->a, &matrix->a, rank,
                       matrix->inputs));
    return take_factor(call, expert, adapter->b, adapter->dtype, parts->b, &matrix->b,
                       matrix->outputs, rank);
}

hr_status experts_take(const experts_call *call, int64_t expert, experts_matrix *gate_up,
                       experts_matrix *down)
{
    const hr_experts_params *const p = &call->params;
    const hr_experts_sizes *const s = &call->sizes;
    *gate_up = (experts_matrix){.outputs = call->width, .inputs = s->hidden};
    *down = (experts_matrix){.outputs = s->hidden, .inputs = s->features};
    HR_RUN(take(call, expert, &p->gate_up, p->gate_up_pitch, &p->gate_up_adapter,
                &call->layout.of_gate_up, gate_up));
    return take(call, expert, &p->down, p->down_pitch, &p->down_adapter, &call->layout.of_down,
                down);
}

/* out [m, n] = in [m, k] times a matrix, as the config says. */
static hr_status multiply(const experts_call *call, void *out, int64_t m, int64_t n, const void *in,
                          int64_t k, const hr_rows *matrix, const void *bias,
                          const hr_gemm_config *config)
{
    const hr_rows to = {out, n}, from = {(void *)in, k};
    return hr_gemm(&to, &from, matrix, bias, m, n, k, config,
                   experts_place(call, call->layout.product), call->layout.product_bytes,
                   call->exec);
}

hr_status experts_narrow(const experts_call *call, const void *in, const experts_matrix *matrix,
                         int64_t rows, int back)
{
    hr_gemm_config config = experts_gemm_config(call);
    config.transpose_b = !back;
    return multiply(call, experts_place(call, back ? matrix->u : matrix->t), rows, matrix->rank, in,
                    back ? matrix->outputs : matrix->inputs, back ? &matrix->b : &matrix->a, NULL,
                    &config);
}

hr_status experts_times(const experts_call *call, void *out, hr_dtype out_dtype, const void *in,
                        const experts_matrix *matrix, const void *bias, int64_t rows, int back)
{
    const int64_t n = back ? matrix->inputs : matrix->outputs;
    const int64_t k = back ? matrix->outputs : matrix->inputs;
    hr_gemm_config config = experts_gemm_config(call);
    config.out_dtype = out_dtype;
    if (matrix->rank > 0) {
        HR_RUN(experts_narrow(call, in, matrix, rows, back));
        config.transpose_b = !back;
        config.alpha = matrix->scale;
        HR_RUN(multiply(call, out, rows, n, experts_place(call, back ? matrix->u : matrix->t),
                        matrix->rank, back ? &matrix->a : &matrix->b, NULL, &config));
        config.alpha = config.beta = 1.0;
    }
    config.transpose_b = back == call->config.transposed;
    return multiply(call, out, rows, n, in, k, &matrix->rows, bias, &config);
}

hr_status experts_gather(const experts_call *call, const experts_tile *tile, size_t to,
                         const hr_rows *from)
{
    const int64_t element = (int64_t)call->element;
    const experts_gather_args args = {.tile = *tile,
                                      .to = experts_place(call, to),
                                      .from = from->data,
                                      .from_pitch = from->stride * element,
                                      .bytes = call->sizes.hidden * element};
    HR_ON_DEVICE(call->exec, experts_gather, &args);
    return HR_OK;
}

hr_status experts_gate_up(const experts_call *call, void *gate_up, const experts_tile *tile,
                          const experts_matrix *matrix, int64_t expert)
{
    const void *const biases = call->params.gate_up_bias;
    const size_t offset = (size_t)(expert * call->width) * call->element;
    return experts_times(call, gate_up, call->config.dtype, experts_place(call, call->layout.x),
                         matrix, biases ? (const char *)biases + offset : NULL, tile->count, 0);
}

experts_activate_args experts_unit_args(const experts_call *call, const experts_tile *tile,
                                        const void *gate_up, void *h)
{
    const hr_experts_config *const c = &call->config;
    const float alpha = (float)c->alpha;
    return (experts_activate_args){.tile = *tile,
                                   .unit = {c->activation, c->gated, c->interleaved, alpha,
                                            1.0f / alpha, c->limit > 0.0 ? (float)c->limit : NAN},
                                   .gate_up = gate_up,
                                   .h = h,
                                   .dtype = c->dtype,
                                   .weight_dtype = c->weight_dtype,
                                   .features = call->sizes.features,
                                   .hidden = call->sizes.hidden};
}

static float *sums_of(const experts_call *call, void *result)
{
    return call->layout.sums == HR_NO_PART ? (float *)result
                                           : (float *)experts_place(call, call->layout.sums);
}

hr_status experts_begin_sums(const experts_call *call, void *result)
{
    const size_t numel = (size_t)(call->sizes.tokens * call->sizes.hidden);
    if (numel > 0)
        HR_ON_DEVICE(call->exec, experts_zero, sums_of(call, result), numel * sizeof(float));
    return HR_OK;
}

hr_status experts_add(const experts_call *call, void *result, const experts_tile *tile,
                      const void *weight, const void *bias)
{
    const experts_add_args args = {.tile = *tile,
                                   .to = sums_of(call, result),
                                   .from = (const float *)experts_place(call, call->layout.out),
                                   .weight = weight,
                                   .bias = bias,
                                   .weight_dtype = call->config.weight_dtype,
                                   .bias_dtype = call->config.dtype,
                                   .cols = call->sizes.hidden};
    HR_ON_DEVICE(call->exec, experts_add, &args);
    return HR_OK;
}

hr_status experts_end_sums(const experts_call *call, void *result)
{
    const int64_t numel = call->sizes.tokens * call->sizes.hidden;
    if (call->layout.sums == HR_NO_PART || numel == 0)
        return HR_OK;
    const hr_rows to = {result, numel}, from = {sums_of(call, result), numel};
    return experts_round(call, &to, call->config.dtype, &from, 1, numel);
}

/* ---- Forward --------------------------------------------------------------------------------- */

static hr_status forward_tile(const experts_call *call, void *y, int64_t expert, int64_t first,
                              int64_t count, const experts_matrix *gate_up,
                              const experts_matrix *down)
{
    const experts_layout *const at = &call->layout;
    const hr_experts_sizes *const s = &call->sizes;
    const experts_tile tile = experts_tile_at(call, first, count);
    void *const gates = experts_rows(call, call->saved.gate_up, at->gate_up, first, call->width);
    void *const h = experts_rows(call, call->saved.activated, at->inner, first, s->features);
    HR_RUN(experts_gather(call, &tile, at->x, &call->x));
    HR_RUN(experts_gate_up(call, gates, &tile, gate_up, expert));
    const experts_activate_args unit = experts_unit_args(call, &tile, gates, h);
    HR_ON_DEVICE(call->exec, experts_activate, &unit);
    HR_RUN(experts_times(call, experts_place(call, at->out), HR_F32, h, down, NULL, tile.count, 0));
    const void *const biases = call->params.down_bias;
    const size_t offset = (size_t)(expert * s->hidden) * call->element;
    return experts_add(call, y, &tile, call->weight, biases ? (const char *)biases + offset : NULL);
}

static hr_status forward(const experts_call *call, void *y)
{
    HR_RUN(experts_begin_sums(call, y));
    for (int64_t e = 0; e < call->sizes.experts; e++) {
        experts_matrix gate_up, down;
        const int64_t end = call->offsets[e + 1];
        if (call->offsets[e] == end)
            continue;
        HR_RUN(experts_take(call, e, &gate_up, &down));
        for (int64_t first = call->offsets[e], next; first < end; first = next) {
            next = experts_tile_end(call, e, first);
            HR_RUN(forward_tile(call, y, e, first, next - first, &gate_up, &down));
        }
    }
    return experts_end_sums(call, y);
}

hr_status hr_experts_forward(void *y, const hr_experts_saved *saved, const hr_rows *x,
                             const void *weight, const int32_t *order, const int32_t *offsets_host,
                             const hr_experts_params *params, const hr_experts_sizes *sizes,
                             const hr_experts_config *config, void *workspace,
                             size_t workspace_bytes, const hr_exec *exec)
{
    experts_call call = {.function = "hr_experts_forward"};
    HR_TRY(experts_begin(&call, sizes, params, config, exec));
    HR_REQUIRE(x, "%s: x is NULL", call.function);
    HR_TRY(experts_check_call(&call, x, weight, order, offsets_host, saved));
    HR_REQUIRE(y || sizes->tokens == 0, "%s: y is NULL", call.function);
    HR_TRY(hr_check_vector(call.function, "y", y, call.config.dtype));
    const int none = call.rows == 0; /* has no address */
    HR_RUN(experts_plan_forward(&call, none || call.saved.gate_up, none || call.saved.activated));
    HR_TRY(experts_check_workspace(&call, workspace, workspace_bytes));
    return forward(&call, y);
}
