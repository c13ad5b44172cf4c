/* accumulate_cpu.c: the loop, one parallel region for the whole list. */
#include "kernels/grad/accumulate.h"
#include "kernels/core/cpu.h"

HR_INLINE void accumulate_few(float *restrict sum, float *restrict lost, void *restrict grad,
                              int64_t begin, int64_t end, float factor, hr_dtype dtype,
                              int compensated, int zero_grads)
{
    for (int64_t i = begin; i < end; i++) {
        const float x = hr_load(grad, i, dtype) * factor;
        float total;
        if (compensated) {
            float rest = lost[i];
            total = accumulate_compensated(sum[i], x, &rest);
            hr_store(lost, i, rest, HR_F32);
        } else {
            total = accumulate_plain(sum[i], x);
        }
        hr_store(sum, i, total, HR_F32);
        if (zero_grads)
            hr_store(grad, i, 0.0f, dtype);
    }
}

HR_INLINE void accumulate_run(float *restrict sum, float *restrict lost, void *restrict grad,
                              int64_t begin, int64_t end, float factor, hr_dtype dtype,
                              int compensated, int zero_grads)
{
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        cpu_prefetch(sum, i, CPU_STEP, end, HR_F32);
        if (compensated)
            cpu_prefetch(lost, i, CPU_STEP, end, HR_F32);
        cpu_prefetch(grad, i, CPU_STEP, end, dtype);
        accumulate_few(sum, lost, grad, i, i + CPU_STEP, factor, dtype, compensated, zero_grads);
    }
    accumulate_few(sum, lost, grad, i, end, factor, dtype, compensated, zero_grads);
}

#define RUN(dtype, compensated, zero) \
    accumulate_run(sum, lost, grad, begin, end, factor, dtype, compensated, zero)
#define RUN_ZERO(dtype, compensated) \
    (zero_grads ? RUN(dtype, compensated, 1) : RUN(dtype, compensated, 0))
#define RUN_COMPENSATED(dtype) (lost ? RUN_ZERO(dtype, 1) : RUN_ZERO(dtype, 0))

HR_INLINE void accumulate_tensor(const accumulate_args *a, int64_t k, int64_t begin, int64_t end)
{
    float *const sum = (float *)a->sums->data[k];
    float *const lost = a->losts ? (float *)a->losts->data[k] : NULL;
    void *const grad = a->grads->data[k];
    const int zero_grads = a->config->zero_grads;
    const float factor = accumulate_factor(a->config);
    FOR_DTYPE(a->grads->dtype[k], D, RUN_COMPENSATED(D))
}

HR_INLINE void accumulate_range(void *context, int64_t begin, int64_t end)
{
    const accumulate_args *a = (const accumulate_args *)context;
    CPU_FOR_EACH_TENSOR(a->grads, begin, end, k, from, to)
    {
        accumulate_tensor(a, k, from, to);
    }
}

CPU_VARIANTS(accumulate_range)

hr_status accumulate_cpu(const accumulate_args *args)
{
    hr_parallel_for(0, cpu_total(args->grads), CPU_GRAIN, CPU_BEST(accumulate_range), (void *)args);
    return HR_OK;
}
