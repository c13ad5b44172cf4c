/* newton_schulz_cpu.c: the loops of orthogonalization that are not products. */
#include "kernels/core/halves_cpu.h"
#include "kernels/optim/newton_schulz.h"

#define TILE 512 /* elements */

HR_INLINE void scale_range(void *context, int64_t begin, int64_t end, half_conversions halves)
{
    const newton_schulz_scale *const a = (const newton_schulz_scale *)context;
    for (int64_t i = begin, to; i < end; i = to) {
        const int64_t index = i / a->numel, stop = (index + 1) * a->numel;
        to = stop < end ? stop : end;
        const float factor = newton_schulz_factor(a->squares[index], a->eps);
        for (int64_t j = i; j < to; j += TILE) {
            _Alignas(64) float x[TILE];
            const int count = to - j < TILE ? (int)(to - j) : TILE;
            halves_to_tile(a->in, j, count, a->dtype, x, halves);
            for (int e = 0; e < count; e++)
                hr_store(x, e, x[e] * factor, HR_F32);
            halves_from_tile(a->out, j, count, a->dtype, x, halves);
        }
    }
}

CPU_HALVES_VARIANTS(scale_range)

hr_status newton_schulz_scale_cpu(const newton_schulz_scale *args)
{
    hr_parallel_for(0, args->batch * args->numel, CPU_GRAIN, CPU_BEST(scale_range), (void *)args);
    return HR_OK;
}

/* Over the rows of all matrices. */
static void shift_range(void *context, int64_t begin, int64_t end)
{
    const newton_schulz_shift *const a = (const newton_schulz_shift *)context;
    const int64_t element = hr_element_size(a->dtype);
    for (int64_t row = begin; row < end; row++) {
        const int64_t i = row * a->m + row % a->m;
        memcpy((char *)a->out + row * a->m * element, (const char *)a->in + row * a->m * element,
               (size_t)(a->m * element));
        hr_store(a->out, i, hr_load(a->in, i, a->dtype) + a->a, a->dtype);
    }
}

hr_status newton_schulz_shift_cpu(const newton_schulz_shift *args)
{
    hr_parallel_for(0, args->batch * args->m, CPU_GRAIN / args->m + 1, shift_range, (void *)args);
    return HR_OK;
}
