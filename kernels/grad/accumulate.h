/*
 * accumulate.h: gradients added to binary32 buffers, plainly or with compensation (Kahan, Further
 * remarks on reducing truncation errors, Communications of the ACM 8(1), 1965).
 */
#ifndef HR_ACCUMULATE_H
#define HR_ACCUMULATE_H

#include "kernels/core/dtype.h"

/* The new sum. `compensated` is a constant; without it nothing is read or written at `lost`. */
HR_INLINE float accumulate_sum(float sum, float x, float *lost, int compensated)
{
    const float y = compensated ? x - *lost : x;
    const float t = sum + y;
    if (compensated)
        *lost = (t - sum) - y;
    return t;
}

/* Element i. Written with constants from `dtype` on. */
HR_INLINE void accumulate_element(float *sum, float *lost, void *grad, int64_t i, float factor,
                                  hr_dtype dtype, int compensated, int zero_grads)
{
    const float x = hr_load(grad, i, dtype) * factor;
    float rest = compensated ? lost[i] : 0.0f;
    hr_store(sum, i, accumulate_sum(sum[i], x, &rest, compensated), HR_F32);
    if (compensated)
        hr_store(lost, i, rest, HR_F32);
    if (zero_grads)
        hr_store(grad, i, 0.0f, dtype);
}

HR_INLINE float accumulate_factor(const hr_accumulate_config *config)
{
    return config->factor_ptr ? *config->factor_ptr : (float)config->factor;
}

typedef struct accumulate_args {
    const hr_tensor_list *sums;
    const hr_tensor_list *compensations; /* NULL: plain */
    const hr_tensor_list *grads;
    const hr_accumulate_config *config;
} accumulate_args;

#ifdef __cplusplus
extern "C" {
#endif

hr_status accumulate_cpu(const accumulate_args *args);
hr_status accumulate_cuda(const accumulate_args *args, const hr_exec *exec);

#ifdef __cplusplus
}
#endif

#endif
