/*
 * adafactor_cpu.h: shared by the CPU loops of Adafactor: a tensor in a call, sums over lanes, and
 * loads and stores of elements.
 *
 * RUN elements are added in binary32 in LANES interleaved sums, and these are added in binary64, so
 * that every instruction set and number of threads adds in the same order.
 */
#ifndef HR_ADAFACTOR_CPU_H
#define HR_ADAFACTOR_CPU_H

#include "kernels/optim/adafactor_plan.h"
#include "kernels/weights/weights_cpu.h"

#define LANES 32
#define RUN   1024

/* Rows that are read at the same time: a core waits less for memory if it reads from several
 * places. */
#define TOGETHER 4

/* Rows whose column sums are added in binary32. */
#define ROWS 32

/* Passes over the elements. */
typedef enum stage { STAGE_PARAMS, STAGE_SUMS, STAGE_NORM, STAGE_APPLY } stage;

/* A tensor in a call. */
typedef struct adafactor_pass {
    const hr_adafactor_config *config;
    adafactor_tensor t;
    adafactor_rates rates;
    double weight, eps1;
    weights_tensor weights; /* if config->step.weights */
} adafactor_pass;

HR_INLINE double sum_of_lanes(const float *lanes)
{
    double sums[LANES];
    for (int lane = 0; lane < LANES; lane++)
        sums[lane] = (double)lanes[lane];
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] += sums[lane + width];
    return sums[0];
}

/* Runs `few`, an expression of i and count, over [0, end), LANES elements at a time. */
#define IN_LANES(end, few)                     \
    do {                                       \
        int64_t i = 0;                         \
        for (; (end)-i >= LANES; i += LANES) { \
            enum { count = LANES };            \
            few;                               \
        }                                      \
        if (i < (end)) {                       \
            const int count = (int)((end)-i);  \
            few;                               \
        }                                      \
    } while (0)

/* IN_RUNS runs the body for each run [from, to) of [0, end), and IN_STEPS for each step [at, at +
 * n) of a run. */
#define IN_RUNS(end, from, to) \
    for (int64_t from = 0, to; to = (end)-from < RUN ? (end) : from + RUN, from < (end); from = to)
#define IN_STEPS(from, to, at, n) \
    for (int64_t at = (from), n; n = (to)-at < CPU_STEP ? (to)-at : CPU_STEP, at < (to); at += n)

HR_INLINE void convert(const void *restrict x, int64_t i, int64_t count, float *restrict tile,
                       hr_dtype dtype)
{
    for (int64_t lane = 0; lane < count; lane++)
        tile[lane] = hr_load(x, i + lane, dtype);
}

/* The elements [i, i + count) in binary32, at most CPU_STEP of them: their address in memory if
 * they are f32, else the tile, filled with them. */
HR_INLINE const float *as_floats(const void *x, int64_t i, int64_t count, float *tile,
                                 hr_dtype dtype)
{
    if (dtype == HR_F32)
        return (const float *)x + i;
    if (count == CPU_STEP)
        FOR_DTYPE(dtype, D, convert(x, i, CPU_STEP, tile, D))
    else
        convert(x, i, count, tile, dtype);
    return tile;
}

HR_INLINE void convert_back(void *restrict x, int64_t i, int64_t count, const float *restrict tile,
                            hr_dtype dtype)
{
    for (int64_t lane = 0; lane < count; lane++)
        hr_store(x, i + lane, tile[lane], dtype);
}

/* The parameters [i, i + count) in binary32, at most CPU_STEP of them: their address in memory if
 * they are f32, else the tile, filled with them. After an update, store_params() stores those of a
 * tile. */
HR_INLINE float *load_params(const adafactor_pass *p, int64_t i, int64_t count, float *tile)
{
    if (!p->config->step.weights)
        return (float *)as_floats(p->t.param, i, count, tile, p->t.param_dtype);
    weights_load(&p->weights, i, (int)count, tile);
    return tile;
}

HR_INLINE void prefetch_params(const adafactor_pass *p, int64_t i, int64_t end)
{
    if (p->config->step.weights)
        weights_prefetch(p->weights.param, p->weights.residual, i, CPU_STEP, end, p->weights.dtype,
                         p->weights.mode);
    else
        cpu_prefetch(p->t.param, i, CPU_STEP, end, p->t.param_dtype);
}

/* `before`: the parameters before the update, to count those that stall. */
HR_INLINE void store_params(const adafactor_pass *p, int64_t i, int64_t count, const float *tile,
                            const float *before)
{
    if (p->config->step.weights)
        weights_store(&p->weights, i, (int)count, tile, p->weights.stalled ? before : NULL);
    else if (p->t.param_dtype != HR_F32)
        FOR_DTYPE(p->t.param_dtype, P, convert_back(p->t.param, i, count, tile, P))
}

HR_INLINE void square_few(const float *restrict x, int count, float *restrict lanes)
{
    for (int lane = 0; lane < count; lane++)
        lanes[lane] += x[lane] * x[lane];
}

#endif
