/* cross_entropy_cpu.c: the loops, a row after the other: see cross_entropy_tiles.h. */
#include "kernels/loss/cross_entropy_tiles.h"

/* ---- Forward --------------------------------------------------------------------------------- */

HR_INLINE void forward_row(const cross_entropy_args *a, int64_t row)
{
    const int64_t target = ce_target(a, row);
    if (ce_is_ignored(a, target)) {
        ce_clear_row(a, row);
        return;
    }
    ce_seen seen = ce_nothing_seen(0);
    ce_see(a, &seen, row_at(&a->logits, row, a->config.dtype), target,
           (ce_wants){.argmax = a->argmax != NULL});
    ce_finish_row(a, row, ce_lse(seen.top, seen.sums.sum), seen.z, a->weight_sum, seen.weighted);
    if (a->argmax)
        a->argmax[row] = seen.argmax;
}

HR_INLINE void forward_rows(void *context, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        forward_row((const cross_entropy_args *)context, row);
}

CPU_VARIANTS(forward_rows)

/* ---- Backward -------------------------------------------------------------------------------- */

HR_INLINE void backward_row(const cross_entropy_args *a, int64_t row)
{
    const hr_cross_entropy_config *const config = &a->config;
    void *const grad = row_at(&a->grad, row, config->grad_dtype);
    const void *const logits = row_at(&a->logits, row, config->dtype);
    const int64_t target = ce_target(a, row);
    if (ce_is_ignored(a, target)) {
        memset(grad, 0, (size_t)a->classes * (size_t)hr_element_size(config->grad_dtype));
        return;
    }
    const double weight = ce_weight(a, target);
    const ce_row r = ce_row_of(a, row, weight, a->weight_sum);
    const ce_entropy e = ce_entropy_of(a, row);
    const float cap = (float)config->softcap, p = r.p, w = r.w, high = r.high, low = r.low;
    const float *const weights = ce_weights(a);
    const int64_t column = target - a->first;
    float buffer[TILE], slope[TILE], out[TILE];
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int n = a->classes - j < TILE ? (int)(a->classes - j) : TILE;
        const float *tile = tile_in(buffer, logits, j, n, config->dtype);
        tile_prefetch(logits, j, config->dtype);
        if (cap > 0.0f) {
            for (int i = 0; i < n; i++) {
                const float tanh = hr_tanh(tile[i] / cap);
                slope[i] = ce_slope(tanh);
                buffer[i] = cap * tanh;
            }
            tile = buffer;
        }
        if (e.gradient != 0.0f)
            for (int i = 0; i < n; i++)
                out[i] = ce_gradient_with_entropy(tile[i], high, low, p, e);
        else
            for (int i = 0; i < n; i++)
                out[i] = p * ce_probability(tile[i], high, low);
        if (w != 0.0f && weights)
            for (int i = 0; i < n; i++)
                out[i] -= w * weights[j + i];
        else if (w != 0.0f)
            for (int i = 0; i < n; i++)
                out[i] -= w;
        if (cap > 0.0f)
            for (int i = 0; i < n; i++)
                out[i] *= slope[i];
        if (column >= j && column < j + n) {
            const int64_t i = column - j;
            out[i] =
                ce_target_gradient(&r, e, tile[i], weight, cap > 0.0f ? (double)slope[i] : 1.0);
        }
        tile_out(grad, out, j, n, config->grad_dtype);
    }
}

HR_INLINE void backward_rows(void *context, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        backward_row((const cross_entropy_args *)context, row);
}

CPU_VARIANTS(backward_rows)

/* ---- Calls ----------------------------------------------------------------------------------- */

ce_stray cross_entropy_stray_cpu(const cross_entropy_args *args)
{
    for (int64_t row = 0; row < args->rows; row++)
        if (ce_is_stray(args, ce_target(args, row)))
            return (ce_stray){row, ce_target(args, row)};
    return (ce_stray){-1, 0};
}

static double sum_of_weights(const cross_entropy_args *a)
{
    if (a->given_sum)
        return *a->given_sum;
    if (!a->weight || a->config.label_smoothing == 0.0)
        return (double)a->all;
    double sum = 0.0;
    for (int64_t j = 0; j < a->all; j++)
        sum += (double)a->weight[j];
    return sum;
}

hr_status cross_entropy_forward_cpu(cross_entropy_args *args)
{
    args->weight_sum = sum_of_weights(args);
    hr_parallel_for(0, args->rows, rows_per_task(args->classes, 1), CPU_BEST(forward_rows), args);
    return HR_OK;
}

hr_status cross_entropy_backward_cpu(cross_entropy_args *args)
{
    args->weight_sum = sum_of_weights(args);
    hr_parallel_for(0, args->rows, rows_per_task(args->classes, 1), CPU_BEST(backward_rows), args);
    return HR_OK;
}

hr_status cross_entropy_reduce_cpu(const cross_entropy_args *args)
{
    ce_totals totals = {0};
    for (int64_t row = 0; row < args->rows; row++)
        ce_count(args, ce_target(args, row), ce_given_loss(args, row), ce_given_lse(args, row),
                 &totals);
    ce_finish(args, &totals);
    return HR_OK;
}
