/* rope.h: the formula of a rotated pair, and where the vectors of heads lie: see hr_rope in
 * headroom.h. Source: Su et al., arXiv:2104.09864. */
#ifndef HR_ROPE_H
#define HR_ROPE_H

#include "kernels/core/dtype.h"

HR_INLINE float rope_first(float first, float second, float cos, float sin)
{
    return first * cos - second * sin;
}

HR_INLINE float rope_second(float first, float second, float cos, float sin)
{
    return second * cos + first * sin;
}

/* What to rotate, and where to. */
typedef struct rope_part {
    hr_heads out, in; /* NULL data: without k */
    int64_t heads;
} rope_part;

typedef struct rope_args {
    rope_part q, k;
    hr_rows cos, sin, positions; /* NULL data: config.offset */
    int64_t batch, tokens, head_dim, table_rows;
    int64_t pairs; /* rotary_dim / 2 */
    hr_rope_config config;
} rope_args;

/* Which row of the tables a token takes; it may have none. */
HR_INLINE int64_t rope_position(const rope_args *a, int64_t batch, int64_t token)
{
    if (a->positions.data)
        return ((const int64_t *)a->positions.data)[batch * a->positions.stride + token];
    return a->config.offset + batch * a->config.batch_step + token;
}

/* The vector of a head. */
HR_INLINE void *rope_vector(const hr_heads *heads, int64_t batch, int64_t token, int64_t head,
                            hr_dtype dtype)
{
    const int64_t i =
        batch * heads->batch_stride + token * heads->token_stride + head * heads->head_stride;
    return (char *)heads->data + i * (dtype == HR_F32 ? 4 : 2);
}

#ifdef __cplusplus
extern "C" {
#endif
hr_status rope_cpu(const rope_args *args);
hr_status rope_cuda(const rope_args *args, const hr_exec *exec);
#ifdef __cplusplus
}
#endif

#endif
