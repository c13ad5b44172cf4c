/*
 * norm_tiles.h: what norm_cpu.c computes on a tile of a row, in binary32. Each loop is compiled by
 * itself, once per instruction set, and is called through RUN.
 */
#ifndef HR_NORM_TILES_H
#define HR_NORM_TILES_H

#include "kernels/core/rows_cpu.h"
#include "kernels/nn/norm.h"

/* The normed value is (x - mean) * factor. Where that is rounded, x holds the rounded value, mean is
 * 0 and factor 1, which change no bits. */
typedef struct norm_tile {
    const float *x, *dy, *weight, *bias, *dsum;
    float *hat, *out, *dweight, *dbias;
    float mean, factor, rstd, g_hat, g; /* of the row; g_hat and g are means */
    double total, total_g;              /* out: sums over the tile */
} norm_tile;

#define TILE_LOOP(name)    HR_INLINE void name(void *context, int64_t begin, int64_t end)
#define RUN(loop, tile, n) CPU_BEST(loop)(tile, 0, n)

/* Asks for what lies 2 KiB ahead in memory, which a core does not do by itself while it computes;
 * past the end of a row that is usually the next one, and a prefetch never fails. */
#define PREFETCH(x, j)                                   \
    do {                                                 \
        __builtin_prefetch((x) + (j) + 512);             \
        __builtin_prefetch((x) + (j) + 512 + LANES / 2); \
    } while (0)

/* Sums `expression` of j over LANES interleaved lanes; `fetch` comes before each LANES. */
#define SUM_IN_LANES(begin, end, fetch, expression)      \
    do {                                                 \
        int64_t first = (begin);                         \
        for (; (end)-first >= LANES; first += LANES) {   \
            fetch;                                       \
            for (int lane = 0; lane < LANES; lane++) {   \
                const int64_t j = first + lane;          \
                expression;                              \
            }                                            \
        }                                                \
        for (int lane = 0; lane < (end)-first; lane++) { \
            const int64_t j = first + lane;              \
            expression;                                  \
        }                                                \
    } while (0)

TILE_LOOP(sum)
{
    norm_tile *const t = (norm_tile *)context;
    const float *const x = t->x;
    float lanes[LANES] = {0};
    SUM_IN_LANES(begin, end, PREFETCH(x, first), lanes[lane] += x[j]);
    t->total = lanes_total(lanes);
}

TILE_LOOP(sum_squares)
{
    norm_tile *const t = (norm_tile *)context;
    const float *const x = t->x, mean = t->mean;
    float lanes[LANES] = {0};
    SUM_IN_LANES(begin, end, PREFETCH(x, first), lanes[lane] += (x[j] - mean) * (x[j] - mean));
    t->total = lanes_total(lanes);
}

/* The sums of g and of g * hat. */
TILE_LOOP(sum_gradients)
{
    norm_tile *const t = (norm_tile *)context;
    const float *const x = t->x, *const dy = t->dy, *const weight = t->weight;
    const float mean = t->mean, factor = t->factor;
    float g_lanes[LANES] = {0}, g_hat_lanes[LANES] = {0};
    SUM_IN_LANES(
        begin, end, PREFETCH(x, first); PREFETCH(dy, first), const float g = dy[j] * weight[j];
        g_hat_lanes[lane] += g * norm_hat(x[j], mean, factor, 0, HR_F32); g_lanes[lane] += g);
    t->total = lanes_total(g_hat_lanes);
    t->total_g = lanes_total(g_lanes);
}

#define HAT_LOOP(name, dtype)                                  \
    TILE_LOOP(name)                                            \
    {                                                          \
        const norm_tile *const t = (const norm_tile *)context; \
        const float *const x = t->x;                           \
        const float mean = t->mean, factor = t->factor;        \
        float *const restrict hat = t->hat;                    \
        for (int64_t j = begin; j < end; j++)                  \
            hat[j] = norm_hat(x[j], mean, factor, 1, dtype);   \
    }                                                          \
    CPU_VARIANTS(name)

TILE_LOOP(add_dweight)
{
    const norm_tile *const t = (const norm_tile *)context;
    const float *const x = t->x, *const dy = t->dy;
    const float mean = t->mean, factor = t->factor;
    float *const restrict dweight = t->dweight;
    for (int64_t j = begin; j < end; j++)
        dweight[j] += dy[j] * norm_hat(x[j], mean, factor, 0, HR_F32);
}

TILE_LOOP(add_dbias)
{
    const norm_tile *const t = (const norm_tile *)context;
    const float *const dy = t->dy;
    float *const restrict dbias = t->dbias;
    for (int64_t j = begin; j < end; j++)
        dbias[j] += dy[j];
}

/* In the last three, `out` may be an input: an element depends on no other. A NaN gets the bits that
 * a store gives it, so that rows of binary32 can be written at once. */
#define STORED(x) ((x) != (x) ? hr_float(0x7FFFFFFFu) : (x))

TILE_LOOP(add)
{
    const norm_tile *const t = (const norm_tile *)context;
    const float *const x = t->x, *const other = t->dsum;
    float *const out = t->out;
#pragma GCC ivdep
    for (int64_t j = begin; j < end; j++) {
        const float sum = x[j] + other[j];
        out[j] = STORED(sum);
    }
}

TILE_LOOP(weigh)
{
    const norm_tile *const t = (const norm_tile *)context;
    const float *const x = t->x, *const weight = t->weight, *const bias = t->bias;
    const float mean = t->mean, factor = t->factor;
    float *const out = t->out;
#pragma GCC ivdep
    for (int64_t j = begin; j < end; j++) {
        const float y = norm_y(norm_hat(x[j], mean, factor, 0, HR_F32), weight[j], bias[j]);
        out[j] = STORED(y);
    }
}

/* The gradient of x, and what the row adds to those of weight and bias where they are wanted: x and
 * dy are read once for all three. */
HR_INLINE void gradients(const norm_tile *t, int64_t begin, int64_t end, int weights, int biases)
{
    const float *const x = t->x, *const dy = t->dy, *const weight = t->weight;
    const float mean = t->mean, factor = t->factor;
    const float rstd = t->rstd, g_hat = t->g_hat, g = t->g;
    float *const restrict dweight = t->dweight, *const restrict dbias = t->dbias;
    float *const out = t->out;
#pragma GCC ivdep
    for (int64_t j = begin; j < end; j++) {
        const float reached = dy[j], hat = norm_hat(x[j], mean, factor, 0, HR_F32);
        const float dx = norm_dx(reached * weight[j], hat, rstd, g_hat, g);
        if (weights)
            dweight[j] += reached * hat;
        if (biases)
            dbias[j] += reached;
        out[j] = STORED(dx);
    }
}

TILE_LOOP(gradient)
{
    const norm_tile *const t = (const norm_tile *)context;
    FOR_FLAG(t->dweight, WEIGHTS,
             FOR_FLAG(t->dbias, BIASES, gradients(t, begin, end, WEIGHTS, BIASES)))
}

CPU_VARIANTS(sum)
CPU_VARIANTS(sum_squares)
CPU_VARIANTS(sum_gradients)
HAT_LOOP(hat_bf16, HR_BF16)
HAT_LOOP(hat_f16, HR_F16)
CPU_VARIANTS(add_dweight)
CPU_VARIANTS(add_dbias)
CPU_VARIANTS(add)
CPU_VARIANTS(weigh)
CPU_VARIANTS(gradient)

/* Replaces x by the normed values, rounded, if the casting rounds them. */
static void tile_round(norm_tile *t, const norm_args *a, float *hat, int n)
{
    if (!norm_rounds(&a->config))
        return;
    t->hat = hat;
    if (a->config.dtype == HR_BF16)
        RUN(hat_bf16, t, n);
    else
        RUN(hat_f16, t, n);
    t->x = hat;
    t->mean = 0.0f;
    t->factor = 1.0f;
}

/* Runs a loop whose `out` is a tile of a row, which is streamed if `streamed` is 1. */
#define RUN_INTO(loop, tile, row, j, n, dtype, streamed)     \
    do {                                                     \
        _Alignas(64) float out[TILE];                        \
        const int direct = (dtype) == HR_F32 && !(streamed); \
        (tile)->out = direct ? (float *)(row) + (j) : out;   \
        RUN(loop, tile, n);                                  \
        if (streamed)                                        \
            rows_stream((float *)(row) + (j), out, n);       \
        else if (!direct)                                    \
            tile_out(row, out, j, n, dtype);                 \
    } while (0)

#endif
