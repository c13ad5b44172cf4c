/*
 * unscale_norm_cpu.c: the CPU loop of hr_unscale_norm. A chunk is added in LANES interleaved sums,
 * whatever the width of a vector, so every instruction set adds in the same order.
 */
#include "kernels/core/halves_cpu.h"
#include "kernels/grad/unscale_norm.h"

#define LANES 32
#define TILE  256 /* elements that are converted before they are added */

/* Adds the terms of `count` elements to the sums. */
HR_INLINE void norm_add(double *restrict sums, const float *restrict x, int count, double p,
                        norm_order order)
{
    for (int lane = 0; lane < count; lane++)
        sums[lane] = norm_combine(sums[lane], norm_term(x[lane], order, p), order);
}

/* The sum of a chunk, from its interleaved sums. */
HR_INLINE double norm_total(double *sums, norm_order order)
{
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; lane++)
            sums[lane] = norm_combine(sums[lane], sums[lane + width], order);
    return sums[0];
}

/* Unscales `count` elements to x. This is a loop of its own because a compiler does not vectorize
 * the rounding to 16 bits in a loop that also adds in binary64. */
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
    FOR_F32_OR_BF16(dtype, D, if (write) unscale_few_as(grad, begin, count, factor, D, 1, x);
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
        norm_add(sums, x, LANES, p, order);
    }
    unscale_few(grad, i, (int)(end - i), factor, dtype, write, x);
    for (int lane = 0; lane < end - i; lane++)
        sums[0] = norm_combine(sums[0], norm_term(x[lane], order, p), order);
    return norm_total(sums, order);
}

/* Unscales `count` elements of f16 to x. */
HR_INLINE void unscale_tile(uint16_t *restrict grad, int count, float factor, int write,
                            float *restrict x, half_conversions halves)
{
    cpu_prefetch(grad, 0, count, count + TILE * 4, HR_F16);
    f16_load(x, grad, count, halves);
    for (int lane = 0; lane < count; lane++)
        hr_store(x, lane, x[lane] * factor, HR_F32);
    if (write)
        f16_store(grad, x, count, halves);
}

HR_INLINE double unscale_f16(uint16_t *restrict grad, int64_t begin, int64_t end, float factor,
                             double p, norm_order order, int write, half_conversions halves)
{
    double sums[LANES] = {0};
    float x[TILE];
    for (int64_t i = begin; i < end; i += TILE) {
        const int count = end - i < TILE ? (int)(end - i) : TILE;
        unscale_tile(grad + i, count, factor, write, x, halves);
        int j = 0;
        for (; count - j >= LANES; j += LANES)
            norm_add(sums, x + j, LANES, p, order);
        for (; j < count; j++)
            sums[0] = norm_combine(sums[0], norm_term(x[j], order, p), order);
    }
    return norm_total(sums, order);
}

/* Raises the largest magnitude of each lane. */
HR_INLINE void norm_raise(uint32_t *restrict largest, const float *restrict x)
{
    for (int lane = 0; lane < LANES; lane++) {
        const uint32_t magnitude = hr_bits(x[lane]) & 0x7FFFFFFFu;
        largest[lane] = magnitude > largest[lane] ? magnitude : largest[lane];
    }
}

HR_INLINE double norm_largest(uint32_t *largest)
{
    for (int lane = 1; lane < LANES; lane++)
        largest[0] = largest[lane] > largest[0] ? largest[lane] : largest[0];
    return (double)hr_float(largest[0]);
}

/* The largest magnitude, as an integer that is above that of infinity for a NaN. */
HR_INLINE double unscale_largest(void *restrict grad, int64_t begin, int64_t end, float factor,
                                 hr_dtype dtype, int write)
{
    uint32_t largest[LANES] = {0};
    float x[TILE];
    for (int64_t i = begin; i < end; i += TILE) {
        const int count = end - i < TILE ? (int)(end - i) : TILE;
        if (dtype != HR_F32) /* with so little to do, a core looks ahead by itself */
            cpu_prefetch(grad, i, count, end, dtype);
        unscale_few(grad, i, count, factor, dtype, write, x);
        for (int j = count; j % LANES; j++)
            x[j] = 0.0f;
        for (int j = 0; j < count; j += LANES)
            norm_raise(largest, x + j);
    }
    return norm_largest(largest);
}

/* unscale_largest() of f16. Whether there is a NaN is known in the end, when each becomes the one
 * that hr_store() writes. A core that converts by single instructions needs no prefetches. */
HR_INLINE double unscale_largest_f16(uint16_t *restrict grad, int64_t begin, int64_t end,
                                     float factor, int write, half_conversions halves)
{
    uint32_t largest[LANES] = {0};
    float x[LANES] = {0};
    int64_t i = begin;
    for (; end - i >= LANES; i += LANES) {
        f16_load(x, grad + i, LANES, halves);
        for (int lane = 0; lane < LANES; lane++)
            x[lane] *= factor;
        norm_raise(largest, x);
        if (write)
            f16_store(grad + i, x, LANES, halves);
    }
    unscale_few_as(grad, i, (int)(end - i), factor, HR_F16, write, x);
    norm_raise(largest, x);
    const double result = norm_largest(largest);
    for (i = begin; write && result != result && i < end; i++)
        grad[i] = (grad[i] & 0x7FFFu) > 0x7C00u ? 0x7FFFu : grad[i];
    return result;
}

HR_INLINE void scale_chunk(void *restrict grad, int64_t begin, int64_t end, float factor,
                           hr_dtype dtype, half_conversions halves)
{
    float x[TILE];
    for (int64_t i = begin; dtype == HR_F16 && i < end; i += TILE)
        unscale_tile((uint16_t *)grad + i, end - i < TILE ? (int)(end - i) : TILE, factor, 1, x,
                     halves);
    for (int64_t i = begin; dtype != HR_F16 && i < end; i++)
        hr_store(grad, i, hr_load(grad, i, dtype) * factor, dtype);
}

HR_INLINE double unscale_dispatch(void *grad, int64_t begin, int64_t end, float factor, double p,
                                  hr_dtype dtype, norm_order order, int write,
                                  half_conversions halves)
{
#define UNSCALE_CASE(order)                                                                 \
    return dtype == HR_F16                                                                  \
               ? unscale_f16((uint16_t *)grad, begin, end, factor, p, order, write, halves) \
               : unscale_chunk(grad, begin, end, factor, p, dtype, order, write)
    switch (order) {
    case NORM_2:
        if (dtype == HR_F16)
            return unscale_f16((uint16_t *)grad, begin, end, factor, p, NORM_2, write, halves);
        FOR_F32_OR_BF16(dtype, D,
                        return write ? unscale_chunk(grad, begin, end, factor, p, D, NORM_2, 1)
                                     : unscale_chunk(grad, begin, end, factor, p, D, NORM_2, 0))
    case NORM_INF:
        if (dtype == HR_F16)
            return unscale_largest_f16((uint16_t *)grad, begin, end, factor, write, halves);
        FOR_F32_OR_BF16(dtype, D, return unscale_largest(grad, begin, end, factor, D, write))
    case NORM_1:
        UNSCALE_CASE(NORM_1);
    default:
        UNSCALE_CASE(NORM_P);
    }
#undef UNSCALE_CASE
}

HR_INLINE void scale_dispatch(void *grad, int64_t begin, int64_t end, float factor, hr_dtype dtype,
                              half_conversions halves){
    FOR_DTYPE(dtype, D, scale_chunk(grad, begin, end, factor, D, halves))}

/* Runs over the chunks whose first element is in [begin, end), with the tensors laid end to end. */
HR_INLINE void unscale_norm_range(void *context, int64_t begin, int64_t end,
                                  half_conversions halves)
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
                sums[c] = unscale_dispatch(grad, from, to, factor, a->config->p, dtype, a->order,
                                           write, halves);
            else
                scale_dispatch(grad, from, to, factor, dtype, halves);
        }
        if (sums)
            sums += norm_chunks(numel);
        first += numel;
    }
}

CPU_HALVES_VARIANTS(unscale_norm_range)

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
