#include "adamw.h"

#include <inttypes.h>
#include <math.h>

#include "check.h"

static hr_status check_config(const hr_adamw_config *config, int has_steps)
{
    HR_REQUIRE(config, "hr_adamw: config is NULL");
    HR_REQUIRE(config->size == sizeof *config,
               "hr_adamw: config->size is %zu, wanted %zu; start from HR_ADAMW_CONFIG_INIT",
               config->size, sizeof *config);
    HR_REQUIRE(config->lr_ptr || (isfinite(config->lr) && config->lr >= 0),
               "hr_adamw: lr is %g, wanted a finite number >= 0", config->lr);
    HR_REQUIRE(config->beta1 >= 0 && config->beta1 < 1, "hr_adamw: beta1 is %g, wanted [0, 1)",
               config->beta1);
    HR_REQUIRE(config->beta2 >= 0 && config->beta2 < 1, "hr_adamw: beta2 is %g, wanted [0, 1)",
               config->beta2);
    HR_REQUIRE(isfinite(config->eps) && config->eps >= 0,
               "hr_adamw: eps is %g, wanted a finite number >= 0", config->eps);
    HR_REQUIRE(isfinite(config->weight_decay) && config->weight_decay >= 0,
               "hr_adamw: weight_decay is %g, wanted a finite number >= 0", config->weight_decay);
    HR_REQUIRE(has_steps || config->step >= 1,
               "hr_adamw: config->step is %" PRId64 ", wanted 1 or more", config->step);
    HR_TRY(hr_check_scalar("hr_adamw", "lr_ptr", config->lr_ptr, config->lr_dtype));
    HR_TRY(hr_check_scalar("hr_adamw", "grad_scale", config->grad_scale, HR_F32));
    HR_TRY(hr_check_scalar("hr_adamw", "found_inf", config->found_inf, HR_F32));
    return hr_check_scalar("hr_adamw", "clip_coef", config->clip_coef, HR_F32);
}

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
    if (a->steps)
        HR_TRY(hr_check_list("hr_adamw", "steps", a->steps, count, NULL, HR_SCALARS));
    for (int64_t k = 0; k < count; k++) {
        const hr_dtype state = a->exp_avgs->dtype[k];
        HR_REQUIRE(a->exp_avg_sqs->dtype[k] == state,
                   "hr_adamw: exp_avg_sqs[%" PRId64 "] has another dtype than exp_avgs", k);
        HR_REQUIRE(!a->max_exp_avg_sqs || a->max_exp_avg_sqs->dtype[k] == state,
                   "hr_adamw: max_exp_avg_sqs[%" PRId64 "] has another dtype than exp_avgs", k);
        HR_REQUIRE(!a->steps || a->steps->numel[k] == 1,
                   "hr_adamw: steps[%" PRId64 "] has numel %" PRId64 ", wanted 1", k,
                   a->steps ? a->steps->numel[k] : 0);
    }
    return HR_OK;
}

/* What lies in host memory can be looked at too. */
static hr_status check_values(const adamw_args *a)
{
    const hr_adamw_config *const config = a->config;
    for (int64_t k = 0; a->steps && k < a->steps->count; k++) {
        const double step = hr_load_scalar(a->steps->data[k], a->steps->dtype[k]);
        HR_REQUIRE(step >= 0 && step < 9007199254740992.0,
                   "hr_adamw: steps[%" PRId64 "] holds %g, wanted 0 or more and below 2^53", k,
                   step);
    }
    if (config->lr_ptr) {
        const double lr = hr_load_scalar(config->lr_ptr, config->lr_dtype);
        HR_REQUIRE(isfinite(lr) && lr >= 0, "hr_adamw: *lr_ptr is %g, wanted a finite number >= 0",
                   lr);
    }
    HR_REQUIRE(!config->grad_scale || (isfinite(*config->grad_scale) && *config->grad_scale > 0),
               "hr_adamw: *grad_scale is %g, wanted a finite number > 0",
               config->grad_scale ? (double)*config->grad_scale : 0.0);
    return HR_OK;
}

hr_status hr_adamw(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                   const hr_tensor_list *exp_avg_sqs, const hr_tensor_list *max_exp_avg_sqs,
                   const hr_tensor_list *steps, const hr_tensor_list *grads,
                   const hr_adamw_config *config, const hr_exec *exec)
{
    const adamw_args args = {params, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, grads, config};
    HR_TRY(check_config(config, steps != NULL));
    HR_TRY(hr_check_exec("hr_adamw", exec));
    HR_TRY(check_lists(&args));
    if (exec->device == HR_CPU) {
        HR_TRY(check_values(&args));
        return adamw_cpu(&args);
    }
    HR_RETURN_CUDA(adamw_cuda(&args, exec), exec);
}
