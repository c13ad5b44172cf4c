/*
 * update_scale.h: updates a dynamic loss scale; the rule is documented at hr_update_scale in
 * headroom.h. Mixed precision training, Micikevicius et al., arXiv:1710.03740.
 */
#ifndef HR_UPDATE_SCALE_H
#define HR_UPDATE_SCALE_H

#include <math.h>

#include "kernels/core/dtype.h"

typedef struct update_scale_args {
    float *scale;
    int32_t *growth_tracker;
    int32_t *hysteresis_tracker; /* NULL: every overflow lowers the scale */
    const float *found_inf;
    hr_update_scale_config config;
} update_scale_args;

HR_INLINE void update_scale(const update_scale_args *a)
{
    const hr_update_scale_config *const config = &a->config;
    if (*a->found_inf != 0.0f) {
        const int32_t patience = a->hysteresis_tracker ? *a->hysteresis_tracker - 1 : 0;
        *a->growth_tracker = 0;
        if (a->hysteresis_tracker)
            *a->hysteresis_tracker = patience;
        if (patience > 0)
            return;
        const double lower = (double)*a->scale * config->backoff_factor;
        *a->scale = (float)(lower > config->min_scale ? lower : config->min_scale);
        return;
    }
    if (++*a->growth_tracker != config->growth_interval)
        return;
    *a->growth_tracker = 0;
    if (a->hysteresis_tracker)
        *a->hysteresis_tracker = config->hysteresis;
    const double higher = (double)*a->scale * config->growth_factor;
    const float bounded = (float)(higher < config->max_scale ? higher : config->max_scale);
    if (isfinite(bounded))
        *a->scale = bounded;
}

#ifdef __cplusplus
extern "C" {
#endif

hr_status update_scale_cpu(const update_scale_args *args);
hr_status update_scale_cuda(const update_scale_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
