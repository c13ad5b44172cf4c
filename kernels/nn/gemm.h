/*
 * gemm.h: matrix products and their epilogues: see hr_gemm in headroom.h.
 */
#ifndef HR_GEMM_H
#define HR_GEMM_H

#include "kernels/core/columns.h"
#include "kernels/core/math.h"

typedef struct gemm_args {
    hr_rows c, a, b;
    const void *bias; /* NULL where absent */
    int64_t m, n, k;  /* k is 0 if alpha is */
    hr_gemm_config config;
    void *workspace;
    size_t workspace_bytes;
} gemm_args;

/* Whether two matrices [m, n], of one row and column or more, certainly share memory. */
int gemm_overlap(const hr_rows *x, const hr_rows *y, int64_t m, int64_t n, hr_dtype dtype);

/* alpha * sum + beta * addend + bias. An absent bias is -0, the number whose addition changes none. */
#define GEMM_NO_BIAS (-0.0f)

HR_INLINE float gemm_value(float sum, float alpha, float beta, float c, float bias)
{
    const float product = alpha * sum;
    return (beta == 0.0f ? product : product + beta * c) + bias;
}

/* gelu(x), approximated by tanh, and its derivative. */
#define GEMM_GELU_SCALE 0.7978845608028654f /* sqrt(2 / pi) */
#define GEMM_GELU_CUBIC 0.044715f

HR_INLINE float gemm_gelu_tanh(float x)
{
    return hr_tanh(GEMM_GELU_SCALE * (x + GEMM_GELU_CUBIC * (x * x * x)));
}

HR_INLINE float gemm_gelu(float x)
{
    return 0.5f * x * (1.0f + gemm_gelu_tanh(x));
}

HR_INLINE float gemm_gelu_slope(float x)
{
    const float t = gemm_gelu_tanh(x);
    const float inner = GEMM_GELU_SCALE * (1.0f + 3.0f * GEMM_GELU_CUBIC * (x * x));
    return 0.5f * (1.0f + t) + 0.5f * x * ((1.0f - t) * (1.0f + t)) * inner;
}

/* The sums that the epilogue leaves in config.bias_gradient: of C, of op(A) or of op(B). */
HR_INLINE column_sums gemm_bias_gradient(const gemm_args *args)
{
    const hr_gemm_config *const config = &args->config;
    column_sums sums;
    memset(&sums, 0, sizeof sums);
    sums.dtype = config->dtype;
    sums.out_dtype = config->out_dtype;
    sums.out = config->bias_gradient;
    sums.factor = 1.0;
    sums.is_first = 1;
    if (config->epilogue == HR_GEMM_DGELU) {
        sums.x = args->c;
        sums.dtype = config->out_dtype;
        sums.rows = args->m;
        sums.cols = args->n;
    } else if (config->epilogue == HR_GEMM_BGRADA) {
        sums.x = args->a;
        sums.of_rows = !config->transpose_a;
        sums.rows = sums.of_rows ? args->m : args->k;
        sums.cols = sums.of_rows ? args->k : args->m;
    } else {
        sums.x = args->b;
        sums.of_rows = config->transpose_b;
        sums.rows = sums.of_rows ? args->n : args->k;
        sums.cols = sums.of_rows ? args->k : args->n;
    }
    return sums;
}

/* The workspace of products on a GPU: as much as PyTorch gives them. */
HR_INLINE size_t gemm_workspace_bytes(int capability)
{
    return (size_t)(capability >= 90 ? 32768 : 8320) << 10;
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status gemm_cpu(const gemm_args *args);
hr_status gemm_cuda(const gemm_args *args, const hr_exec *exec);
hr_status gemm_workspace_cpu(size_t *bytes);
hr_status gemm_workspace_cuda(size_t *bytes, const hr_exec *exec);
void gemm_lend(hr_gemm_fn gemm, void *context); /* NULL: none */
#ifdef __cplusplus
}
#endif

#endif
