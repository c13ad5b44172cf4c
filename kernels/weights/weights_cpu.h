/*
 * weights_cpu.h: weights of any mode for a loop that updates binary32. The loop loads a tile of
 * weights, which stays in the first-level cache, updates it, and stores it again.
 */
#ifndef HR_WEIGHTS_CPU_H
#define HR_WEIGHTS_CPU_H

#include "kernels/core/cpu.h"
#include "kernels/weights/weights.h"

#define WEIGHTS_TILE 256 /* most elements of a tile */

/* The weights of one tensor of a call. */
typedef struct weights_tensor {
    void *param, *residual;
    hr_dtype dtype;
    hr_weights_mode mode;
    int64_t *stalled;
    hr_place place;
    uint64_t seed;
    double step;
} weights_tensor;

static inline weights_tensor weights_of(const hr_weights *w, const hr_tensor_list *params,
                                        int64_t k, double step)
{
    const hr_place whole = {0, params->numel[k] > 0 ? params->numel[k] : 1, 0};
    weights_tensor t;
    t.param = params->data[k];
    t.residual = w->residuals ? w->residuals->data[k] : NULL;
    t.dtype = params->dtype[k];
    t.mode = w->mode;
    t.stalled = w->stalled;
    t.place = w->places ? w->places[k] : whole;
    t.seed = w->seeds ? w->seeds[k] : 0;
    t.step = step;
    return t;
}

/* Loads the weights [i, i + count) as binary32; count is at most WEIGHTS_TILE. */
void weights_load(const weights_tensor *t, int64_t i, int count, float *tile);

/* Writes the 16 random bits of each of the weights [i, i + count). */
void weights_fill_random(const weights_tensor *t, int64_t i, int count, uint16_t *random);

/* Stores the weights [i, i + count) from a tile. `before`: their values before the update, to count
 * those that stall (hr_weights.stalled); NULL: do not count. */
void weights_store(const weights_tensor *t, int64_t i, int count, const float *tile,
                   const float *before);

HR_INLINE void weights_prefetch(const void *param, const void *residual, int64_t i, int count,
                                int64_t end, hr_dtype dtype, hr_weights_mode mode)
{
    const hr_dtype residuals = weights_residual_dtype(mode, dtype);
    cpu_prefetch(param, i, count, end, dtype);
    if (residuals != WEIGHTS_NO_RESIDUAL)
        cpu_prefetch(residual, i, count, end, residuals);
}

#endif
