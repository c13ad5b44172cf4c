/*
 * unscale_norm.h: unscales, checks and measures gradients in one pass; see hr_unscale_norm in
 * headroom.h.
 *
 * A list is cut into chunks of consecutive elements of one tensor. Each chunk writes one binary64
 * number to the workspace: the sum of |x|^p over its elements, or their maximum. A second step adds
 * the chunks of each tensor, then the tensors, always in the same order, so the result does not
 * depend on which thread computed which chunk.
 *
 * The square of a binary32 number is exact in binary64, and no sum of 2^59 of them overflows or
 * loses small terms to underflow, so the norm needs no scaling, and is not finite exactly if an
 * element is not.
 */
#ifndef HR_UNSCALE_NORM_H
#define HR_UNSCALE_NORM_H

#include <math.h>

#include "kernels/core/step.h"

/* The orders that have a loop of their own, and all others. */
typedef enum norm_order { NORM_2, NORM_1, NORM_INF, NORM_P } norm_order;

/* The term of an element: |x|^p, or |x| for the maximum. */
HR_INLINE double norm_term(float x, norm_order order, double p)
{
    const double magnitude = fabs((double)x);
    switch (order) {
    case NORM_2:
        return (double)x * (double)x;
    case NORM_P:
        return pow(magnitude, p);
    default:
        return magnitude;
    }
}

HR_INLINE double norm_combine(double a, double b, norm_order order)
{
    if (order != NORM_INF)
        return a + b;
    return a >= b || a != a ? a : b; /* NaN wins on either side */
}

/* From the sum of the terms to the norm. */
HR_INLINE double norm_of(double sum, norm_order order, double p)
{
    switch (order) {
    case NORM_2:
        return sqrt(sum);
    case NORM_P:
        return pow(sum, 1.0 / p);
    default:
        return sum;
    }
}

/* The factor that gradients are multiplied by. */
HR_INLINE float unscale_factor(const hr_unscale_norm_config *config)
{
    return (float)step_scale(config->clip_coef, config->grad_scale);
}

typedef struct unscale_norm_args {
    const hr_tensor_list *grads;
    const hr_unscale_norm_result *result; /* NULL: nothing to measure */
    const hr_unscale_norm_config *config;
    norm_order order;
    void *workspace;
} unscale_norm_args;

#define NORM_CHUNK 16384

HR_INLINE int64_t norm_chunks(int64_t numel)
{
    return (numel + NORM_CHUNK - 1) / NORM_CHUNK;
}

HR_INLINE int64_t norm_chunks_of_list(const hr_tensor_list *list)
{
    int64_t chunks = 0;
    for (int64_t k = 0; k < list->count; k++)
        chunks += norm_chunks(list->numel[k]);
    return chunks;
}

/* Stores the results over all tensors. Uses hr_store(), which makes all NaNs equal, because
 * instruction sets differ in which of two NaNs a sum keeps. */
HR_INLINE void norm_store(const hr_unscale_norm_result *result,
                          const hr_unscale_norm_config *config, norm_order order, double total,
                          int64_t culprit)
{
    const double norm = norm_of(total, order, config->p);
    if (result->norm)
        hr_store(result->norm, 0, (float)norm, HR_F32);
    if (result->culprit)
        *result->culprit = culprit;
    if (result->found_inf && culprit >= 0)
        *result->found_inf = 1.0f;
    if (result->clip_coef) {
        const double coef = config->max_norm / (norm + 1e-6);
        hr_store(result->clip_coef, 0, coef < 1.0 || coef != coef ? (float)coef : 1.0f, HR_F32);
    }
}

#ifdef __cplusplus
extern "C" {
#endif

hr_status unscale_norm_cpu(const unscale_norm_args *args);
hr_status unscale_norm_cuda(const unscale_norm_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
