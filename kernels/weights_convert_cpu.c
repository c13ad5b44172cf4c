/*
 * weights_convert_cpu.c: the loop over the list.
 */
#include "weights_convert.h"
#include "weights_cpu.h"

static void weights_convert_range(void *context, int64_t begin, int64_t end)
{
    const weights_args *const a = (const weights_args *)context;
    CPU_FOR_EACH_TENSOR(a->params, begin, end, k, from, to)
    {
        const weights_tensor weights = weights_of(a->weights, a->params, k, 0.0);
        float *const values = (float *)a->values->data[k];
        for (int64_t i = from; i < to; i += WEIGHTS_TILE) {
            const int count = to - i < WEIGHTS_TILE ? (int)(to - i) : WEIGHTS_TILE;
            if (a->split)
                weights_store(&weights, i, count, values + i, NULL);
            else
                weights_load(&weights, i, count, values + i);
        }
    }
}

hr_status weights_convert_cpu(const weights_args *args)
{
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, weights_convert_range, (void *)args);
    return HR_OK;
}
