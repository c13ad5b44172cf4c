/* adamw8bit.c: hr_adamw8bit: checks, then the kernel of the device. */
#include "kernels/optim/adamw8bit.h"

#include <inttypes.h>
#include <string.h>

#include "capi/check/adamw_checks.h"
#include "capi/check/quant.h"
#include "capi/check/step.h"
#include "capi/check/weights_checks.h"

/* Copies a caller's config, whose header may be older, over `own`, which holds the defaults. The
 * outer and the inner struct have sizes of their own: members after the inner one begin where it
 * ends. */
static hr_status copy_config(hr_adamw8bit_config *own, const hr_adamw8bit_config *config,
                             int has_steps)
{
    const size_t begin = offsetof(hr_adamw8bit_config, adamw), size = config->size;
    const size_t most = sizeof *own - offsetof(hr_adamw8bit_config, block_size);
    size_t end = begin + offsetof(hr_adamw_config, beta1);
    if (size >= end) {
        HR_TRY(adamw_check_config("hr_adamw8bit", "config->adamw.", &own->adamw, &config->adamw,
                                  has_steps));
        end = begin + config->adamw.size;
    }
    HR_REQUIRE(size >= end && size - end <= most && size % 4 == 0,
               "hr_adamw8bit: config->size is %zu, wanted %zu, or %zu or more of an older header; "
               "start from HR_ADAMW8BIT_CONFIG_INIT",
               size, sizeof *own, end);
    memcpy(&own->block_size, (const char *)config + end, size - end);
    return HR_OK;
}

static hr_status check_config(const hr_adamw8bit_config *config)
{
    HR_REQUIRE(!config->adamw.amsgrad, "hr_adamw8bit: amsgrad is %d, wanted 0",
               config->adamw.amsgrad);
    const int32_t size = config->block_size;
    HR_REQUIRE(size == 64 || size == 128 || size == 256 || size == 512,
               "hr_adamw8bit: block_size is %" PRId32 ", wanted 64, 128, 256 or 512", size);
    if (!config->bnb_exact)
        return HR_OK;
    HR_REQUIRE(config->adamw.decoupled, "hr_adamw8bit: bnb_exact needs decoupled to be 1");
    HR_REQUIRE(size == 256, "hr_adamw8bit: block_size is %" PRId32 ", but bnb_exact needs 256",
               size);
    HR_REQUIRE(!config->adamw.step.skip_nonfinite,
               "hr_adamw8bit: bnb_exact excludes skip_nonfinite");
    HR_REQUIRE(!config->seeds, "hr_adamw8bit: bnb_exact excludes seeds");
    HR_REQUIRE(!config->adamw.step.weights, "hr_adamw8bit: bnb_exact excludes weights");
    return HR_OK;
}

static hr_status check_lists(const adamw8bit_args *a)
{
    HR_REQUIRE(a->params, "hr_adamw8bit: params is NULL");
    const int64_t count = a->params->count;
    const int32_t size = a->config->block_size;
    HR_TRY(hr_check_list("hr_adamw8bit", "params", a->params, count, NULL, HR_FLOATS));
    const int64_t *const numel = a->params->numel;
    HR_TRY(hr_check_list("hr_adamw8bit", "exp_avgs", a->exp_avgs, count, numel, HR_BIT(HR_U8)));
    HR_TRY(quant_check_absmaxs("hr_adamw8bit", "exp_avg_absmaxs", a->exp_avg_absmaxs, a->params,
                               size));
    HR_TRY(
        hr_check_list("hr_adamw8bit", "exp_avg_sqs", a->exp_avg_sqs, count, numel, HR_BIT(HR_U8)));
    HR_TRY(quant_check_absmaxs("hr_adamw8bit", "exp_avg_sq_absmaxs", a->exp_avg_sq_absmaxs,
                               a->params, size));
    HR_TRY(step_check_steps("hr_adamw8bit", a->steps, count));
    HR_TRY(weights_check("hr_adamw8bit", a->config->adamw.step.weights, a->params));
    HR_TRY(hr_check_list("hr_adamw8bit", "grads", a->grads, count, numel, HR_FLOATS));
    return HR_OK;
}

hr_status hr_adamw8bit(const hr_tensor_list *params, const hr_tensor_list *exp_avgs,
                       const hr_tensor_list *exp_avg_absmaxs, const hr_tensor_list *exp_avg_sqs,
                       const hr_tensor_list *exp_avg_sq_absmaxs, const hr_tensor_list *steps,
                       const hr_tensor_list *grads, const hr_adamw8bit_config *config,
                       const hr_exec *exec)
{
    hr_adamw8bit_config own = HR_ADAMW8BIT_CONFIG_INIT;
    hr_weights own_weights = HR_WEIGHTS_INIT;
    const adamw8bit_args args = {
        .params = params,
        .exp_avgs = exp_avgs,
        .exp_avg_absmaxs = exp_avg_absmaxs,
        .exp_avg_sqs = exp_avg_sqs,
        .exp_avg_sq_absmaxs = exp_avg_sq_absmaxs,
        .steps = steps,
        .grads = grads,
        .config = &own,
    };
    HR_REQUIRE(config, "hr_adamw8bit: config is NULL");
    HR_TRY(copy_config(&own, config, steps != NULL));
    HR_TRY(check_config(&own));
    HR_TRY(weights_copy("hr_adamw8bit", &own_weights, &own.adamw.step.weights));
    HR_TRY(hr_check_exec("hr_adamw8bit", exec));
    HR_TRY(check_lists(&args));
    if (exec->device == HR_CPU) {
        HR_TRY(step_check_values("hr_adamw8bit", &own.adamw.step, steps));
        return adamw8bit_cpu(&args);
    }
    HR_RETURN_CUDA(adamw8bit_cuda(&args, exec), exec);
}
