/*
 * step.h: reads and folds the scalars of an optimizer's step; see hr_step_config in headroom.h.
 *
 * Functions that read the scalars that a config points to must run where these live: on the host,
 * or in a thread of the device.
 */
#ifndef HR_STEP_H
#define HR_STEP_H

#include "kernels/core/dtype.h"

HR_INLINE double step_lr(const hr_step_config *step)
{
    return step->lr_ptr ? hr_load_scalar(step->lr_ptr, step->lr_dtype) : step->lr;
}

/* clip_coef / grad_scale, where NULL is 1. */
HR_INLINE double step_scale(const float *clip_coef, const float *grad_scale)
{
    return (clip_coef ? (double)*clip_coef : 1.0) / (grad_scale ? (double)*grad_scale : 1.0);
}

/* The factor that gradients are multiplied by; it is negative if the step maximizes. */
HR_INLINE float step_grad_factor(const hr_step_config *step)
{
    const double scale = step_scale(step->clip_coef, step->grad_scale);
    return (float)(step->maximize ? -scale : scale);
}

/* Whether found_inf says that the call must change nothing. */
HR_INLINE int step_is_skipped(const hr_step_config *step)
{
    return step->found_inf && *step->found_inf != 0.0f;
}

/* The number t of the step. `counter` holds the number of steps done before; NULL: use step->t. */
HR_INLINE double step_number(const hr_step_config *step, const void *counter, hr_dtype dtype)
{
    return counter ? hr_load_scalar(counter, dtype) + 1.0 : (double)step->t;
}

HR_INLINE void step_count(void *counter, hr_dtype dtype)
{
    hr_store_scalar(counter, hr_load_scalar(counter, dtype) + 1.0, dtype);
}

/* Whether constants depend on scalars in device memory, so that the device must fold them. */
static inline int step_is_on_device(const hr_step_config *step, const hr_tensor_list *counters)
{
    return counters || step->lr_ptr || step->grad_scale || step->clip_coef;
}

/* Counter k of a list that may be NULL, and its type, HR_F64 if there is no list. */
static inline void *step_counter(const hr_tensor_list *counters, int64_t k)
{
    return counters ? counters->data[k] : NULL;
}

static inline hr_dtype step_counter_dtype(const hr_tensor_list *counters, int64_t k)
{
    return counters ? counters->dtype[k] : HR_F64;
}

/* The number of the step of parameter k. */
static inline double step_number_of(const hr_step_config *step, const hr_tensor_list *counters,
                                    int64_t k)
{
    return step_number(step, step_counter(counters, k), step_counter_dtype(counters, k));
}

/* Adds 1 to the counter of every parameter, if there are counters. A step does this last. */
static inline void step_count_all(const hr_tensor_list *counters)
{
    for (int64_t k = 0; counters && k < counters->count; k++)
        step_count(counters->data[k], counters->dtype[k]);
}

#endif
