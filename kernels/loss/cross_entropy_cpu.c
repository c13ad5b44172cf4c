/*
 * cross_entropy_cpu.c: the loops, a row after the other, in tiles that stay in the fastest cache. A
 * tile is read from memory once: its largest logit is found, then its exponentials are added, and
 * the sum of the tiles before it is rescaled where the largest grew.
 */
#include "kernels/core/rows_cpu.h"
#include "kernels/loss/cross_entropy.h"

/* A tile in whole groups of LANES: the last is filled with `absent` in `last` where it is short. */
HR_INLINE const float *lanes_of(float *restrict last, const float *tile, int j, int n, float absent)
{
    if (n - j >= LANES)
        return tile + j;
    for (int lane = 0; lane < LANES; lane++)
        last[lane] = lane < n - j ? tile[j + lane] : absent;
    return last;
}

/* The largest element; a NaN does not count. */
HR_INLINE float tile_top(const float *tile, int n)
{
    float lanes[LANES], last[LANES];
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = -INFINITY;
    for (int j = 0; j < n; j += LANES) {
        const float *const z = lanes_of(last, tile, j, n, -INFINITY);
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = z[lane] > lanes[lane] ? z[lane] : lanes[lane];
    }
    float top = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        top = lanes[lane] > top ? lanes[lane] : top;
    return top;
}

/* The sum of exp(z - base). */
HR_INLINE double tile_exponentials(const float *tile, int n, float base)
{
    float lanes[LANES] = {0}, last[LANES];
    for (int j = 0; j < n; j += LANES) {
        const float *const z = lanes_of(last, tile, j, n, -INFINITY);
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] += ce_exp(z[lane] - base);
    }
    return lanes_total(lanes);
}

/* The sum of weight * z. */
HR_INLINE double tile_weighted(const float *tile, const float *weight, int n)
{
    float lanes[LANES] = {0};
    for (int j = 0; j < n; j += LANES)
        for (int lane = 0; lane < (n - j < LANES ? n - j : LANES); lane++)
            lanes[lane] += weight ? weight[j + lane] * tile[j + lane] : tile[j + lane];
    return lanes_total(lanes);
}

HR_INLINE void tile_cap(float *capped, const float *tile, int n, float cap)
{
    for (int j = 0; j < n; j++)
        capped[j] = cap * hr_tanh(tile[j] / cap);
}

/* ---- Forward --------------------------------------------------------------------------------- */

HR_INLINE void forward_row(const cross_entropy_args *a, int64_t row)
{
    const hr_cross_entropy_config *const config = &a->config;
    const int64_t target = ce_target(a, row);
    if (ce_is_ignored(a, target)) {
        a->loss[row] = a->lse[row] = 0.0f;
        if (a->lse_low)
            a->lse_low[row] = 0.0f;
        if (a->argmax)
            a->argmax[row] = -1;
        return;
    }
    const void *const logits = row_at(&a->logits, row, config->dtype);
    const float cap = (float)config->softcap;
    float buffer[TILE], top = -INFINITY, z = 0.0f;
    double sum = 0.0, weighted = 0.0;
    int64_t argmax = 0;
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int n = a->classes - j < TILE ? (int)(a->classes - j) : TILE;
        const float *tile = tile_in(buffer, logits, j, n, config->dtype);
        tile_prefetch(logits, j, config->dtype);
        if (cap > 0.0f) {
            tile_cap(buffer, tile, n, cap);
            tile = buffer;
        }
        if (target >= j && target < j + n)
            z = tile[target - j];
        const float tile_largest = tile_top(tile, n);
        if (tile_largest > top) {
            sum *= 1.0 + ce_expm1((double)top - (double)tile_largest);
            top = tile_largest;
            if (a->argmax)
                for (argmax = j; tile[argmax - j] != top;)
                    argmax++;
        }
        sum += tile_exponentials(tile, n, ce_base(top));
        if (config->label_smoothing > 0.0)
            weighted += tile_weighted(tile, a->weight ? a->weight + j : NULL, n);
    }
    const double lse = ce_lse(top, sum);
    a->loss[row] =
        ce_loss(config, lse, (double)z, ce_weight(a, target), a->weight_sum, weighted, a->classes);
    a->lse[row] = (float)lse;
    if (a->lse_low)
        a->lse_low[row] = isfinite(a->lse[row]) ? (float)(lse - (double)a->lse[row]) : 0.0f;
    if (a->argmax)
        a->argmax[row] = argmax;
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
    const float cap = (float)config->softcap, p = r.p, w = r.w, high = r.high, low = r.low;
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
        for (int i = 0; i < n; i++)
            out[i] = p * ce_probability(tile[i], high, low);
        if (w != 0.0f && a->weight)
            for (int i = 0; i < n; i++)
                out[i] -= w * a->weight[j + i];
        else if (w != 0.0f)
            for (int i = 0; i < n; i++)
                out[i] -= w;
        if (cap > 0.0f)
            for (int i = 0; i < n; i++)
                out[i] *= slope[i];
        if (target >= j && target < j + n) {
            const int64_t i = target - j;
            out[i] = ce_target_gradient(&r, tile[i], weight, cap > 0.0f ? (double)slope[i] : 1.0);
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

static double sum_of_weights(const cross_entropy_args *a)
{
    if (!a->weight || a->config.label_smoothing == 0.0)
        return (double)a->classes;
    double sum = 0.0;
    for (int64_t j = 0; j < a->classes; j++)
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
        ce_count(args, row, &totals);
    ce_finish(args, &totals);
    return HR_OK;
}
