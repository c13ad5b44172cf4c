/* accumulate_cpu.c: the loop. */
#include "kernels/grad/accumulate.h"
#include "kernels/core/cpu.h"

HR_INLINE void accumulate_fetch(const float *sum, const float *lost, const void *grad, int64_t i,
                                int64_t end, hr_dtype dtype)
{
    cpu_prefetch(sum, i, CPU_STEP, end, HR_F32);
    if (lost)
        cpu_prefetch(lost, i, CPU_STEP, end, HR_F32);
    cpu_prefetch(grad, i, CPU_STEP, end, dtype);
}

HR_INLINE void accumulate_run(float *restrict sum, float *restrict lost, void *restrict grad,
                              int64_t begin, int64_t end, float factor, hr_dtype dtype,
                              int compensated, int zero_grads)
{
    /* A core that only adds looks ahead by itself. */
    const int fetches = dtype != HR_F32 || compensated;
    CPU_IN_STEPS(
        begin, end, from, to,
        if (fetches) accumulate_fetch(sum, compensated ? lost : NULL, grad, from, end, dtype),
        for (int64_t i = from; i < to; i++)
            accumulate_element(sum, lost, grad, i, factor, dtype, compensated, zero_grads));
}

HR_INLINE void accumulate_tensor(const accumulate_args *args, int64_t k, int64_t begin, int64_t end)
{
    float *const sum = (float *)args->sums->data[k];
    float *const lost = args->compensations ? (float *)args->compensations->data[k] : NULL;
    void *const grad = args->grads->data[k];
    const float factor = accumulate_factor(args->config);
    FOR_DTYPE(args->grads->dtype[k], D,
              FOR_FLAG(lost, C,
                       FOR_FLAG(args->config->zero_grads, Z,
                                accumulate_run(sum, lost, grad, begin, end, factor, D, C, Z))))
}

CPU_LIST_OP(accumulate, grads)
