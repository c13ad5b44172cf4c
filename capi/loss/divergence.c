/* divergence.c: hr_divergence_forward and _backward: checks, then the kernel of the device. */
#include "kernels/loss/divergence.h"

#include "capi/check/rows.h"

/* The least beta between 0 and 1, and the least distance from 1: 1 - beta is exact to 1e-10. */
#define LEAST_BETA 1e-6

static hr_status check_config(const char *function, hr_divergence_config *own,
                              const hr_divergence_config *config)
{
    HR_REQUIRE(config, "%s: config is NULL", function);
    HR_TRY(hr_copy_config(function, "config->", own, sizeof *own, config,
                          offsetof(hr_divergence_config, temperature) + sizeof own->temperature,
                          "HR_DIVERGENCE_CONFIG_INIT"));
    HR_TRY(hr_check_logit_dtypes(function, own->dtype, own->grad_dtype));
    HR_REQUIRE(own->beta == 0 || own->beta == 1 ||
                   (own->beta >= LEAST_BETA && own->beta <= 1 - LEAST_BETA),
               "%s: config->beta is %g, wanted 0, 1, or a number from %g to 1 - %g", function,
               own->beta, LEAST_BETA, LEAST_BETA);
    HR_REQUIRE(own->temperature >= HR_LEAST_TEMPERATURE &&
                   own->temperature <= 1 / HR_LEAST_TEMPERATURE,
               "%s: config->temperature is %g, wanted a number from %g to %g", function,
               own->temperature, HR_LEAST_TEMPERATURE, 1 / HR_LEAST_TEMPERATURE);
    return HR_OK;
}

/* The arguments that both functions have. */
static hr_status check_common(const char *function, divergence_args *a, const hr_rows *student,
                              const hr_rows *teacher, const hr_divergence_config *config,
                              const hr_exec *exec)
{
    HR_TRY(hr_check_sizes(function, a->rows, a->classes));
    HR_TRY(check_config(function, &a->config, config));
    HR_TRY(hr_check_exec(function, exec));
    const hr_dtype dtype = a->config.dtype;
    HR_TRY(hr_check_logits(function, "student", student, a->rows, a->classes, dtype));
    HR_TRY(hr_check_logits(function, "teacher", teacher, a->rows, a->classes, dtype));
    a->student = *student;
    a->teacher = *teacher;
    return HR_OK;
}

hr_status hr_divergence_forward(float *loss, float *statistics, const hr_rows *student,
                                const hr_rows *teacher, const uint8_t *ignored, int64_t rows,
                                int64_t classes, const hr_divergence_config *config,
                                const hr_exec *exec)
{
    static const char function[] = "hr_divergence_forward";
    divergence_args args = {.ignored = ignored,
                            .loss = loss,
                            .statistics = statistics,
                            .rows = rows,
                            .classes = classes,
                            .config = HR_DIVERGENCE_CONFIG_INIT};
    HR_TRY(check_common(function, &args, student, teacher, config, exec));
    HR_TRY(hr_check_given(function, "loss", loss, rows));
    HR_TRY(hr_check_vector(function, "statistics", statistics, HR_F32));
    if (exec->device == HR_CPU)
        return divergence_forward_cpu(&args);
    HR_RETURN_CUDA(divergence_forward_cuda(&args, exec), exec);
}

hr_status hr_divergence_backward(const hr_rows *grad, const float *dloss, int64_t dloss_stride,
                                 const hr_rows *student, const hr_rows *teacher,
                                 const uint8_t *ignored, const float *statistics, int64_t rows,
                                 int64_t classes, const hr_divergence_config *config,
                                 const hr_exec *exec)
{
    static const char function[] = "hr_divergence_backward";
    divergence_args args = {.ignored = ignored,
                            .statistics = (float *)(uintptr_t)statistics,
                            .dloss = dloss,
                            .dloss_stride = dloss_stride,
                            .rows = rows,
                            .classes = classes,
                            .config = HR_DIVERGENCE_CONFIG_INIT};
    HR_TRY(check_common(function, &args, student, teacher, config, exec));
    HR_TRY(hr_check_logit_grad(function, grad, args.config.grad_dtype, "student", student,
                               args.config.dtype, rows, classes));
    args.grad = *grad;
    HR_TRY(hr_check_dloss(function, dloss, dloss_stride, rows));
    HR_TRY(hr_check_given(function, "statistics", statistics, rows));
    if (exec->device == HR_CPU)
        return divergence_backward_cpu(&args);
    HR_RETURN_CUDA(divergence_backward_cuda(&args, exec), exec);
}
