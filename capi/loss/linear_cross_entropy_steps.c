/*
 * linear_cross_entropy_steps.c: the order of products and of what lies between them. Rows that count
 * are listed; then, for a chunk of them, the logits of all classes are seen, a tile of classes at a
 * time, and become gradients, which are multiplied at once.
 */
#include "capi/loss/linear_cross_entropy_call.h"
#include "kernels/core/columns.h"

static void *at(const lce_call *call, size_t place)
{
    return place == HR_NO_PART ? NULL : call->workspace + place;
}

static hr_rows rows_from(const hr_rows *rows, int64_t row, int64_t col, hr_dtype dtype)
{
    return (hr_rows){(char *)rows->data + (row * rows->stride + col) * hr_element_size(dtype),
                     rows->stride};
}

/* Rows [first, first + rows) of the list, and the tile of classes from `class` on. */
typedef struct lce_part {
    int64_t first, rows, class, classes;
    int is_first, is_last;           /* of the chunks of rows */
    int is_first_tile, is_last_tile; /* of classes, in the order of the pass */
} lce_part;

static hr_rows logits_of(const lce_call *call, hr_dtype dtype)
{
    const int64_t pitch = call->sizes.pitch;
    return (hr_rows){at(call, call->layout.logits), dtype == HR_F32 ? pitch : 2 * pitch};
}

static hr_rows hidden_of(const lce_call *call)
{
    return (hr_rows){at(call, call->layout.hidden), call->sizes.features};
}

/* The arguments of kernels for the logits of a part. */
static cross_entropy_args rows_of(const lce_call *call, const lce_part *part)
{
    const lce_list *const list = &call->listing.list;
    cross_entropy_args a = call->listing.ce;
    a.logits = logits_of(call, HR_F32);
    a.grad = logits_of(call, call->sizes.computed);
    a.target = list->target + part->first;
    a.lse = list->lse + part->first;
    a.lse_low = list->lse_low + part->first;
    a.dloss = list->dloss + part->first;
    a.dloss_stride = 1;
    a.factors = list->totals->used;
    a.given_sum = &list->totals->weight_sum;
    a.rows = part->rows;
    a.classes = part->classes;
    a.first = part->class;
    a.config.target_bytes = 8;
    a.config.dtype = HR_F32;
    a.config.grad_dtype = call->sizes.computed;
    return a;
}

static hr_status product(const lce_call *call, const hr_rows *c, const hr_rows *a, const hr_rows *b,
                         const float *bias, int64_t m, int64_t n, int64_t k,
                         const hr_gemm_config *config)
{
    return hr_gemm(c, a, b, bias, m, n, k, config, at(call, call->layout.product),
                   call->layout.product_bytes, call->exec);
}

/* How many classes of a tile are taken at a time where weights are converted or sums are halved:
 * weights that are decoded are converted. */
static int64_t panel_of(const lce_call *call, int64_t classes, int in_panels)
{
    return in_panels && call->sizes.panel < classes ? call->sizes.panel : classes;
}

/* The weights of `classes` classes in the type of products: where they are, or converted. */
static hr_status weights_of(const lce_call *call, hr_rows *weights, int64_t class, int64_t classes)
{
    const lce_layout *const layout = &call->layout;
    const int64_t features = call->sizes.features;
    const hr_dtype dtype = call->config.dtype;
    if (layout->weight == HR_NO_PART) {
        *weights = rows_from(&call->inputs.weight, class, 0, dtype);
        return HR_OK;
    }
    const hr_rows panel = *weights = (hr_rows){at(call, layout->weight), features};
    if (call->held->class == class && call->held->classes == classes)
        return HR_OK;
    hr_rows given;
    if (call->config.matrix) {
        given =
            layout->decoded == HR_NO_PART ? panel : (hr_rows){at(call, layout->decoded), features};
        HR_RUN(hr_dequantize_matrix(&given, call->config.matrix, class, classes, 0, features,
                                    call->exec));
    } else {
        given = rows_from(&call->inputs.weight, class, 0, dtype);
    }
    if (given.data != panel.data) {
        const lce_move move = {panel, given, HR_F32, dtype, NULL, classes, features};
        HR_ON_DEVICE(call->exec, lce_gather, &move);
    }
    *call->held = (struct lce_held){class, classes};
    return HR_OK;
}

static hr_status compute_logits(const lce_call *call, const lce_part *part)
{
    const lce_sizes *const s = &call->sizes;
    const hr_rows logits = logits_of(call, HR_F32), hidden = hidden_of(call);
    hr_gemm_config config = lce_gemm_config(&call->config, s->computed);
    config.transpose_b = 1;
    config.alpha = call->config.logit_scale;
    const float *const bias = call->inputs.bias ? (float *)at(call, call->layout.bias) : NULL;
    const int64_t width = panel_of(call, part->classes, call->layout.weight != HR_NO_PART);
    for (int64_t j = 0; j < part->classes; j += width) {
        const int64_t n = part->classes - j < width ? part->classes - j : width;
        hr_rows weights;
        HR_RUN(weights_of(call, &weights, part->class + j, n));
        const hr_rows to = rows_from(&logits, 0, j, HR_F32);
        HR_RUN(product(call, &to, &hidden, &weights, bias ? bias + part->class + j : NULL,
                       part->rows, n, s->features, &config));
    }
    return HR_OK;
}

static hr_status see(const lce_call *call, const lce_part *part)
{
    const hr_linear_cross_entropy_rows *const out = &call->out;
    const lce_seeing seeing = {.ce = rows_of(call, part),
                               .seen = (ce_seen *)at(call, call->layout.seen),
                               .is_first = part->is_first_tile,
                               .wants = {.argmax = out->argmax != NULL,
                                         .rank = out->rank != NULL,
                                         .moments = out->entropy || out->log_sum_sq_probs,
                                         .total = out->mean_logit != NULL}};
    HR_ON_DEVICE(call->exec, lce_see, &seeing);
    return HR_OK;
}

static hr_status end_rows(const lce_call *call, const lce_part *part)
{
    const lce_ending ending = {.ce = rows_of(call, part),
                               .seen = (const ce_seen *)at(call, call->layout.seen),
                               .classes = call->sizes.classes,
                               .list = call->listing.list,
                               .first = part->first,
                               .rows = part->rows,
                               .out = call->out};
    HR_ON_DEVICE(call->exec, lce_end, &ending);
    return HR_OK;
}

/* ---- Gradients ------------------------------------------------------------------------------- */

static hr_status hidden_gradient(const lce_call *call, const lce_part *part)
{
    const lce_sizes *const s = &call->sizes;
    const hr_rows dlogits = logits_of(call, s->computed);
    const hr_rows sums = {at(call, call->layout.hidden_grad), s->features};
    hr_gemm_config config = lce_gemm_config(&call->config, s->computed);
    config.alpha = call->config.logit_scale;
    const int64_t width = panel_of(call, part->classes, call->layout.weight != HR_NO_PART);
    for (int64_t j = 0; j < part->classes; j += width) {
        const int64_t n = part->classes - j < width ? part->classes - j : width;
        hr_rows weights;
        HR_RUN(weights_of(call, &weights, part->class + j, n));
        const hr_rows from = rows_from(&dlogits, 0, j, s->computed);
        config.beta = part->is_first_tile && j == 0 ? 0.0 : 1.0;
        HR_RUN(product(call, &sums, &from, &weights, NULL, part->rows, s->features, n, &config));
    }
    if (!part->is_last_tile)
        return HR_OK;
    const lce_move move = {.to = call->grads.hidden,
                           .from = sums,
                           .to_dtype = call->config.grad_dtype,
                           .from_dtype = HR_F32,
                           .index = call->listing.list.index + part->first,
                           .rows = part->rows,
                           .cols = s->features};
    HR_ON_DEVICE(call->exec, lce_scatter, &move);
    return HR_OK;
}

static hr_status weight_gradient(const lce_call *call, const lce_part *part)
{
    const lce_sizes *const s = &call->sizes;
    const lce_layout *const layout = &call->layout;
    const hr_dtype dtype = call->config.grad_dtype;
    const hr_rows dlogits = logits_of(call, s->computed), hidden = hidden_of(call);
    const int overwrites = part->is_first && !call->config.add_to_weight_grads;
    const int in_panels = layout->weight_grad != HR_NO_PART;
    const hr_rows sums = {at(call, layout->weight_grad), s->features};
    uint16_t *const low = (uint16_t *)at(call, layout->low);
    hr_gemm_config config = lce_gemm_config(&call->config, s->computed);
    config.transpose_a = 1;
    config.alpha = call->config.logit_scale;
    config.out_dtype = in_panels ? HR_F32 : dtype;
    config.beta = in_panels || overwrites ? 0.0 : 1.0;
    const int64_t width = panel_of(call, part->classes, in_panels);
    for (int64_t j = 0; j < part->classes; j += width) {
        const int64_t n = part->classes - j < width ? part->classes - j : width;
        const hr_rows from = rows_from(&dlogits, 0, j, s->computed);
        const hr_rows to = rows_from(&call->grads.weight, part->class + j, 0, dtype);
        HR_RUN(product(call, in_panels ? &sums : &to, &from, &hidden, NULL, n, s->features,
                       part->rows, &config));
        if (!in_panels)
            continue;
        const lce_addition addition = {.high = to,
                                       .low = low ? low + (part->class + j) * s->features : NULL,
                                       .addend = sums,
                                       .rows = n,
                                       .cols = s->features,
                                       .dtype = dtype,
                                       .is_first = part->is_first,
                                       .overwrites = overwrites,
                                       .is_last = part->is_last};
        HR_ON_DEVICE(call->exec, lce_add, &addition);
    }
    return HR_OK;
}

static hr_status bias_gradient(const lce_call *call, const lce_part *part)
{
    const int64_t element = hr_element_size(call->config.grad_dtype);
    const column_sums columns = {
        .x = logits_of(call, call->sizes.computed),
        .dtype = call->sizes.computed,
        .out_dtype = call->config.grad_dtype,
        .sums = (double *)at(call, call->layout.bias_grad) + part->class,
        .out = part->is_last ? (char *)call->grads.bias + part->class * element : NULL,
        .rows = part->rows,
        .cols = part->classes,
        .factor = call->config.logit_scale,
        .is_first = part->is_first,
        .adds_to_out = call->config.add_to_weight_grads};
    HR_ON_DEVICE(call->exec, sum_columns, &columns);
    return HR_OK;
}

static hr_status gradients(const lce_call *call, const lce_part *part)
{
    cross_entropy_args a = rows_of(call, part);
    if (call->is_backward) {
        a.entropy = call->config.entropy;
        a.dentropy = call->config.dentropy;
        a.dentropy_stride = call->config.dentropy_stride;
        a.index = call->listing.list.index + part->first;
    }
    HR_ON_DEVICE(call->exec, cross_entropy_backward, &a);
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_HIDDEN)
        HR_RUN(hidden_gradient(call, part));
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_WEIGHT)
        HR_RUN(weight_gradient(call, part));
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_BIAS)
        HR_RUN(bias_gradient(call, part));
    return HR_OK;
}

/* ---- All of it ------------------------------------------------------------------------------- */

static hr_status run_chunk(const lce_call *call, lce_part part)
{
    const lce_sizes *const s = &call->sizes;
    const hr_rows hidden = hidden_of(call);
    const lce_move move = {.to = hidden,
                           .from = call->inputs.hidden,
                           .to_dtype = s->computed,
                           .from_dtype = call->config.dtype,
                           .index = call->listing.list.index + part.first,
                           .rows = part.rows,
                           .cols = s->features};
    HR_ON_DEVICE(call->exec, lce_gather, &move);
    const int64_t tiles = s->classes / s->tile + (s->classes % s->tile != 0);
    for (int pass = call->is_backward; pass < (call->wanted ? 2 : 1); pass++)
        for (int64_t k = 0; k < tiles; k++) {
            /* Gradients begin with the last tile, of which the logits are still there. */
            const int are_there = pass == 1 && k == 0 && !call->is_backward;
            part.class = (pass == 0 ? k : tiles - 1 - k) * s->tile;
            const int64_t left = s->classes - part.class;
            part.classes = left < s->tile ? left : s->tile;
            part.is_first_tile = k == 0;
            part.is_last_tile = k == tiles - 1;
            if (!are_there)
                HR_RUN(compute_logits(call, &part));
            if (pass == 1) {
                HR_RUN(gradients(call, &part));
                continue;
            }
            HR_RUN(see(call, &part));
            if (part.is_last_tile)
                HR_RUN(end_rows(call, &part));
        }
    return HR_OK;
}

static hr_status zero(const lce_call *call, const hr_rows *rows, int64_t count, int64_t cols)
{
    const int64_t element = hr_element_size(call->config.grad_dtype), bytes = cols * element;
    const int64_t pitch = count > 1 ? rows->stride * element : bytes;
#if HR_WITH_CUDA
    if (call->exec->device != HR_CPU) {
        int32_t previous = 0;
        HR_RUN(hr_cuda_enter(call->exec->device, &previous));
        const hr_status status = lce_zero_cuda(rows, count, bytes, pitch, call->exec);
        hr_cuda_leave(previous);
        return status;
    }
#endif
    for (int64_t row = 0; row < count; row++)
        memset((char *)rows->data + row * pitch, 0, (size_t)bytes);
    return HR_OK;
}

/* Gradients that no product writes. */
static hr_status zero_gradients(const lce_call *call, int64_t counted)
{
    const lce_sizes *const s = &call->sizes;
    const hr_rows bias = {call->grads.bias, s->classes};
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_HIDDEN)
        HR_RUN(zero(call, &call->grads.hidden, s->rows, s->features));
    if (counted > 0 || call->config.add_to_weight_grads)
        return HR_OK;
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_WEIGHT)
        HR_RUN(zero(call, &call->grads.weight, s->classes, s->features));
    if (call->wanted & HR_LINEAR_CROSS_ENTROPY_BIAS)
        HR_RUN(zero(call, &bias, 1, s->classes));
    return HR_OK;
}

hr_status lce_run(lce_call *call)
{
    const lce_sizes *const s = &call->sizes;
    const lce_layout *const layout = &call->layout;
    lce_list *const list = &call->listing.list;
    struct lce_held held = {0, 0};
    call->held = &held;
    *list = (lce_list){.index = (int64_t *)at(call, layout->index),
                       .target = (int64_t *)at(call, layout->target),
                       .scale = (float *)at(call, layout->scale),
                       .dloss = (float *)at(call, layout->dloss),
                       .loss = (float *)at(call, layout->loss),
                       .lse = (float *)at(call, layout->lse),
                       .lse_low = (float *)at(call, layout->lse_low),
                       .capacity = s->rows,
                       .totals = (lce_totals *)at(call, layout->totals)};
    call->listing.out = call->out;
    call->listing.counts = (lce_counts *)at(call, layout->parts);
    HR_ON_DEVICE(call->exec, lce_list_rows, &call->listing);
    /* On CUDA nobody waits for the count: all rows of the list are multiplied. */
    const int64_t counted = call->exec->device == HR_CPU ? list->totals->count : s->rows;
    HR_RUN(zero_gradients(call, counted));
    if (call->inputs.bias)
        HR_ON_DEVICE(call->exec, lce_scale, (float *)at(call, layout->bias), call->inputs.bias,
                     call->config.logit_scale, s->classes, call->config.dtype);
    const int64_t chunks = counted / s->chunk + (counted % s->chunk != 0);
    const int64_t rows = chunks ? counted / chunks + (counted % chunks != 0) : 1;
    for (int64_t first = 0; first < counted; first += rows) {
        const int64_t left = counted - first;
        HR_RUN(run_chunk(call, (lce_part){.first = first,
                                          .rows = left < rows ? left : rows,
                                          .is_first = first == 0,
                                          .is_last = left <= rows}));
    }
    if (!call->result)
        return HR_OK;
    const lce_reduction reduction = {*list, call->config.z_loss, call->result,
                                     (ce_totals *)at(call, layout->parts)};
    HR_ON_DEVICE(call->exec, lce_reduce, &reduction);
    return HR_OK;
}
