/*
 * norm.h: the formulas of a normalized row, and how its gradients are grouped: see hr_norm_forward
 * and hr_norm_backward in headroom.h.
 *
 * RMS and layer norms share every formula. For an RMS norm the mean is 0 and the mean of g is left
 * out as 0: subtracting 0 changes no bits. An absent bias is -0, the number whose addition changes
 * none.
 */
#ifndef HR_NORM_H
#define HR_NORM_H

#include <math.h>

#include "kernels/core/dtype.h"

/* Rounds to a type of elements and back. */
HR_INLINE float norm_rounded(float x, hr_dtype dtype)
{
    return dtype == HR_F32 ? x : hr_from_half(hr_to_half(x, dtype), dtype);
}

/* From the sum of squares of a row to rstd. */
HR_INLINE float norm_rstd(double squares, int64_t cols, float eps)
{
    const float variance = (float)(squares / (double)cols);
    return 1.0f / sqrtf(variance + eps);
}

/* The same from a sum that is binary32. The quotient by a divisor that binary32 has is the same,
 * rounded once or twice (Figueroa 1995), and far quicker on a GPU. */
HR_INLINE float norm_rstd_f32(float squares, int64_t cols, float eps)
{
    if (cols > 1 << 24)
        return norm_rstd((double)squares, cols, eps);
    return 1.0f / sqrtf(squares / (float)cols + eps);
}

/* What the row is multiplied by. Saved rstd stays as it was computed. */
HR_INLINE float norm_factor(float rstd, hr_norm_casting casting, hr_dtype dtype)
{
    return casting == HR_NORM_NARROW ? norm_rounded(rstd, dtype) : rstd;
}

/* Whether the normed value is rounded to the type of the rows. */
HR_INLINE int norm_rounds(const hr_norm_config *config)
{
    return config->casting != HR_NORM_ONCE && config->dtype != HR_F32;
}

/* `factor` from norm_factor; `round`: the casting rounds the normed value. */
HR_INLINE float norm_hat(float x, float mean, float factor, int round, hr_dtype dtype)
{
    const float hat = (x - mean) * factor;
    return round ? norm_rounded(hat, dtype) : hat;
}

HR_INLINE float norm_y(float hat, float weight, float bias)
{
    return hat * weight + bias;
}

/* The gradient of one element before what reached the sum is added. Its hat, and that of the mean of
 * g * hat, is (x - mean) * rstd without any rounding, as in autograd of the model's own code: a row
 * whose gradient cancels would else be left with what rounding took off g. */
HR_INLINE float norm_dx(float g, float hat, float rstd, float mean_g_hat, float mean_g)
{
    return rstd * (g - hat * mean_g_hat - mean_g);
}

/* An absent bias. */
#define NORM_NO_BIAS (-0.0f)

/* The rows are cut into at most NORM_GROUPS groups of equal size. Each leaves its sums of dweight,
 * and of dbias for a layer norm, in the workspace: f32 [groups][1 or 2][cols]. */
#define NORM_GROUPS     256
#define NORM_LEAST_ROWS 8 /* of a group: the sums take less memory than the rows */

HR_INLINE int64_t norm_group_rows(int64_t rows)
{
    const int64_t even = (rows + NORM_GROUPS - 1) / NORM_GROUPS;
    return even < NORM_LEAST_ROWS ? NORM_LEAST_ROWS : even;
}

HR_INLINE int64_t norm_groups(int64_t rows)
{
    const int64_t size = norm_group_rows(rows);
    return (rows + size - 1) / size;
}

/* How many sums each group leaves per column. */
HR_INLINE int norm_sums(hr_norm_kind kind)
{
    return kind == HR_NORM_LAYER ? 2 : 1;
}

typedef struct norm_args {
    hr_rows y, sum, x, residual; /* NULL data where absent, here and below */
    hr_rows dx, dy, dsum;
    void *dweight, *dbias;
    const void *weight, *bias;
    float *mean, *rstd;
    int64_t rows, cols;
    hr_norm_config config;
    float *partials; /* the workspace; NULL without dweight and dbias */
} norm_args;

#ifdef __cplusplus
extern "C" {
#endif
hr_status norm_forward_cpu(const norm_args *args);
hr_status norm_backward_cpu(const norm_args *args);
hr_status norm_forward_cuda(const norm_args *args, const hr_exec *exec);
hr_status norm_backward_cuda(const norm_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
