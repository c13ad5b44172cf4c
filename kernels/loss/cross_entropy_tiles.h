/*
 * cross_entropy_tiles.h: what is seen of a row of logits on the CPU, in tiles that stay in the fastest
 * cache. A tile is read from memory once: its largest logit is found, then its exponentials are added,
 * and the sum of the tiles before it is rescaled where the largest grew.
 */
#ifndef HR_CROSS_ENTROPY_TILES_H
#define HR_CROSS_ENTROPY_TILES_H

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

/* The other two of ce_sums, to which a masked class adds nothing. */
HR_INLINE void tile_moments(ce_sums *sums, const float *tile, int n, float base)
{
    float mean[LANES] = {0}, squares[LANES] = {0}, last[LANES];
    for (int j = 0; j < n; j += LANES) {
        const float *const z = lanes_of(last, tile, j, n, -INFINITY);
        for (int lane = 0; lane < LANES; lane++) {
            const float less = hr_at_least(z[lane] - base, -88.0f), p = ce_exp(less);
            mean[lane] += p * less;
            squares[lane] += p * p;
        }
    }
    sums->mean += lanes_total(mean);
    sums->squares += lanes_total(squares);
}

/* Adds the logits of a row. */
HR_INLINE void ce_see(const cross_entropy_args *a, ce_seen *seen, const void *logits,
                      int64_t target, ce_wants wants)
{
    const hr_cross_entropy_config *const config = &a->config;
    const float *const weight = ce_weights(a);
    const float cap = (float)config->softcap;
    const int64_t column = target - a->first;
    float buffer[TILE], top = seen->top;
    ce_sums sums = seen->sums;
    for (int64_t j = 0; j < a->classes; j += TILE) {
        const int n = a->classes - j < TILE ? (int)(a->classes - j) : TILE;
        const float *tile = tile_in(buffer, logits, j, n, config->dtype);
        tile_prefetch(logits, j, config->dtype);
        if (cap > 0.0f) {
            tile_cap(buffer, tile, n, cap);
            tile = buffer;
        }
        if (column >= j && column < j + n)
            seen->z = tile[column - j];
        const float tile_largest = tile_top(tile, n);
        if (tile_largest > top) {
            ce_rescale(&sums, top, tile_largest);
            top = tile_largest;
            if (wants.argmax) {
                int64_t i = 0;
                while (tile[i] != top)
                    i++;
                seen->argmax = a->first + j + i;
            }
        }
        sums.sum += tile_exponentials(tile, n, ce_base(top));
        if (wants.moments)
            tile_moments(&sums, tile, n, ce_base(top));
        if (wants.total)
            seen->total += tile_weighted(tile, NULL, n);
        if (config->label_smoothing > 0.0)
            seen->weighted += tile_weighted(tile, weight ? weight + j : NULL, n);
    }
    seen->top = top;
    seen->sums = sums;
}

#endif
