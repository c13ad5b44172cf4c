/*
 * unscale_norm_cpu.c: the CPU loop of hr_unscale_norm. A chunk is added in LANES interleaved sums,
 * whatever the width of a vector, so every instruction set adds in the same order.
 */
#include "kernels/core/cpu.h"
#include "kernels/grad/unscale_norm.h"

#define LANES 32

/* Unscales `count` elements to x. This is a loop of its own because a compiler does not vectorize
 * the conversion to f16 in a loop that also adds in binary64. */
HR_INLINE void unscale_few_as(void *restrict grad, int64_t begin, int count, float factor,
                              hr_dtype dtype, int write, float *restrict x)
{
    for (int lane = 0; lane < count; lane++) {
        x[lane] = hr_load(grad, begin + lane, dtype) * factor;
        if (write)
            hr_store(grad, begin + lane, x[lane], dtype);
    }
}

/* Calls unscale_few_as() with constants; the choice costs nothing if dtype and write are
 * constants. */
HR_INLINE void unscale_few(void *restrict grad, int64_t begin, int count, float factor,
                           hr_dtype dtype, int write, float *restrict x)
{
    FOR_DTYPE(dtype, D, if (write) unscale_few_as(grad, begin, count, factor, D, 1, x);
              else unscale_few_as(grad, begin, count, factor, D, 0, x))
}

HR_INLINE double unscale_chunk(void *restrict grad, int64_t begin, int64_t end, float factor,
                               double p, hr_dtype dtype, norm_order order, int write)
{
    double sums[LANES] = {0};
    float x[LANES];
    int64_t i = begin;
    for (; end - i >= LANES; i += LANES) {
        cpu_prefetch(grad, i, LANES, end, dtype);
        unscale_few(grad, i, LANES, factor, dtype, write, x);
        for (int lane = 0; lane < LANES; lane++)
            sums[lane] = norm_combine(sums[lane], norm_term(x[lane], order, p), order);
    }
    unscale_few(grad, i, (int)(end - i), factor, dtype, write, x);
    for (int lane = 0; lane < end - i; lane++)
        sums[0] = norm_combine(sums[0], norm_term(x[lane], order, p), order);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] = norm_combine(sums[lane], sums[lane + width], order);
    return sums[0];
}

HR_INLINE void scale_chunk(void *restrict grad, int64_t begin, int64_t end, float factor,
                           hr_dtype dtype)
{
    for (int64_t i = begin; i < end; i++)
        hr_store(grad, i, hr_load(grad, i, dtype) * factor, dtype);
}

HR_INLINE double unscale_dispatch(void *grad, int64_t begin, int64_t end, float factor, double p,
                                  hr_dtype dtype, norm_order order, int write)
{
    switch (order) {
    case NORM_2:
        FOR_DTYPE(dtype, D,
                  return write ? unscale_chunk(grad, begin, end, factor, p, D, NORM_2, 1)
                               : unscale_chunk(grad, begin, end, factor, p, D, NORM_2, 0))
    case NORM_1:
        return unscale_chunk(grad, begin, end, factor, p, dtype, NORM_1, write);
    case NORM_INF:
        return unscale_chunk(grad, begin, end, factor, p, dtype, NORM_INF, write);
    default:
        return unscale_chunk(grad, begin, end, factor, p, dtype, NORM_P, write);
    }
}

HR_INLINE void scale_dispatch(void *grad, int64_t begin, int64_t end, float factor, hr_dtype dtype){
    FOR_DTYPE(dtype, D, scale_chunk(grad, begin, end, factor, D))}

/* Runs over the chunks whose first element is in [begin, end), with the tensors laid end to end. */
HR_INLINE void unscale_norm_range(void *context, int64_t begin, int64_t end)
{
    const unscale_norm_args *a = (const unscale_norm_args *)context;
    double *sums = (double *)a->workspace; /* of the chunks of tensor k */
    const float factor = unscale_factor(a->config);
    const int write = a->config->write && factor != 1.0f;
    if (!sums && !write)
        return;
    for (int64_t k = 0, first = 0; k < a->grads->count && first < end; k++) {
        void *const grad = a->grads->data[k];
        const hr_dtype dtype = a->grads->dtype[k];
        const int64_t numel = a->grads->numel[k];
        int64_t c = begin > first ? norm_chunks(begin - first) : 0;
        for (; c * NORM_CHUNK < numel && first + c * NORM_CHUNK < end; c++) {
            const int64_t from = c * NORM_CHUNK;
            const int64_t to = numel - from < NORM_CHUNK ? numel : from + NORM_CHUNK;
            if (sums)
                sums[c] =
                    unscale_dispatch(grad, from, to, factor, a->config->p, dtype, a->order, write);
            else
                scale_dispatch(grad, from, to, factor, dtype);
        }
        if (sums)
            sums += norm_chunks(numel);
        first += numel;
    }
}

CPU_VARIANTS(unscale_norm_range)

hr_status unscale_norm_cpu(const unscale_norm_args *args)
{
    const hr_tensor_list *const grads = args->grads;
    hr_parallel_for(0, cpu_total(grads), CPU_GRAIN, CPU_BEST(unscale_norm_range), (void *)args);
    if (!args->result)
        return HR_OK;
    const double *sums = (const double *)args->workspace;
    double total = 0.0;
    int64_t culprit = -1;
    for (int64_t k = 0; k < grads->count; k++) {
        const int64_t chunks = norm_chunks(grads->numel[k]);
        double sum = 0.0;
        for (int64_t c = 0; c < chunks; c++)
            sum = norm_combine(sum, *sums++, args->order);
        if (args->result->norms)
            hr_store(args->result->norms, k, (float)norm_of(sum, args->order, args->config->p),
                     HR_F32);
        if (culprit < 0 && !isfinite(sum))
            culprit = k;
        total = norm_combine(total, sum, args->order);
    }
    norm_store(args->result, args->config, args->order, total, culprit);
    return HR_OK;
}
