/*
 * adamw_cpu.c: the loop. One parallel region covers the elements of the whole list, so ten thousand
 * small tensors cost no more hand-overs than one large one.
 */
#include "adamw.h"
#include "cpu.h"

/* With constant dtypes, amsgrad and skip this is one vector loop without branches. */
HR_INLINE void adamw_few(adamw_constants c, void *restrict param, const void *restrict grad,
                         void *restrict exp_avg, void *restrict exp_avg_sq,
                         void *restrict max_exp_avg_sq, int64_t begin, int64_t end,
                         hr_dtype param_dtype, hr_dtype grad_dtype, hr_dtype state_dtype,
                         int amsgrad, int skip)
{
    for (int64_t i = begin; i < end; i++) {
        adamw_values x = {
            hr_load(param, i, param_dtype),
            hr_load(grad, i, grad_dtype),
            hr_load(exp_avg, i, state_dtype),
            hr_load(exp_avg_sq, i, state_dtype),
            amsgrad ? hr_load(max_exp_avg_sq, i, state_dtype) : 0.0f,
        };
        x = adamw_update(c, x, amsgrad, skip);
        hr_store(param, i, x.param, param_dtype);
        hr_store(exp_avg, i, x.exp_avg, state_dtype);
        hr_store(exp_avg_sq, i, x.exp_avg_sq, state_dtype);
        if (amsgrad)
            hr_store(max_exp_avg_sq, i, x.max_exp_avg_sq, state_dtype);
    }
}

HR_INLINE void adamw_run(adamw_constants c, void *restrict param, const void *restrict grad,
                         void *restrict exp_avg, void *restrict exp_avg_sq,
                         void *restrict max_exp_avg_sq, int64_t begin, int64_t end,
                         hr_dtype param_dtype, hr_dtype grad_dtype, hr_dtype state_dtype,
                         int amsgrad)
{
    int64_t i = begin;
    for (; end - i >= CPU_STEP; i += CPU_STEP) {
        cpu_prefetch(param, i, CPU_STEP, end, param_dtype);
        cpu_prefetch(grad, i, CPU_STEP, end, grad_dtype);
        cpu_prefetch(exp_avg, i, CPU_STEP, end, state_dtype);
        cpu_prefetch(exp_avg_sq, i, CPU_STEP, end, state_dtype);
        if (amsgrad)
            cpu_prefetch(max_exp_avg_sq, i, CPU_STEP, end, state_dtype);
        adamw_few(c, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, i, i + CPU_STEP, param_dtype,
                  grad_dtype, state_dtype, amsgrad, 0);
    }
    adamw_few(c, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, i, end, param_dtype, grad_dtype,
              state_dtype, amsgrad, 0);
}

HR_INLINE void adamw_tensor(const adamw_args *a, adamw_constants c, int64_t k, int64_t begin,
                            int64_t end)
{
    void *const param = a->params->data[k];
    const void *const grad = a->grads->data[k];
    void *const exp_avg = a->exp_avgs->data[k];
    void *const exp_avg_sq = a->exp_avg_sqs->data[k];
    void *const max_exp_avg_sq = a->max_exp_avg_sqs ? a->max_exp_avg_sqs->data[k] : NULL;
    if (a->config->skip_nonfinite) { /* asked for seldom, so not compiled for every mix */
        adamw_few(c, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, begin, end,
                  a->params->dtype[k], a->grads->dtype[k], a->exp_avgs->dtype[k],
                  max_exp_avg_sq != NULL, 1);
        return;
    }
    FOR_DTYPE(
        a->params->dtype[k], P,
        FOR_DTYPE(a->grads->dtype[k], G,
                  FOR_DTYPE(a->exp_avgs->dtype[k], S,
                            if (max_exp_avg_sq) adamw_run(c, param, grad, exp_avg, exp_avg_sq,
                                                          max_exp_avg_sq, begin, end, P, G, S, 1);
                            else adamw_run(c, param, grad, exp_avg, exp_avg_sq, NULL, begin, end, P,
                                           G, S, 0))))
}

/* The elements [begin, end) of the list laid end to end. */
HR_INLINE void adamw_range(void *context, int64_t begin, int64_t end)
{
    const adamw_args *a = (const adamw_args *)context;
    adamw_constants constants = {0};
    double folded_for = NAN; /* equal to no step */
    CPU_FOR_EACH_TENSOR(a->params, begin, end, k, from, to)
    {
        const double t = a->steps ? hr_load_scalar(a->steps->data[k], a->steps->dtype[k]) + 1.0
                                  : (double)a->config->step;
        if (t != folded_for)
            constants = adamw_fold(a->config, t);
        folded_for = t;
        adamw_tensor(a, constants, k, from, to);
    }
}

CPU_VARIANTS(adamw_range)

hr_status adamw_cpu(const adamw_args *args)
{
    if (args->config->found_inf && *args->config->found_inf != 0.0f)
        return HR_OK;
    hr_parallel_for(0, cpu_total(args->params), CPU_GRAIN, CPU_BEST(adamw_range), (void *)args);
    for (int64_t k = 0; args->steps && k < args->steps->count; k++) {
        void *const step = args->steps->data[k];
        const hr_dtype dtype = args->steps->dtype[k];
        hr_store_scalar(step, hr_load_scalar(step, dtype) + 1.0, dtype);
    }
    return HR_OK;
}
