/*
 * newton_schulz.h: what orthogonalization needs besides products: matrices scaled by their norms, a
 * multiple of the identity that is added, and on the CPU halves of symmetric products. The iteration
 * is documented at hr_newton_schulz in headroom.h.
 */
#ifndef HR_NEWTON_SCHULZ_H
#define HR_NEWTON_SCHULZ_H

#include <math.h>

#include "kernels/core/dtype.h"

/* What a matrix is multiplied by, from the sum of its squares. A NaN stays one. */
HR_INLINE float newton_schulz_factor(float squares, double eps)
{
    const double norm = sqrt((double)squares);
    return (float)(1.0 / (norm < eps ? eps : norm));
}

/* out = in * factor, for a batch of matrices of `numel` elements. They may be the same. */
typedef struct newton_schulz_scale {
    void *out;
    const void *in;
    const float *squares; /* [batch] */
    int64_t batch, numel;
    double eps;
    hr_dtype dtype;
} newton_schulz_scale;

/* out = in + a I, for a batch of matrices [m, m]. */
typedef struct newton_schulz_shift {
    void *out;
    const void *in;
    int64_t batch, m;
    float a;
    hr_dtype dtype;
} newton_schulz_shift;

/* Copies what is below the diagonal of symmetric matrices [m, m] to above it, but for the blocks of
 * [block, block] elements on it. */
typedef struct newton_schulz_mirror {
    void *x;
    int64_t batch, m, block;
    hr_dtype dtype;
} newton_schulz_mirror;

#ifdef __cplusplus
extern "C" {
#endif

hr_status newton_schulz_scale_cpu(const newton_schulz_scale *args);
hr_status newton_schulz_scale_cuda(const newton_schulz_scale *args, const hr_exec *exec);
hr_status newton_schulz_shift_cpu(const newton_schulz_shift *args);
hr_status newton_schulz_shift_cuda(const newton_schulz_shift *args, const hr_exec *exec);
hr_status newton_schulz_mirror_cpu(const newton_schulz_mirror *args);

#ifdef __cplusplus
}
#endif

#endif
