/*
 * lora_cpu.c: the loop. A tile's random bits are computed first, each round of Philox over all its
 * counters before the next, so that the compiler vectorizes it.
 */
#include "kernels/core/rows_cpu.h"
#include "kernels/nn/lora.h"

enum { COUNTERS = TILE / LORA_GROUP };

/* Makes the elements of a tile zeros that are dropped; it begins at a group, and has `groups`. */
HR_INLINE void drop_tile(float *restrict tile, int64_t row, int64_t group, int groups,
                         uint32_t threshold, uint64_t seed)
{
    uint32_t word[4][COUNTERS];
    for (int i = 0; i < groups; i++) {
        const hr_random4 x = lora_counter(row, group + i);
        for (int w = 0; w < 4; w++)
            word[w][i] = x.word[w];
    }
    hr_philox_key key = hr_philox_first(seed);
    for (int round = 0; round < HR_PHILOX_ROUNDS; round++, key = hr_philox_next(key))
        for (int i = 0; i < groups; i++) {
            hr_philox_state x = {word[0][i], word[1][i], word[2][i], word[3][i]};
            x = hr_philox_round(x, key);
            word[0][i] = x.a, word[1][i] = x.b, word[2][i] = x.c, word[3][i] = x.d;
        }
    for (int i = 0; i < groups; i++)
        for (int e = 0; e < LORA_GROUP; e++) {
            const int j = i * LORA_GROUP + e;
            tile[j] = lora_keeps(word[e / 2][i], e, threshold) ? tile[j] : 0.0f;
        }
}

/* Tiles, counted through all rows. */
HR_INLINE void lora_range(void *context, int64_t begin, int64_t end)
{
    const lora_rows_args *const a = (const lora_rows_args *)context;
    const int64_t per_row = (a->cols + TILE - 1) / TILE;
    const hr_dtype dtype = lora_dtype(a);
    const uint64_t seed = a->threshold ? (uint64_t)*a->seed : 0;
    for (int64_t t = begin; t < end; t++) {
        const int64_t row = t / per_row, j0 = t % per_row * TILE;
        const int n = (int)(a->cols - j0 < TILE ? a->cols - j0 : TILE);
        float tile[TILE];
        const float *in = tile_in(tile, row_at(&a->x, row, dtype), j0, n, dtype);
        if (a->threshold) {
            if (in != tile)
                memcpy(tile, in, sizeof(float) * (size_t)n);
            drop_tile(tile, a->row + row, (a->col + j0) / LORA_GROUP,
                      (n + LORA_GROUP - 1) / LORA_GROUP, a->threshold, seed);
            in = tile;
        }
        tile_out(row_at(&a->out, row, a->out_dtype), in, j0, n, a->out_dtype);
    }
}

CPU_VARIANTS(lora_range)

hr_status lora_rows_cpu(const lora_rows_args *args)
{
    const int64_t per_row = (args->cols + TILE - 1) / TILE;
    hr_parallel_for(0, args->rows * per_row, CPU_GRAIN / TILE, CPU_BEST(lora_range), (void *)args);
    return HR_OK;
}

/* ---- Norms ----------------------------------------------------------------------------------- */

HR_INLINE double sum_of_squares(const void *row, int64_t cols, hr_dtype dtype)
{
    float buffer[TILE], lanes[LANES] = {0.0f};
    for (int64_t j0 = 0; j0 < cols; j0 += TILE) {
        const int n = (int)(cols - j0 < TILE ? cols - j0 : TILE);
        const float *const x = tile_in(buffer, row, j0, n, dtype);
        int j = 0;
        for (; j + LANES <= n; j += LANES)
            for (int lane = 0; lane < LANES; lane++)
                lanes[lane] = fmaf(x[j + lane], x[j + lane], lanes[lane]);
        for (int lane = 0; j + lane < n; lane++)
            lanes[lane] = fmaf(x[j + lane], x[j + lane], lanes[lane]);
    }
    return lanes_total(lanes);
}

HR_INLINE void norms_range(void *context, int64_t begin, int64_t end)
{
    const lora_norms_args *const a = (const lora_norms_args *)context;
    for (int64_t i = begin; i < end; i++) {
        double square = sum_of_squares(row_at(&a->w, i, a->dtype), a->cols, a->dtype);
        for (int64_t k = 0; k < a->rank; k++)
            square += lora_norm_term(a, i, k, a->dtype);
        a->norms[i] = lora_norm(square);
    }
}

CPU_VARIANTS(norms_range)

hr_status lora_norms_cpu(const lora_norms_args *args)
{
    hr_parallel_for(0, args->rows, rows_per_task(args->cols, 1), CPU_BEST(norms_range),
                    (void *)args);
    return HR_OK;
}
