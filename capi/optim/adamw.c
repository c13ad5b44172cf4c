/* adamw.c: hr_adamw: checks, then the kernel of the device. */
#include "kernels/optim/adamw.h"

#include <inttypes.h>

#include "capi/check/adamw_checks.h"
#include "capi/check/step.h"
#include "capi/check/weights_checks.h"

static hr_status check_lists(const adamw_args *a)
{
    HR_REQUIRE(a->params, "hr_adamw: params is NULL");
    const int64_t count = a->params->count;
    HR_TRY(hr_check_list("hr_adamw", "params", a->params, count, NULL, HR_FLOATS));
    const int64_t *const numel = a->params->numel;
    HR_TRY(hr_check_list("hr_adamw", "exp_avgs", a->exp_avgs, count, numel, HR_FLOATS));
    HR_TRY(hr_check_list("hr_adamw", "exp_avg_sqs", a->exp_avg_sqs, count, numel, HR_FLOATS));
    HR_TRY(hr_check_list("hr_adamw", "grads", a->grads, count, numel, HR_FLOATS));
    HR_REQUIRE(!a->config->amsgrad == !a->max_exp_avg_sqs,
               "hr_adamw: config->amsgrad is %d, but max_exp_avg_sqs is %s", a->config->amsgrad,
               a->max_exp_avg_sqs ? "given" : "NULL");
    if (a->max_exp_avg_sqs)
        HR_TRY(hr_check_list("hr_adamw", "max_exp_avg_sqs", a->max_exp_avg_sqs, count, numel,
                             HR_FLOATS));
    HR_TRY(step_check_steps("hr_adamw", a->steps, count));
    HR_TRY(weights_check("hr_adamw", a->config->step.weights, a->params));
    for (int64_t k = 0; k < count; k++) {
        const hr_dtype state = a->exp_avgs->dtype[k];
        HR_REQUIRE(a->exp_avg_sqs->dtype[k] == state,
                   "hr_adamw: exp_avg_sqs[%" PRId64 "] has another dtype than exp_avgs", k);
        HR_REQUIRE(!a->max_exp_avg_sqs || a->max_exp_avg_sqs->dtype[k] == state,
                   "hr_adamw: max_exp_avg_sqs[%" PRId64 "] has another dtype than exp_avgs", k);
    }
    return HR_OK;
}

hr_status hr_adamw(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                   const hr_tensor_list *exp_avg_sqs, const hr_tensor_list *max_exp_avg_sqs,
                   const hr_tensor_list *steps, const hr_tensor_list *grads,
                   const hr_adamw_config *config, const hr_exec *exec)
{
    hr_adamw_config own = HR_ADAMW_CONFIG_INIT;
    hr_weights own_weights = HR_WEIGHTS_INIT;
    const adamw_args args = {params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, grads, &own};
    HR_REQUIRE(config, "hr_adamw: config is NULL");
    HR_TRY(adamw_check_config("hr_adamw", "config->", &own, config, steps != NULL));
    HR_TRY(weights_copy("hr_adamw", &own_weights, &own.step.weights));
    HR_TRY(hr_check_exec("hr_adamw", exec));
    HR_TRY(check_lists(&args));
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_values("hr_adamw", &own.step, steps));
        return adamw_cpu(&args);
    }
    HR_RETURN_CUDA(adamw_cuda(&args, exec), exec);
}
